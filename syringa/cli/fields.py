"""Sampling options as the API's fields: what a terminal can only say as text is read here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from syringa.errors import ConfigError

_KINDS = ("regex", "json_schema", "lark", "llguidance")


def to_fields(options: dict[str, Any]) -> dict[str, Any]:
    """The body's fields that the options stand for."""
    fields = dict(options)
    if "logit_bias" in fields:
        fields["logit_bias"] = dict(_bias(each) for each in fields["logit_bias"])
    if "grammar" in fields:
        kind, _, value = fields["grammar"].partition(":")
        if kind not in _KINDS or not value:
            raise ConfigError(f"--grammar: expected KIND:VALUE, with kind one of {', '.join(_KINDS)}")
        fields["grammar"] = {"type": kind, "value": _read(value, "--grammar")}
    if fields.get("response_format") == "json_object":
        fields["response_format"] = {"type": "json_object"}
    elif "response_format" in fields:
        schema = _json(_read(fields["response_format"], "--response-format"))
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "schema", "schema": schema}}
    return fields


def _bias(text: str) -> tuple[str, float]:
    token, _, bias = text.partition("=")
    try:
        return token.strip(), float(bias)
    except ValueError:
        raise ConfigError(f"--logit-bias {text!r}: expected ID=BIAS") from None


def _read(value: str, option: str) -> str:
    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: {value[1:]} cannot be read: {getattr(error, 'strerror', error)}") from None


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise ConfigError("--response-format: expected json_object or a JSON schema") from None
