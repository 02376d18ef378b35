"""Models of the configuration: parse their tables and fill in defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

import msgspec

from syringa.config.engines import check_engine, refuse_engine
from syringa.config.pools import check_pool_names
from syringa.config.settings import Config
from syringa.config.specs import INHERITED, ModelSpec, Prices
from syringa.config.validation import InvalidValue, Path, check_value, format_path, format_value, unknown_key
from syringa.errors import ConfigError, SyringaError

MAX_NAME_LENGTH = 200
DEFAULT = "default"  # in a request, the name of the default model

ReadDefaults = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Validates the default fields of requests, by the rules of the API. Raises a `SyringaError` with `param`."""

_HINTS = get_type_hints(ModelSpec, include_extras=True)
_PRICES = get_type_hints(Prices, include_extras=True)


def read_tables(tables: Any, config: Config, read_defaults: ReadDefaults | None) -> tuple[ModelSpec, ...]:
    """Parse the tables `[[models]]` of a file. Raises `InvalidValue`."""
    path: Path = ("models",)
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise InvalidValue(path, "models: expected tables, each under a heading [[models]]")
    specs = tuple(_read(table, config, (*path, index), read_defaults) for index, table in enumerate(tables))
    _check_names(specs)
    return specs


def read_model(fields: Mapping[str, Any], config: Config, read_defaults: ReadDefaults | None = None) -> ModelSpec:
    """Parse a model that is added at run time. Raises `ConfigError`, whose `param` is the invalid key."""
    try:
        refuse_engine(fields)
        return _read(fields, config, (), read_defaults)
    except InvalidValue as error:
        raise ConfigError(error.message, param=format_path(error.path) or None) from None


def model_specs(config: Config) -> tuple[ModelSpec, ...]:
    """Return the models of a server. The first is the default model, that of `embedding_model` the last.

    Without `[[models]]`, there is one model beside that, described by the top-level settings. An id is empty if it has
    to be read from the model's files.
    """
    specs = _text_model_specs(config)
    if not config.embedding_model:
        return specs
    index = next((i for i, spec in enumerate(specs) if config.embedding_model in (spec.id, *spec.aliases)), None)
    if index is None:
        # Not what the settings say of the other model, but for where it runs.
        spec = ModelSpec(id="", path=config.embedding_model, device=config.device, threads=config.threads, preload=True)
        return (*specs, complete_spec(spec, config))
    preloaded = msgspec.structs.replace(specs[index], preload=True, idle_seconds=0.0)
    return (*specs[:index], preloaded, *specs[index + 1 :])


def _text_model_specs(config: Config) -> tuple[ModelSpec, ...]:
    if not config.models:
        return (complete_spec(top_level_spec(config), config, default=True),)
    if config.served_model_name:
        raise ConfigError(
            "served_model_name: not allowed together with [[models]]: set id and aliases of each model instead"
        )
    default = _default(config)
    if default is None:
        ids = ", ".join(spec.id for spec in config.models)
        raise ConfigError(
            f"model {format_value(config.model)}: expected the id of one of the [[models]]: {ids}", param="model"
        )
    others = (spec for spec in config.models if spec is not default)
    return (complete_spec(default, config, default=True), *(complete_spec(spec, config) for spec in others))


def single_model_spec(config: Config) -> ModelSpec:
    """Return the model of a command that runs one: the one of `[[models]]` that `model` names, or a path."""
    return (_default(config) if config.models else None) or top_level_spec(config)


def complete_spec(spec: ModelSpec, config: Config, *, default: bool = False) -> ModelSpec:
    """Fill in `preload` and `idle_seconds`: by default, only the default model is preloaded, and only others are
    unloaded when idle."""
    preload = default if spec.preload is None else spec.preload
    idle = spec.idle_seconds
    if idle is None:
        idle = 0.0 if preload else config.model_idle
    return msgspec.structs.replace(spec, preload=preload, idle_seconds=idle)


def top_level_spec(config: Config) -> ModelSpec:
    names = config.served_model_name or ("",)
    inherited = {name: getattr(config, name) for name in INHERITED}
    return ModelSpec(id=names[0], aliases=names[1:], path=config.model, **inherited)


