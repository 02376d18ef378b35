"""Ending what an API key has started when the key is revoked or expires."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from syringa.errors import Unauthorized
from syringa.service.auth.keys import Caller

Cancel = Callable[[Exception], None]
"""Ends a request or a connection with an error. Later calls have no effect."""


class KeyWatch:
    """The running requests and open connections of this process, each with its caller."""

    def __init__(self, check: Callable[[Caller], Unauthorized | None]) -> None:
        """`check` returns the error of a caller whose key is no longer valid."""
        self._check = check
        self._watched: dict[Cancel, Caller] = {}

    @contextlib.contextmanager
    def watching(self, caller: Caller, cancel: Cancel) -> Iterator[None]:
        """Call `cancel` if the caller's key becomes invalid inside the block."""
        self._watched[cancel] = caller
        try:
            yield
        finally:
            del self._watched[cancel]

    def cancel_invalid(self) -> None:
        """Cancel what runs with an invalid key. To be called after every refresh of the keys."""
        for cancel, caller in list(self._watched.items()):
            if (error := self._check(caller)) is not None:
                cancel(error)
