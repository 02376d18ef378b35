"""Models that run on `transformers`' definitions with this engine's attention and KV cache."""

from __future__ import annotations

import importlib.util

from syringa.errors import ModelError


def check_transformers(name: str) -> None:
    """Raise `ModelError` if the model with this name cannot run because `transformers` is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise missing_transformers(name)


def missing_transformers(name: str) -> ModelError:
    return ModelError(
        f"{name} runs on transformers' definition of it, which is not installed: pip install 'syringa[models]'"
    )
