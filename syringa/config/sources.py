"""Where settings come from: flags, variables and one file."""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_origin

import msgspec

from syringa.config.checking import Fault, check, expected, is_finite, unknown
from syringa.config.lines import find_lines, line_of
from syringa.config.models import ReadDefaults, read_tables
from syringa.config.settings import FIELDS, HINTS, PREFIX, Config, bare_type, variable
from syringa.errors import ConfigError

FILE_NAME = "syringa.toml"
OTHER_VARIABLES = ("SYRINGA_CONFIG", "SYRINGA_HOME")  # where this file is, and where models are kept

_AT_LINE = re.compile(r" \(at line (?P<line>\d+), column \d+\)$")


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
    file: Path | None = None,
    read_defaults: ReadDefaults | None = None,
) -> Config:
    """Reads every source once. A flag that is None was not given. Raises `ConfigError` with one line."""
    environ = os.environ if environ is None else environ
    if file is None and environ.get(variable("config")):
        file = Path(environ[variable("config")])
    source = _File(file, folder or Path.cwd())
    values = source.settings()
    for name in environ:
        _check_variable(name)
    for name in FIELDS:
        if text := environ.get(variable(name)):
            values[name] = _from_text(name, text, variable(name))
    for name, value in (flags or {}).items():
        if value is not None and value != () and value != []:
            values[name] = _from_text(name, value, "--" + name.replace("_", "-"))
    config = Config(**values)
    _check(config)
    if (models := source.models(config, read_defaults)) is not None:
        config = msgspec.structs.replace(config, models=models)
    return config


class _File:
    """`syringa.toml`, if there is one."""

    def __init__(self, file: Path | None, folder: Path) -> None:
        self._name = str(file) if file is not None else FILE_NAME
        self._text = ""
        try:
            self._text = (file or folder / FILE_NAME).read_text(encoding="utf-8")
            self._table = tomllib.loads(self._text)
        except FileNotFoundError:
            if file is not None:
                raise ConfigError(f"{file}: there is no such file") from None
            self._table = {}
        except tomllib.TOMLDecodeError as error:
            said, found = str(error), _AT_LINE.search(str(error))
            where = f"{self._name}, line {found['line']}" if found else self._name
            raise ConfigError(f"{where}: cannot be read: {_AT_LINE.sub('', said)}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._name}: cannot be read: {error}") from None

    def settings(self) -> dict[str, Any]:
        values = {}
        for key, value in self._table.items():
            name = key.replace("-", "_")
            if name == "models":
                continue
            try:
                if name not in FIELDS:
                    raise unknown((key,), [*FIELDS, "models"], "setting")
                values[name] = check((key,), _stripped(name, value), HINTS[name])
            except Fault as fault:
                raise self._error(fault, shown=name != "api_key") from None
        return values

    def models(self, config: Config, read_defaults: ReadDefaults | None) -> Any:
        if "models" not in self._table:
            return None
        try:
            return read_tables(self._table["models"], config, read_defaults)
        except Fault as fault:
            raise self._error(fault) from None

    def _error(self, fault: Fault, *, shown: bool = True) -> ConfigError:
        line = line_of(find_lines(self._text), fault.path)
        where = self._name if line is None else f"{self._name}, line {line}"
        said = fault.message
        if not shown:  # it is a secret
            said = f"{fault.path[0]}: expected {said.rpartition(': expected ')[2]}"
        return ConfigError(f"{where}: {said}", param=str(fault.path[-1]))


def _check_variable(name: str) -> None:
    """A mistyped variable must not be taken for one that was never set."""
    if not name.startswith(PREFIX) or name in OTHER_VARIABLES:
        return
    known = [variable(field) for field in FIELDS]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise ConfigError(f"{name}: unknown variable" + (f"; did you mean {near[0]}?" if near else ""), param=name)


def _from_text(name: str, value: Any, source: str) -> Any:
    """Variables and flags are always text."""
    try:
        return msgspec.convert(_stripped(name, value), HINTS[name], strict=False)
    except msgspec.ValidationError as error:
        shown = "" if name == "api_key" else f" {value!r}"
        raise ConfigError(f"{source}{shown}: expected {expected(HINTS[name], str(error))}", param=name) from None


def _stripped(name: str, value: Any) -> Any:
    """A list may be written as one text with commas."""
    if get_origin(bare_type(name)) is not tuple:
        return value
    value = value.split(",") if isinstance(value, str) else value
    if not isinstance(value, list | tuple):
        return value
    return [item.strip() if isinstance(item, str) else item for item in value]


def _check(config: Config) -> None:
    if any(not key or not key.isascii() or key != key.strip() for key in config.api_key):
        raise ConfigError("api_key: a key is one or more ASCII characters without surrounding spaces", param="api_key")
    if any(not name for name in config.served_model_name):
        raise ConfigError("served_model_name: a name cannot be empty", param="served_model_name")
    for name in FIELDS:
        if not is_finite(getattr(config, name)):
            raise ConfigError(f"{name}: expected a finite number", param=name)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
