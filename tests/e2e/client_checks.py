"""Helpers of the client scripts, for the environments of the packages: they import the standard library only."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

Kind = TypeVar("Kind", bound=Exception)


def run_checks(module: dict[str, Any]) -> None:
    """Call every check of a module, and print a line of JSON for each: the name, and the error or null."""
    for name, check in [each for each in module.items() if each[0].startswith("check_")]:
        error = None
        try:
            check()
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"name": name, "error": error}), flush=True)


def expect_error(kind: type[Kind], call: Callable[..., Any], *arguments: Any, **fields: Any) -> Kind:
    """Call a function and return the error that it must raise."""
    try:
        call(*arguments, **fields)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}: {arguments} {fields}")
