"""The `syringa` command. What a subcommand needs is imported when it runs, so that `--help` answers at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and exits. What we foresaw is one line on stderr and no traceback."""
    from syringa.cli.app import app
    from syringa.errors import SyringaError

    try:
        app(arguments)
    except SyringaError as error:
        if error.message:  # a worker that could not start has said why itself
            print(f"syringa: {error.message}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has seen enough; closing here keeps Python from complaining at exit.
        sys.stderr.close()
        sys.exit(141)