def _default(config: Config) -> ModelSpec | None:
    if config.model == DEFAULT:
        return config.models[0]
    return next((spec for spec in config.models if config.model in (spec.id, *spec.aliases)), None)


def _stays_warm(table: Mapping[str, Any], spec: ModelSpec, config: Config) -> bool:
    """Return whether a model names a minimum of replicas, and a pool that is always open to have them in."""
    given = table.get("replicas")
    explicit = "min" in given if isinstance(given, Mapping) else given is not None
    always = {pool.name for pool in config.pools if pool.schedule.mode == "always"}
    return explicit and spec.replicas.min > 0 and not always.isdisjoint(spec.pools)


def _read(table: Mapping[str, Any], config: Config, path: Path, read_defaults: ReadDefaults | None) -> ModelSpec:
    values: dict[str, Any] = {name: getattr(config, name) for name in INHERITED}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in _HINTS:
            raise unknown_key((*path, key), list(_HINTS))
        where = (*path, key)
        values[name] = _prices(where, value) if name == "prices" else check_value(where, value, _HINTS[name])
    for name in ("id", "path"):
        if not values.get(name):
            problem = "cannot be empty" if name in values else "is missing"
            raise InvalidValue((*path, name), f"{format_path((*path, name))} {problem}")
    spec = check_engine(path, ModelSpec(**values), cluster=config.cluster)
    check_pool_names((*path, "pools"), spec.pools, config.pools)
    if config.cluster and spec.preload is None and _stays_warm(table, spec, config):
        spec = msgspec.structs.replace(spec, preload=True)
    _check_name((*path, "id"), spec.id)
    for index, alias in enumerate(spec.aliases):
        _check_name((*path, "aliases", index), alias)
    if read_defaults is None:
        return spec
    return msgspec.structs.replace(spec, defaults=_defaults((*path, "defaults"), spec.defaults, read_defaults))


def _prices(path: Path, table: Any) -> Prices:
    if not isinstance(table, dict):
        raise InvalidValue(
            path, f"{format_path(path)} {format_value(table)}: expected a table with input, cached_input and output"
        )
    values = {}
    for key, value in table.items():
        if key not in _PRICES:
            raise unknown_key((*path, key), list(_PRICES))
        values[key] = check_value((*path, key), value, _PRICES[key])
    return Prices(**values)


def _defaults(path: Path, defaults: Mapping[str, Any], read_defaults: ReadDefaults) -> dict[str, Any]:
    try:
        return read_defaults(defaults)
    except SyringaError as error:
        name = (error.param or "").partition(".")[0].partition("[")[0]
        where = (*path, name) if name in defaults else path
        message = error.message.removeprefix(f"{name}: ").rstrip(".")
        value = f" {format_value(defaults[name])}" if name in defaults else ""
        raise InvalidValue(where, f"{format_path(where)}{value}: {message}") from None


def _check_name(path: Path, name: str) -> None:
    """Names are part of URLs and log lines."""
    problem = ""
    if not name:
        problem = "a name cannot be empty"
    elif not name.isprintable() or any(each.isspace() for each in name):
        problem = "a name has no spaces and no control characters"
    elif len(name) > MAX_NAME_LENGTH:
        problem = f"a name has at most {MAX_NAME_LENGTH} characters"
    elif name == DEFAULT:
        problem = "reserved for the default model; choose another name"
    elif "*" in (name if path[-1] == "id" else name[:-1]):
        problem = "only an alias is a pattern, and has its * at the end"
    if problem:
        raise InvalidValue(path, f"{format_path(path)} {format_value(name)}: {problem}")


def _check_names(specs: Sequence[ModelSpec]) -> None:
    """Raise `InvalidValue` for a name that occurs twice."""
    owners: dict[str, int] = {}
    for number, spec in enumerate(specs):
        for index, name in enumerate((spec.id, *spec.aliases)):
            owner = owners.setdefault(name, number)
            if index == 0 and owner == number:
                continue
            path: Path = ("models", number, "aliases", index - 1) if index else ("models", number, "id")
            if owner != number:
                raise InvalidValue(
                    path, f"{format_path(path)} {format_value(name)}: models[{owner}] has this name already"
                )
            if name in (spec.id, *spec.aliases[: index - 1]):
                raise InvalidValue(path, f"{format_path(path)} {format_value(name)}: the model has this name already")
