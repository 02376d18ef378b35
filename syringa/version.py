"""The version of the installed package."""

from __future__ import annotations

import importlib.metadata


def installed_version() -> str:
    try:
        return importlib.metadata.version("syringa")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # run from a checkout that is not installed
