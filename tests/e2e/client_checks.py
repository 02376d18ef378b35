"""What the client scripts share: how they report, and how they look at errors.

Runs in the packages' environments, so it needs nothing but Python.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

Kind = TypeVar("Kind", bound=Exception)


def run_checks(module: dict[str, Any]) -> None:
    """Calls every check of a module, and prints a line of JSON for each: its name, and what went wrong."""
    for name, check in [each for each in module.items() if each[0].startswith("check_")]:
        wrong = None
        try:
            check()
        except Exception:
            wrong = traceback.format_exc()
        print(json.dumps({"name": name, "wrong": wrong}), flush=True)


def refused(kind: type[Kind], call: Callable[..., Any], *arguments: Any, **fields: Any) -> Kind:
    """The error that a call has to end with."""
    try:
        call(*arguments, **fields)
    except kind as error:
        return error
    raise AssertionError(f"not refused: {arguments} {fields}")
