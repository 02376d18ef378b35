"""Pools of the configuration: parse the tables `[[pools]]`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, get_type_hints

import msgspec

from syringa.config.validation import InvalidValue, Path, base_type, check_value, format_path, format_value, unknown_key
from syringa.fleet.pools import DEFAULT_POOL, PoolSpec
from syringa.fleet.schedule import DAYS, PoolSchedule, PoolWindow, check_time, find_zone

MAX_NAME_LENGTH = 63


def read_pools(tables: Any) -> tuple[PoolSpec, ...]:
    """Parse the tables `[[pools]]` of a file. Raises `InvalidValue`."""
    path: Path = ("pools",)
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise InvalidValue(path, "pools: expected tables, each under a heading [[pools]]")
    pools: list[PoolSpec] = []
    for index, table in enumerate(tables):
        spec = _read_table(table, PoolSpec, (*path, index))
        where: Path = (*path, index, "name")
        _check_name(where, spec.name)
        if any(spec.name == other.name for other in pools):
            raise _invalid(where, spec.name, "another pool has this name already")
        _check_selector((*path, index, "selector"), spec.selector)
        pools.append(spec)
    return tuple(pools)


def check_pool_names(path: Path, names: Collection[str], pools: Collection[PoolSpec]) -> None:
    """Raise `InvalidValue` unless the pools that a model names exist, each named once."""
    known = [pool.name for pool in pools]
    known = known if DEFAULT_POOL in known else [*known, DEFAULT_POOL]
    for index, name in enumerate(names):
        if name not in known:
            raise _invalid((*path, index), name, f"there is no such pool; expected one of {', '.join(known)}")
    if len(set(names)) < len(names):
        raise _invalid(path, list(names), "a pool is named twice")


def _read_table(table: Any, kind: type[Any], path: Path) -> Any:
    """Convert a table to a type whose fields may be tables themselves."""
    if not isinstance(table, dict):
        raise _invalid(path, table, f"expected a table with {', '.join(kind.__struct_fields__)}")
    hints = get_type_hints(kind, include_extras=True)
    values = {}
    for key, value in table.items():
        name, where = key.replace("-", "_"), (*path, key)
        if name not in hints:
            raise unknown_key(where, list(hints))
        values[name] = _read_field(value, kind, name, hints[name], where)
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in values:
            raise InvalidValue((*path, field.name), f"{format_path((*path, field.name))} is missing")
    found = kind(**values)
    if isinstance(found, PoolSchedule):
        _check_schedule(path, found)
    elif isinstance(found, PoolWindow):
        _check_window(path, found)
    return found


def _read_field(value: Any, kind: type[Any], name: str, hint: Any, path: Path) -> Any:
    inner = base_type(hint)
    if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
        return _read_table(value, inner, path)
    if (kind, name) == (PoolSchedule, "windows"):
        if not isinstance(value, list):
            raise _invalid(path, value, "expected a list of tables with days, start and end")
        return tuple(_read_table(each, PoolWindow, (*path, index)) for index, each in enumerate(value))
    if (kind, name) == (PoolWindow, "days"):
        if not isinstance(value, list) or not value or any(each not in DAYS for each in value):
            raise _invalid(path, value, f"expected a list of days: {', '.join(DAYS)}")
        return tuple(value)
    if (kind, name) in ((PoolWindow, "start"), (PoolWindow, "end")):
        try:
            check_time(value if isinstance(value, str) else "", end=name == "end")
        except ValueError as error:
            raise _invalid(path, value, str(error)) from None
        return value
    if (kind, name) == (PoolSpec, "selector"):
        if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
            raise _invalid(path, value, "expected a table of labels, whose values are texts")
        return value
    return check_value(path, value, hint)


def _check_schedule(path: Path, schedule: PoolSchedule) -> None:
    try:
        find_zone(schedule.timezone)
    except ValueError as error:
        raise _invalid((*path, "timezone"), schedule.timezone, f"{error}; expected one such as Europe/Berlin") from None
    where = (*path, "windows")
    if schedule.mode == "scheduled" and not schedule.windows:
        raise InvalidValue(where, f"{format_path(where)}: mode scheduled needs at least one window")
    if schedule.mode == "always" and schedule.windows:
        raise InvalidValue(where, f"{format_path(where)}: mode always has no windows; set mode to scheduled or idle")


def _check_window(path: Path, window: PoolWindow) -> None:
    if window.start == window.end:
        raise InvalidValue(
            path, f"{format_path(path)}: start and end are the same; for all day, leave out both, or end at 24:00"
        )


def _check_selector(path: Path, selector: Mapping[str, str]) -> None:
    for key, value in selector.items():
        if not key or not value:
            raise _invalid(path, dict(selector), "a label and its value cannot be empty")


def _check_name(path: Path, name: str) -> None:
    """Names are part of URLs, log lines and labels of nodes."""
    if not name or len(name) > MAX_NAME_LENGTH or not all(each.isascii() and _is_name_letter(each) for each in name):
        raise _invalid(path, name, f"expected 1 to {MAX_NAME_LENGTH} letters, digits, hyphens, underscores and periods")


def _is_name_letter(letter: str) -> bool:
    return letter.isalnum() or letter in "-_."


def _invalid(path: Path, value: Any, problem: str) -> InvalidValue:
    return InvalidValue(path, f"{format_path(path)} {format_value(value)}: {problem}")
