"""The models that a server serves, with their names. Imports little, because `syringa serve` waits for it."""

from __future__ import annotations

from typing import Any

import msgspec

from syringa import modelfiles
from syringa.config import Config, ModelSpec, model_specs
from syringa.config.specs import INHERITED
from syringa.errors import ConfigError

_OF_ONE_MODEL = ("chat_template", "tool_format", "reasoning_format")  # settings that say what a model was trained on
_OF_THE_MACHINE = ("device", "threads")


def serving_specs(config: Config) -> tuple[ModelSpec, ...]:
    """Return the specs of all models of a server, each with an id; the first is the default. Raises `StartupError`."""
    specs = tuple(
        named(spec, modelfiles.describe(modelfiles.locate(spec.path))) if not (config.models and spec.id) else spec
        for spec in model_specs(config)
    )
    ids = [spec.id for spec in specs]
    if config.embedding_model and ids[-1] in ids[:-1]:
        raise ConfigError(
            f"embedding_model {config.embedding_model!r}: the model is called {ids[-1]!r}, as another one is: "
            "describe it under [[models]] with another id",
            param="embedding_model",
        )
    return specs


def pulled_fields(path: str, config: Config) -> dict[str, Any]:
    """Return the fields of the configuration of a model that was downloaded. Raises `ModelError`.

    Settings for the model that the server was started with are not those of another: its template, a longer context
    than the new one has, and, where that makes embeddings, all but where it runs.
    """
    files = modelfiles.locate(path)
    own: tuple[str, ...]
    if modelfiles.read_embedding_spec(files) is not None:
        own = tuple(name for name in INHERITED if name not in _OF_THE_MACHINE)
    elif config.max_model_len > modelfiles.describe(files).max_model_len:
        own = (*_OF_ONE_MODEL, "max_model_len")
    else:
        own = _OF_ONE_MODEL
    defaults = {field.name: field.default for field in msgspec.structs.fields(ModelSpec) if field.name in own}
    changed = {name: value for name, value in defaults.items() if getattr(config, name) != value}
    return {"path": path, **msgspec.to_builtins(changed)}


def named(spec: ModelSpec, description: modelfiles.ModelDescription) -> ModelSpec:
    """Return the spec with the model's own name and the configured path as aliases."""
    id, *aliases = dict.fromkeys((spec.id or description.name, *spec.aliases, description.name, spec.path))
    return msgspec.structs.replace(spec, id=id, aliases=tuple(aliases))
