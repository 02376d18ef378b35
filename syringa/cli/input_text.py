"""Text that a user types or passes, in which some bytes may be no UTF-8."""

from __future__ import annotations

import io
import re
import sys

_SURROGATES = re.compile("[\ud800-\udfff]")


def read_piped() -> str:
    """Return what standard input has, or nothing if it is a terminal or closed."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    accept_any_bytes()
    return sys.stdin.read()


def accept_any_bytes() -> None:
    """Read bytes of standard input that are no text as U+FFFD, instead of raising an error."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")


def replace_undecodable(text: str) -> str:
    """Return an argument of the command line with U+FFFD for bytes that are no text.

    Python passes them as surrogates, which cannot be printed, sent or stored.
    """
    return _SURROGATES.sub("\ufffd", text)
