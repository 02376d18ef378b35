"""The first module of a worker on vLLM: `python -m syringa.engine.vllm.bootstrap`, started by the supervisor.

It runs under an interpreter that may lack everything that a worker needs, so nothing but the standard library is
imported until that was checked. The supervisor runs the text of this file to check an interpreter before it is used.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import NoReturn

REQUIRED = ("vllm", "msgspec", "numpy", "tokenizers", "llguidance")  # the latter come with vLLM
MIN_PYTHON = (3, 11)
CHECK = "--check"
PREFIX, OK = "syringa: ", "ok"  # of what is printed
EXIT_CANNOT_START = 78  # `managed_process.EXIT_CANNOT_START`


def find_problem() -> str:
    """Return in one line why this interpreter cannot run a worker; empty if it can. Importing vLLM would take long."""
    if sys.version_info[:2] < MIN_PYTHON:
        found, needed = (".".join(map(str, each)) for each in (sys.version_info[:2], MIN_PYTHON))
        return f"{sys.executable} is Python {found}: a worker needs {needed} or newer"
    for name in REQUIRED:
        if importlib.util.find_spec(name) is None:
            return f"{sys.executable} has no module {name}: name the environment of vLLM with python"
    return ""


def fail(problem: str) -> NoReturn:
    """Leave the reason where the supervisor looks for it, which the options name, and exit."""
    print(PREFIX + problem, file=sys.stderr)
    options = json.loads(sys.stdin.readline() or "{}")
    if options.get("socket"):
        with open(options["socket"] + ".reason", "w", encoding="utf-8") as file:  # `WorkerOptions.reason_file`
            file.write(problem)
    sys.exit(EXIT_CANNOT_START)


def main() -> None:
    problem = find_problem()
    if sys.argv[1:] == [CHECK]:
        print(PREFIX + (problem or OK))
        return
    if problem:
        fail(problem)
    from syringa.engine.vllm.worker import main as run_worker

    run_worker()


if __name__ == "__main__":
    main()
