"""Vision-language models compared with `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.engine.worker.core import EngineCore
from tests.engine.conftest import drive
from tests.engine.models.tiny_models import difference
from tests.engine.vision import hf_reference
from tests.engine.vision.tiny_models import FAMILIES, TinyVisionModel, make_image, preprocess, run, save

PROMPTS: list[tuple[str, tuple[Any, ...]]] = [
    ("What is this?\n@ Say it.", (make_image(1, 70, 40),)),
    ("@@", (make_image(2, 33, 90, "JPEG"), make_image(1, 70, 40))),
    ("Only text here, and a good deal of it.", ()),
    (
        "<turn>user\n@\nand\n\n@ or @?<turn>",
        (make_image(3, 20, 20), make_image(4, 64, 64, "WEBP"), make_image(3, 20, 20)),
    ),
]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, TinyVisionModel] = {}

    def get(name: str) -> TinyVisionModel:
        if name not in made:
            made[name] = save(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_logits_match_transformers(tiny_model: Any, name: str) -> None:
    model = tiny_model(name)
    loaded = model.load()
    expected = [hf_reference.logits(model, text, *images) for text, images in PROMPTS]
    prompts = preprocess(loaded, *(model.ask("a", text, *images) for text, images in PROMPTS))
    assert [tokens for tokens, _ in prompts] == [tokens for tokens, _ in expected]
    alone = [run(loaded, [each])[0] for each in prompts]
    for batch in (alone, run(loaded, prompts), run(loaded, prompts, chunk=13)):
        for got, (_, wanted) in zip(batch, expected, strict=True):
            assert difference(got, wanted) < 1e-4
    decoded = run(loaded, prompts[:1], chunk=1)
    torch.testing.assert_close(decoded[0], alone[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "llava", "gemma3"])
@pytest.mark.parametrize("budget", [512, 16])
def test_greedy_tokens_match_transformers(tiny_model: Any, name: str, budget: int) -> None:
    model = tiny_model(name)
    core = EngineCore(model.load(), SchedulerLimits(step_tokens=budget, max_running=8), kv_cache_tokens=1024)
    end = model.hf_model.config.get_text_config().eos_token_id  # transformers suppresses it up to min_new_tokens
    requests = [
        model.ask(str(i), text, *images, max_tokens=12, logit_bias={end: -1000.0})
        for i, (text, images) in enumerate(PROMPTS)
    ]
    answers = drive(core, requests)
    core.close()
    for i, (text, images) in enumerate(PROMPTS):
        assert answers[str(i), 0].tokens == hf_reference.greedy(model, 12, text, *images)


@pytest.mark.parametrize("name", ["idefics3", "smolvlm", "qwen2_5_vl", "gemma3"])
def test_low_detail_uses_fewest_tokens(tiny_model: Any, name: str) -> None:
    model = tiny_model(name)
    loaded = model.load()
    low, high = make_image(5, 1000, 700, detail="low"), make_image(5, 1000, 700, detail="high")
    (few, _), (many, _) = prompts = preprocess(loaded, model.ask("a", "So: @", low), model.ask("b", "So: @", high))
    shrunk = make_image(5, 1000, 700)
    pixels = hf_reference.open_pixels(shrunk)
    pixels.thumbnail((512, 512), hf_reference.BICUBIC)
    options = {"do_image_splitting": False} if name in ("idefics3", "smolvlm") else {}
    expected = hf_reference.logits_of_pixels(model, "So: @", pixels, **options)
    assert few == expected[0]
    assert difference(run(loaded, prompts[:1])[0], expected[1]) < 1e-4
    assert len(few) < len(many) if options else len(few) <= len(many)


def test_gemma_pan_and_scan_matches_transformers(tmp_path: Any) -> None:
    pan_and_scan = {"min_crop_size": 16, "max_num_crops": 4, "min_ratio_to_activate": 1.2}
    options = {"do_pan_and_scan": True, **{f"pan_and_scan_{key}": value for key, value in pan_and_scan.items()}}
    model = save("gemma3", tmp_path, **options)
    loaded = model.load()
    wide = make_image(6, 120, 40)
    prompts = preprocess(loaded, model.ask("a", "Look:\n@\nWell?", wide))
    tokens, expected = hf_reference.logits(model, "Look:\n@\nWell?", wide, **options)
    assert prompts[0][0] == tokens
    assert tokens.count(loaded.vision.reader.config.image_token_id) == 4 * 16  # type: ignore[union-attr]
    assert difference(run(loaded, prompts)[0], expected) < 1e-4


@pytest.mark.parametrize("name", ["smolvlm", "qwen2_5_vl", "llava", "gemma3"])
@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_bf16_and_int8_are_batch_invariant(tiny_model: Any, name: str, dtype: str) -> None:
    model = tiny_model(name)
    loaded = model.load(dtype)
    prompts = preprocess(loaded, *(model.ask("a", text, *images) for text, images in PROMPTS))
    alone = [run(loaded, [each])[0] for each in prompts]
    for one, other, pieces in zip(alone, run(loaded, prompts), run(loaded, prompts, chunk=13), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, pieces)
    for got, (text, images) in zip(alone, PROMPTS, strict=True):
        wanted = hf_reference.logits(model, text, *images)[1]
        assert float((got - wanted).norm() / wanted.norm()) < {"bf16": 0.06, "int8": 0.15}[dtype]


def test_int8_does_not_quantize_vision_tower(tiny_model: Any) -> None:
    from torch import nn

    model: Any = tiny_model("gemma3").load("int8").model
    inner = model.model.model
    assert any(type(module) is nn.Linear for module in inner.vision_tower.modules())
    assert not any(type(module) is nn.Linear for module in inner.language_model.modules())
    assert {p.dtype for p in inner.vision_tower.parameters()} <= {torch.bfloat16, torch.float32}
