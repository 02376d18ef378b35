"""The hosts of the setting `mcp_hosts`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from syringa.errors import ConfigError

_ENTRY = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[^\s/@\[\]:]+))(?::(?P<port>\d{1,5}))?")
_PORTS = {"http": 80, "https": 443}


class AllowedHosts:
    """Hosts that may be connected to. `*` is any host with a public address.

    A host that is listed by name may have a private address: the operator has chosen it.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        """Raises `ConfigError`."""
        self._any = "*" in entries
        self._listed = {_parse(entry) for entry in entries if entry != "*"}

    def __bool__(self) -> bool:
        return self._any or bool(self._listed)

    def allows(self, scheme: str, host: str, port: int | None) -> bool:
        return self._any or self.allows_private(scheme, host, port)

    def allows_private(self, scheme: str, host: str, port: int | None) -> bool:
        """Return whether the host may have a private address."""
        host = host.lower().rstrip(".")
        return (host, None) in self._listed or (host, port or _PORTS.get(scheme)) in self._listed


def _parse(entry: str) -> tuple[str, int | None]:
    found = _ENTRY.fullmatch(entry.strip().lower())
    if found is None:
        raise ConfigError(f"mcp_hosts {entry!r}: expected a host name, an address, either with :port, or *.")
    return (found["v6"] or found["name"]).rstrip("."), int(found["port"]) if found["port"] else None
