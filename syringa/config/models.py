"""Reads what is said of models, and fills in what is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

import msgspec

from syringa.config.checking import Fault, Path, check, shown, spell, unknown
from syringa.config.settings import Config
from syringa.config.specs import INHERITED, ModelSpec, Prices
from syringa.errors import ConfigError, SyringaError

LONGEST_NAME = 200
RESERVED = "default"  # in a request it is the default model, whichever that is

ReadDefaults = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Only the endpoints know what a field of a request may be. Raises an error with the `param` that is at fault."""

_HINTS = get_type_hints(ModelSpec, include_extras=True)
_PRICES = get_type_hints(Prices, include_extras=True)


def read_tables(tables: Any, config: Config, read_defaults: ReadDefaults | None) -> tuple[ModelSpec, ...]:
    """The tables `[[models]]` of a file. Raises `Fault`."""
    path: Path = ("models",)
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise Fault(path, "models: expected tables, each under [[models]]")
    specs = tuple(_read(table, config, (*path, index), read_defaults) for index, table in enumerate(tables))
    _check_names(specs)
    return specs


def read_model(fields: Mapping[str, Any], config: Config, read_defaults: ReadDefaults | None = None) -> ModelSpec:
    """A model that is added while the server runs. Raises `ConfigError`, whose `param` is the key at fault."""
    try:
        return _read(fields, config, (), read_defaults)
    except Fault as fault:
        raise ConfigError(fault.message, param=spell(fault.path) or None) from None


def model_specs(config: Config) -> tuple[ModelSpec, ...]:
    """The models of a server. The first is the default one.

    Without `[[models]]` it is the one that the flat settings describe; its id is empty if only its files know its name.
    """
    if not config.models:
        return (filled_spec(flat_spec(config), config, default=True),)
    if config.served_model_name:
        raise ConfigError("served_model_name: where there are [[models]], each has its own id and aliases")
    default = _default(config)
    if default is None:
        ids = ", ".join(spec.id for spec in config.models)
        raise ConfigError(
            f"model {shown(config.model)}: expected the id of one of the [[models]]: {ids}", param="model"
        )
    others = (spec for spec in config.models if spec is not default)
    return (filled_spec(default, config, default=True), *(filled_spec(spec, config) for spec in others))


def sole_spec(config: Config) -> ModelSpec:
    """The model of a command that runs one: of `[[models]]` the one that `model` names, else what it is a path of."""
    return (_default(config) if config.models else None) or flat_spec(config)


def filled_spec(spec: ModelSpec, config: Config, *, default: bool = False) -> ModelSpec:
    """With what is not said of a model: only the default one is loaded at the start, and only the others are unloaded
    for want of use."""
    preload = default if spec.preload is None else spec.preload
    idle = spec.idle_seconds
    if idle is None:
        idle = 0.0 if preload else config.model_idle
    return msgspec.structs.replace(spec, preload=preload, idle_seconds=idle)


def flat_spec(config: Config) -> ModelSpec:
    names = config.served_model_name or ("",)
    said = {name: getattr(config, name) for name in INHERITED}
    return ModelSpec(id=names[0], aliases=names[1:], path=config.model, **said)


def _default(config: Config) -> ModelSpec | None:
    if config.model == RESERVED:
        return config.models[0]
    return next((spec for spec in config.models if config.model in (spec.id, *spec.aliases)), None)


def _read(table: Mapping[str, Any], config: Config, path: Path, read_defaults: ReadDefaults | None) -> ModelSpec:
    values: dict[str, Any] = {name: getattr(config, name) for name in INHERITED}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in _HINTS:
            raise unknown((*path, key), list(_HINTS))
        where = (*path, key)
        values[name] = _prices(where, value) if name == "prices" else check(where, value, _HINTS[name])
    for name in ("id", "path"):
        if not values.get(name):
            said = "cannot be empty" if name in values else "is missing"
            raise Fault((*path, name), f"{spell((*path, name))} {said}")
    spec = ModelSpec(**values)
    _check_name((*path, "id"), spec.id)
    for index, alias in enumerate(spec.aliases):
        _check_name((*path, "aliases", index), alias)
    if read_defaults is None:
        return spec
    return msgspec.structs.replace(spec, defaults=_defaults((*path, "defaults"), spec.defaults, read_defaults))


def _prices(path: Path, table: Any) -> Prices:
    if not isinstance(table, dict):
        raise Fault(path, f"{spell(path)} {shown(table)}: expected a table with input, cached_input and output")
    values = {}
    for key, value in table.items():
        if key not in _PRICES:
            raise unknown((*path, key), list(_PRICES))
        values[key] = check((*path, key), value, _PRICES[key])
    return Prices(**values)


def _defaults(path: Path, defaults: Mapping[str, Any], read_defaults: ReadDefaults) -> dict[str, Any]:
    try:
        return read_defaults(defaults)
    except SyringaError as error:
        name = (error.param or "").partition(".")[0].partition("[")[0]
        where = (*path, name) if name in defaults else path
        said = error.message.removeprefix(f"{name}: ").rstrip(".")
        value = f" {shown(defaults[name])}" if name in defaults else ""
        raise Fault(where, f"{spell(where)}{value}: {said}") from None


def _check_name(path: Path, name: str) -> None:
    """Names stand in addresses and in log lines."""
    said = ""
    if not name:
        said = "a name cannot be empty"
    elif not name.isprintable() or any(each.isspace() for each in name):
        said = "a name has no spaces and no control characters"
    elif len(name) > LONGEST_NAME:
        said = f"a name has at most {LONGEST_NAME} characters"
    elif name == RESERVED:
        said = "in a request this means the default model; choose another name"
    if said:
        raise Fault(path, f"{spell(path)} {shown(name)}: {said}")


def _check_names(specs: Sequence[ModelSpec]) -> None:
    """A name means one model."""
    owners: dict[str, int] = {}
    for number, spec in enumerate(specs):
        for index, name in enumerate((spec.id, *spec.aliases)):
            owner = owners.setdefault(name, number)
            if index == 0 and owner == number:
                continue
            path: Path = ("models", number, "aliases", index - 1) if index else ("models", number, "id")
            if owner != number:
                raise Fault(path, f"{spell(path)} {shown(name)}: models[{owner}] has this name already")
            if name in (spec.id, *spec.aliases[: index - 1]):
                raise Fault(path, f"{spell(path)} {shown(name)}: the model has this name already")
