"""Vision-language models that were not tested are refused before their weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from syringa.engine.loading.loaded_model import LoadOptions
from syringa.engine.loading.loader import load_model
from syringa.errors import ModelError
from tests.engine.vision.tiny_models import FAMILIES, tokenizer


def folder(path: Path, name: str, architecture: str, changes: dict[str, Any], processor: Any = True) -> str:
    from transformers import AutoConfig

    kind, settings, processor_type, _ = FAMILIES[name]
    config = AutoConfig.for_model(kind, **settings).to_dict()
    (path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]} | changes))
    (path / "model.safetensors").write_bytes(b"no weights")
    tokenizer(name).save(str(path / "tokenizer.json"))
    if processor:
        (path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": processor_type}))
    return str(path)


LLAVA, GEMMA = "LlavaForConditionalGeneration", "Gemma3ForConditionalGeneration"
REFUSED = [
    ("llava", LLAVA, {"model_type": "llava_next"}, "way of 'llava_next' have not been checked; .*gemma3, idefics3"),
    ("llava", LLAVA, {"vision_config": {"model_type": "pixtral"}}, "kind 'pixtral' has not been checked for llava"),
    ("llava", LLAVA, {"image_token_index": 100_000}, "outside its vocabulary"),
    ("llava", LLAVA, {"image_token_index": 318}, "no token of its own for the image_token_id 318"),
    ("gemma3", "Gemma3ForCausalLM", {}, "only Gemma3ForConditionalGeneration generates text"),
    ("gemma3", GEMMA, {"model_type": "gemma3n", "audio_config": {"hidden_size": 8}}, "way of 'gemma3n'"),
]


@pytest.mark.parametrize(("name", "architecture", "changes", "reason"), REFUSED)
def test_loader_refuses_untested_vision_models(
    tmp_path: Path, name: str, architecture: str, changes: dict[str, Any], reason: str
) -> None:
    path = folder(tmp_path, name, architecture, changes)
    with pytest.raises(ModelError, match=f"^{architecture} cannot be run: .*{reason}"):
        load_model(LoadOptions(model=path, dtype="fp32", threads=1))


def test_loader_refuses_folder_without_image_processor(tmp_path: Path) -> None:
    path = folder(tmp_path, "llava", LLAVA, {}, processor=False)
    with pytest.raises(ModelError, match=r"has no preprocessor_config\.json or processor_config\.json"):
        load_model(LoadOptions(model=path, dtype="fp32", threads=1))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "UnheardOf"}))
    with pytest.raises(ModelError, match="image processor cannot be created"):
        load_model(LoadOptions(model=path, dtype="fp32", threads=1))


def test_loader_reports_unreadable_weights(tmp_path: Path) -> None:
    path = folder(tmp_path, "llava", LLAVA, {})
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(LoadOptions(model=path, dtype="fp32", threads=1))
