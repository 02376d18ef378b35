"""`syringa serve` as a child process, which `syringa cluster start` runs. It stops when its parent is gone."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

SERVE_MODULE = "syringa.cli.serve_process"


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What was given on the command line. Passed through a pipe, because it may contain a key."""

    flags: dict[str, Any]
    file: str | None = None


def main() -> None:
    from syringa.cli.serve import run
    from syringa.engine.processes import managed_process
    from syringa.errors import SyringaError

    options = managed_process.attach_to_parent(ServeOptions, watch=False)

    def stop_with_parent() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_with_parent, daemon=True, name="parent-watch").start()
    try:
        failed = run(options.flags, Path(options.file) if options.file else None) != 0
    except SyringaError as error:
        failed = True
        if error.message:
            print(f"syringa: {error.message}", file=sys.stderr)
    # An unexpected exception ends this process with status 1: then the parent starts it again.
    sys.exit(managed_process.EXIT_CANNOT_START if failed else 0)


if __name__ == "__main__":
    main()
