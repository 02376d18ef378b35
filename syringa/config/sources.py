"""The sources of settings: flags, environment variables and one TOML file."""

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

from syringa.config.models import ReadDefaults, read_tables
from syringa.config.pools import read_pools
from syringa.config.settings import FIELDS, HINTS, PREFIX, TABLES, Config, setting_type, variable
from syringa.config.specs import Replicas
from syringa.config.validation import InvalidValue, check_value, expected, is_finite, parse_replicas, unknown_key
from syringa.errors import ConfigError
from syringa.fleet.pools import PoolSpec

FILE_NAME = "syringa.toml"
# The path of the settings file, the folder of models, and an option of `syringa cluster join`.
OTHER_VARIABLES = ("SYRINGA_CONFIG", "SYRINGA_HOME", "SYRINGA_JOIN_TOKEN")

_HOST_NAME = re.compile(r"[A-Za-z0-9._-]+")
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")
_AT_LINE = re.compile(r" \(at line (?P<line>\d+), column \d+\)$")


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
    file: Path | None = None,
    read_defaults: ReadDefaults | None = None,
) -> Config:
    """Read all sources. A flag that is None was not given. Raises `ConfigError` with a message of one line."""
    environ = os.environ if environ is None else environ
    if file is None and environ.get(variable("config")):
        file = Path(environ[variable("config")])
    settings_file = _SettingsFile(file, folder or Path.cwd())
    values = settings_file.settings()
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
    config = msgspec.structs.replace(config, pools=settings_file.pools())
    if (models := settings_file.models(config, read_defaults)) is not None:
        config = msgspec.structs.replace(config, models=models)
    return config


class _SettingsFile:
    """`syringa.toml` in the current folder, if there is one, or the file given by `--config`."""

    def __init__(self, file: Path | None, folder: Path) -> None:
        self._name = str(file) if file is not None else FILE_NAME
        try:
            self._table = tomllib.loads((file or folder / FILE_NAME).read_text(encoding="utf-8"))
        except FileNotFoundError:
            if file is not None:
                raise ConfigError(f"{file}: no such file; check --config and SYRINGA_CONFIG") from None
            self._table = {}
        except tomllib.TOMLDecodeError as error:
            message, found = str(error), _AT_LINE.search(str(error))
            where = f"{self._name}, line {found['line']}" if found else self._name
            raise ConfigError(f"{where}: invalid TOML: {_AT_LINE.sub('', message)}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._name}: cannot be read: {error}") from None

    def settings(self) -> dict[str, Any]:
        values = {}
        for key, value in self._table.items():
            name = key.replace("-", "_")
            if name in TABLES:
                continue
            try:
                if name not in FIELDS:
                    raise unknown_key((key,), [*FIELDS, *TABLES], "setting")
                values[name] = check_value((key,), _split_list(name, value), HINTS[name])
            except InvalidValue as error:
                raise self._error(error, secret=name == "api_key") from None
        return values

    def pools(self) -> tuple[PoolSpec, ...]:
        try:
            return read_pools(self._table.get("pools", []))
        except InvalidValue as error:
            raise self._error(error) from None

    def models(self, config: Config, read_defaults: ReadDefaults | None) -> Any:
        if "models" not in self._table:
            return None
        try:
            return read_tables(self._table["models"], config, read_defaults)
        except InvalidValue as error:
            raise self._error(error) from None

    def _error(self, error: InvalidValue, *, secret: bool = False) -> ConfigError:
        message = error.message
        if secret:  # do not quote the value
            message = f"{error.path[0]}: expected {message.rpartition(': expected ')[2]}"
        return ConfigError(f"{self._name}: {message}", param=str(error.path[-1]))


def _check_variable(name: str) -> None:
    """Raise `ConfigError` for an unknown `SYRINGA_*` variable, which is probably mistyped."""
    if not name.startswith(PREFIX) or name in OTHER_VARIABLES:
        return
    known = [variable(field) for field in FIELDS]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise ConfigError(
            f"{name}: unknown environment variable" + (f"; did you mean {near[0]}?" if near else "; unset it"),
            param=name,
        )


def _from_text(name: str, value: Any, source: str) -> Any:
    """Convert the text of a variable or flag."""
    if setting_type(name) is Replicas:
        try:
            return parse_replicas(value)
        except ValueError:
            wanted = "a number from 1 to 256, or MIN:MAX"
            raise ConfigError(f"{source} {value!r}: expected {wanted}", param=name) from None
    try:
        return msgspec.convert(_split_list(name, value), HINTS[name], strict=False)
    except msgspec.ValidationError as error:
        shown = "" if name == "api_key" else f" {value!r}"
        raise ConfigError(f"{source}{shown}: expected {expected(HINTS[name], str(error))}", param=name) from None


def _split_list(name: str, value: Any) -> Any:
    """Split a list given as text with commas, and strip its items."""
    if get_origin(setting_type(name)) is not tuple:
        return value
    value = value.split(",") if isinstance(value, str) else value
    if not isinstance(value, list | tuple):
        return value
    return [item.strip() if isinstance(item, str) else item for item in value]


def _check(config: Config) -> None:
    if any(not key or not key.isascii() or key != key.strip() for key in config.api_key):
        raise ConfigError("api_key: a key is one or more ASCII characters without surrounding spaces", param="api_key")
    for host in config.allowed_hosts:
        if host != "*" and not _HOST_NAME.fullmatch(host) and not is_address(host):
            raise ConfigError(
                f"allowed_hosts {host!r}: expected a host name or address without scheme and port, or *",
                param="allowed_hosts",
            )
    if config.root_path and not _ROOT_PATH.fullmatch(config.root_path):
        raise ConfigError(
            f"root_path {config.root_path!r}: expected a path such as /llm, without a slash at its end",
            param="root_path",
        )
    if any(not name for name in config.served_model_name):
        raise ConfigError("served_model_name: a name cannot be empty", param="served_model_name")
    if any("*" in (name[:-1] if index else name) for index, name in enumerate(config.served_model_name)):
        raise ConfigError(
            "served_model_name: the first name is no pattern, and others have a * only at the end",
            param="served_model_name",
        )
    for name in FIELDS:
        if not is_finite(getattr(config, name)):
            raise ConfigError(f"{name}: expected a finite number", param=name)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host.strip("[]")).is_loopback)


def is_address(host: str) -> bool:
    """Return whether `host` is an IP address and not a name."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
