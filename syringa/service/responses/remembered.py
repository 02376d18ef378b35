"""What WebSocket connections remember: the last response of each with its history, which may not be stored."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from syringa.service.responses.history import History


class _Entry(NamedTuple):
    response: str
    history: History


class RememberedHistories:
    """The histories that the connections of a process remember, within a bound on their size.

    When it is exceeded, the organization that holds the most forgets the one that was not continued for longest. It is
    read from the store then, if it is stored.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: dict[str, dict[Hashable, _Entry]] = {}  # by organization and connection; the oldest first
        self._bytes: dict[str, int] = {}

    def get(self, organization: str, connection: Hashable) -> Mapping[str, History]:
        """Return the history that a connection remembers, by the id of its response."""
        entry = self._entries.get(organization, {}).get(connection)
        return {} if entry is None else {entry.response: entry.history}

    def put(self, organization: str, connection: Hashable, response: str, history: History) -> None:
        """Remember a response, instead of the one before it."""
        self.forget(organization, connection)
        self._entries.setdefault(organization, {})[connection] = _Entry(response, history)
        self._bytes[organization] = self._bytes.get(organization, 0) + history.size.bytes
        while sum(self._bytes.values()) > self._max_bytes:
            largest = max(self._bytes, key=self._bytes.__getitem__)
            self.forget(largest, next(iter(self._entries[largest])))

    def forget(self, organization: str, connection: Hashable) -> None:
        entries = self._entries.get(organization, {})
        entry = entries.pop(connection, None)
        if entry is None:
            return
        self._bytes[organization] -= entry.history.size.bytes
        if not entries:
            del self._entries[organization], self._bytes[organization]
