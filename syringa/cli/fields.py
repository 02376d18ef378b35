"""Conversion of sampling options to request fields of the API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from syringa.errors import ConfigError

_KINDS = ("regex", "json_schema", "lark", "llguidance")


def to_fields(options: dict[str, Any]) -> dict[str, Any]:
    """Return the request fields for the given options. Raises `ConfigError`."""
    fields = dict(options)
    if "logit_bias" in fields:
        fields["logit_bias"] = dict(_parse_bias(each) for each in fields["logit_bias"])
    if "grammar" in fields:
        kind, _, value = fields["grammar"].partition(":")
        if kind not in _KINDS or not value:
            raise ConfigError(
                f"--grammar {fields['grammar']!r}: expected KIND:VALUE, with KIND one of {', '.join(_KINDS)}"
            )
        fields["grammar"] = {"type": kind, "value": _read_value(value, "--grammar")}
    if fields.get("response_format") == "json_object":
        fields["response_format"] = {"type": "json_object"}
    elif "response_format" in fields:
        schema = _parse_schema(_read_value(fields["response_format"], "--response-format"))
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "schema", "schema": schema}}
    return fields


def _parse_bias(text: str) -> tuple[str, float]:
    token, _, bias = text.partition("=")
    try:
        return token.strip(), float(bias)
    except ValueError:
        raise ConfigError(f"--logit-bias {text!r}: expected ID=BIAS") from None


def _read_value(value: str, option: str) -> str:
    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: {value[1:]} cannot be read: {getattr(error, 'strerror', error)}") from None


def _parse_schema(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise ConfigError("--response-format: expected json_object or a JSON schema") from None
