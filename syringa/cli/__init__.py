"""The `syringa` command. A subcommand imports what it needs when it runs, so that `--help` is fast."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit. A `SyringaError` is one line on stderr, without a traceback."""
    from syringa.cli.app import app
    from syringa.errors import SyringaError

    try:
        app(arguments)
    except SyringaError as error:
        if error.message:  # empty if the process that failed to start has printed the reason
            print(f"syringa: {error.message}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has exited. Closing stderr suppresses Python's warning at exit.
        sys.stderr.close()
        sys.exit(141)
