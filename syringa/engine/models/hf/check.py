"""Whether a model runs on `transformers`' definition of it, by its config alone.

`python -m syringa.engine.models.hf.check FOLDER` prints the reason why not. It is a process of its own because the
command line, which asks, should not hold torch in memory beside the model that it loads afterwards.
"""

from __future__ import annotations

import subprocess
import sys

_REASON = "unsupported: "
_SECONDS = 600  # for the imports and a model without weights; usually a few


def unsupported_reason(folder: str) -> str | None:
    """Return why the model in a folder, whose weights may be missing, cannot be run; None if it can, or is unknown."""
    command = [sys.executable, "-m", "syringa.engine.models.hf.check", folder]
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = [line for line in result.stdout.splitlines() if line.startswith(_REASON)]
    return lines[-1].removeprefix(_REASON) if lines else None


def main(folder: str) -> None:
    from syringa.engine.models.hf.model import check_definition
    from syringa.errors import ModelError
    from syringa.modelfiles import ModelFiles, describe

    files = ModelFiles(folder, folder, "folder")
    try:
        check_definition(files, describe(files))
    except ModelError as error:
        print(_REASON + error.message)


if __name__ == "__main__":
    main(sys.argv[1])
