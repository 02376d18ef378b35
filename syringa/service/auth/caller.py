"""Who sends a request, and what they may do."""

from __future__ import annotations

import msgspec


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """How much one organisation, or one key, may ask for. 0: no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent: int = 0  # requests at the same time


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """What the rest of the server knows of a key. It never sees the key itself."""

    organisation: str = ""
    key: str = ""  # the key's id; empty where none is needed
    admin: bool = False
    models: frozenset[str] | None = None  # ids of the models that it may use; None: all
    rates: Rates = Rates()  # of the organisation as a whole
    key_rates: Rates = Rates()  # of this key alone


ANYONE = Caller(admin=True)
"""On a server without keys there is one organisation, and everybody is it."""
