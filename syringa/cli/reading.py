"""Reads the settings for commands that run models: what is said of requests is checked by the API's own rules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from syringa import config as settings
from syringa.config import Config


def read_settings(flags: Mapping[str, Any], file: Path | None) -> Config:
    return settings.load(flags, file=file, read_defaults=_read_defaults)


def _read_defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
    if not fields:
        return {}
    from syringa.api.fields.defaults import read_defaults

    return read_defaults(fields)
