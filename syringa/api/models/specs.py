"""The models that a server serves, with their names. Imports little, because `syringa serve` waits for it."""

from __future__ import annotations

import msgspec

from syringa import modelfiles
from syringa.config import Config, ModelSpec, model_specs


def serving_specs(config: Config) -> tuple[ModelSpec, ...]:
    """Return the specs of all models of a server, each with an id; the first is the default. Raises `StartupError`."""
    specs = model_specs(config)
    if config.models:
        return specs
    return tuple(named(spec, modelfiles.describe(modelfiles.locate(spec.path))) for spec in specs)


def named(spec: ModelSpec, description: modelfiles.ModelDescription) -> ModelSpec:
    """Return the spec with the model's own name and the configured path as aliases."""
    id, *aliases = dict.fromkeys((spec.id or description.name, *spec.aliases, description.name, spec.path))
    return msgspec.structs.replace(spec, id=id, aliases=tuple(aliases))
