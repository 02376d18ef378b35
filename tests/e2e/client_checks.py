"""How the client scripts report. Runs in the packages' environments, so it needs nothing but Python."""

from __future__ import annotations

import json
import traceback
from typing import Any


def run_checks(module: dict[str, Any]) -> None:
    """Calls every check of a module, and prints a line of JSON for each: its name, and what went wrong."""
    for name, check in [each for each in module.items() if each[0].startswith("check_")]:
        wrong = None
        try:
            check()
        except Exception:
            wrong = traceback.format_exc()
        print(json.dumps({"name": name, "wrong": wrong}), flush=True)
