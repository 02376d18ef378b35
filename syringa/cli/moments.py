"""Times as a person writes them: 30d, 12h, 2027-01-31. What names no zone is UTC."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from syringa.errors import ConfigError

_SPAN = re.compile(r"([0-9]{1,9})([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_FIRST, _LAST = 0, 253402300799  # what a date can show


def read(text: str, option: str, now: float, *, ahead: bool) -> float:
    """Seconds since 1970. A span counts from now, into the future or into the past."""
    text = text.strip()
    if span := _SPAN.fullmatch(text):
        seconds = int(span[1]) * _SECONDS[span[2]]
        moment = now + seconds if ahead else now - seconds
    else:
        try:
            found = datetime.fromisoformat(text)
        except ValueError:
            raise ConfigError(f"{option} {text!r}: expected a span like 30d or 12h, or a day like 2027-01-31") from None
        moment = (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    if not _FIRST <= moment <= _LAST:
        raise ConfigError(f"{option} {text!r}: that is too far away")
    return moment


def show(moment: float | None) -> str:
    return "" if moment is None else datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M")
