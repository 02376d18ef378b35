"""A real Gemma 3 GGUF file, which `GEMMA_GGUF` names, compared with `transformers`' own reader of GGUF files.

`make test MODELS=1` with `GEMMA_GGUF=/path/to/gemma-3-270m-Q4_K_M.gguf`, or another size. Its terms do not allow to
keep it here.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from syringa.engine.loading.loaded_model import LoadedModel, LoadOptions
from syringa.engine.loading.loader import load_model
from syringa.engine.models.decoder import Decoder
from syringa.engine.worker.core import EngineCore
from syringa.modelfiles import describe, load_tokenizer, locate
from tests.engine.conftest import drive, request
from tests.engine.models.tiny_models import difference, run
from tests.engine.test_perplexity import TEXTS, perplexity
from tests.larger_model import MODELS

PATH = os.environ.get("GEMMA_GGUF", "")
DATA = Path(__file__).parents[3] / "data"
pytestmark = pytest.mark.skipif(not MODELS or not PATH, reason="set MODELS=1, and GEMMA_GGUF to a Gemma 3 GGUF file")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(locate(PATH))


def load(dtype: str) -> LoadedModel:
    loaded = load_model(LoadOptions(model=PATH, dtype=dtype, max_model_len=2048, device="cpu"))
    assert isinstance(loaded.model, Decoder)
    return loaded


def transformers_model() -> Any:
    """Return the model as `transformers` reads it, in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    fields = load_gguf_checkpoint(PATH)["config"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), attn_implementation="eager").float().eval()
    report = model.load_state_dict(load_gguf_checkpoint(PATH, True, model)["tensors"], strict=False)
    assert not report.unexpected_keys
    assert set(report.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def test_gemma_tokens_match_transformers(tokenizer: Any) -> None:
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, fields, _ = get_gguf_tokenizer(PATH)
    expected = convert_gguf_tokenizer(architecture, fields)[0]
    texts = json.loads((DATA / "tokenizer_smollm2.json").read_text())["texts"]
    for text in [*texts, *(path.read_text() for path in TEXTS)]:
        # Longer runs of spaces are split into the longest tokens first, as SentencePiece does; `transformers` does not.
        text = re.sub(" {32,}", " " * 31, text)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == expected.encode(text, add_special_tokens=False).ids, text[:80]
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_gemma_logits_match_transformers(tokenizer: Any) -> None:
    # More tokens than the window.
    prompt = [describe(locate(PATH)).bos_token, *tokenizer.encode(TEXTS[0].read_text()).ids[:700]]
    got = run(load("fp32"), [prompt])[0]
    with torch.inference_mode():
        expected = transformers_model()(torch.tensor([prompt]), use_cache=False).logits[0]
    assert difference(got, expected) < 1e-3


def test_gemma_knows_the_capital_of_france(tokenizer: Any) -> None:
    core = EngineCore(load("auto"), kv_cache_tokens=2048)
    prompt = tokenizer.encode("<bos>Question: What is the capital of France?\nAnswer:").ids
    answer = drive(core, [request("0", prompt, max_tokens=8, temperature=0.0)])["0", 0]
    core.close()
    assert "Paris" in tokenizer.decode(answer.tokens)


@pytest.mark.parametrize("dtype", ["int8", "gguf"])
def test_gemma_perplexity_is_close_to_fp32(tokenizer: Any, dtype: str) -> None:
    figures = {}
    tokens = [describe(locate(PATH)).bos_token, *tokenizer.encode(TEXTS[0].read_text()).ids[:300]]
    for each in ("fp32", dtype):
        core = EngineCore(load(each), kv_cache_tokens=2048)
        figures[each] = perplexity(core, tokens)
        core.close()
    print(figures)
    assert figures[dtype] / figures["fp32"] < 1.05
    assert figures["fp32"] < 100
