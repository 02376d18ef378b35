"""The GPU's decoder, by the kernels' references, against `transformers`: every family, paged, chunked and mixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from syringa.engine.scheduling.scheduler import Limits
from syringa.engine.worker.core import EngineCore
from tests.engine.conftest import drive, request
from tests.engine.gpu.small_gpu import load_small
from tests.engine.models.small import PROMPTS, SIZES, difference, reference, run, save
from tests.engine.models.test_decoder import MODELS


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in made:
            family, changes = MODELS[name]
            folder = tmp_path_factory.mktemp(family)
            made[name] = folder, save(folder, AutoConfig.for_model(family, **(SIZES | changes)))
        return made[name]

    return get


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(small: Any, name: str) -> None:
    folder, theirs = small(name)
    loaded = load_small(folder)
    expected = [reference(theirs, prompt) for prompt in PROMPTS]
    # Whole, in chunks beside others (so that some add one token and some several), and token by token.
    for batch in (run(loaded, PROMPTS), run(loaded, PROMPTS, chunk=15), run(loaded, PROMPTS, chunk=1)):
        for got, wanted in zip(batch, expected, strict=True):
            assert difference(got, wanted) < 1e-3


@pytest.mark.parametrize("name", ["llama biased", "mistral sliding", "qwen2", "qwen3", "smollm3"])
def test_greedy_generation_is_that_of_transformers(small: Any, name: str) -> None:
    folder, theirs = small(name)
    core = EngineCore(load_small(folder), Limits(step_tokens=32, max_running=4), kv_cache_tokens=1024)
    prompts = [*PROMPTS, PROMPTS[0][:20], PROMPTS[2][:33]]
    answers = drive(
        core,
        [
            request(str(i), prompt, max_tokens=9, temperature=0.0, stopping={"ignore_eos": True})
            for i, prompt in enumerate(prompts)
        ],
    )
    core.close()
    for i, prompt in enumerate(prompts):
        tokens = list(prompt)
        for _ in range(9):
            tokens.append(int(reference(theirs, tokens)[-1].argmax()))
        assert answers[str(i), 0].tokens == tokens[len(prompt) :]


@pytest.mark.parametrize(("dtype", "most"), [("bf16", 0.05), ("fp8", 0.15)])
def test_smaller_precisions_stay_near(small: Any, dtype: str, most: float) -> None:
    folder, theirs = small("qwen3")
    loaded = load_small(folder, dtype)
    for got, prompt in zip(run(loaded, PROMPTS, chunk=15), PROMPTS, strict=True):
        error = difference(got, reference(theirs, prompt))
        assert 0 < error < most
