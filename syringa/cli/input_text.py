"""Text that a user types or passes, in which some bytes may be no UTF-8."""

from __future__ import annotations

import io
import re
import sys

_SURROGATES = re.compile("[\ud800-\udfff]")


def accept_any_bytes() -> None:
    """Read bytes of standard input that are no text as U+FFFD, instead of raising an error."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")


def replace_undecodable(text: str) -> str:
    """Return an argument of the command line with U+FFFD for bytes that are no text.

    Python passes them as surrogates, which cannot be printed, sent or stored.
    """
    return _SURROGATES.sub("\ufffd", text)
