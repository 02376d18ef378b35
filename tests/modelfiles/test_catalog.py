from __future__ import annotations

import pytest

from syringa.engine.embedding.size import is_native_embedding
from syringa.engine.models.config import is_native
from syringa.modelfiles import catalog
from syringa.modelfiles.gguf_architectures import ARCHITECTURES

# `general.architecture` of the GGUF files.
ARCHITECTURE = {
    "default": "llama",
    "qwen2.5-coder-1.5b": "qwen2",
    "qwen3-0.6b": "qwen3",
    "gemma-3-1b": "gemma3",
    "llama-3.2-1b": "llama",
    "qwen3-1.7b": "qwen3",
    "smollm3-3b": "smollm3",
    "llama-3.2-3b": "llama",
    "phi-4-mini": "phi3",
    "gemma-3-4b": "gemma3",
    "qwen3-4b": "qwen3",
    "qwen3-4b-2507": "qwen3",
    "mistral-7b": "llama",
    "qwen2.5-coder-7b": "qwen2",
    "llama-3.1-8b": "llama",
    "qwen3-8b": "qwen3",
    "qwen3-14b": "qwen3",
    "gpt-oss-20b": "gpt-oss",
    "qwen3-30b-a3b": "qwen3moe",
    "qwen3-32b": "qwen3",
}


def test_all_models_run_natively() -> None:
    for model in catalog.CATALOG:
        if model.kind == "generate":
            assert is_native({"model_type": ARCHITECTURES[ARCHITECTURE[model.name]].model_type}), model.name
        else:
            assert is_native_embedding({"model_type": "bert"})


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("qwen3:4b", "qwen3-4b"),
        ("QWEN3-4B", "qwen3-4b"),
        ("llama3.2:3b", "llama-3.2-3b"),
        ("gpt-oss:20b", "gpt-oss-20b"),
        ("phi4-mini:latest", "phi-4-mini"),
        ("qwen2.5-coder:1.5b", "qwen2.5-coder-1.5b"),
    ],
)
def test_models_are_found_by_the_names_of_ollama(name: str, found: str) -> None:
    model = catalog.find(name)
    assert model is not None
    assert model.name == found


def test_names_differ_in_more_than_separators() -> None:
    assert all(catalog.find(model.name) is model for model in catalog.CATALOG)
    assert catalog.find("qwen3-5b") is None
    assert catalog.find("org/qwen3-4b") is None


def test_models_are_in_the_order_of_their_downloads() -> None:
    models = list(catalog.CATALOG)
    assert models == sorted(models, key=lambda model: (model.kind != "generate", model.download_bytes))
    assert len({model.name for model in models}) == len(models)
