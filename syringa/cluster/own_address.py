"""The address under which other machines reach this one."""

from __future__ import annotations

import contextlib
import socket


def own_address(host: str = "192.0.2.1", port: int = 9) -> str:
    """Return the address of this machine on the way to a host; by default, to anything beyond its own network.

    Nothing is sent. 127.0.0.1 on a machine without a network.
    """
    with contextlib.suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # chooses a route
            return str(probe.getsockname()[0]).partition("%")[0]
    return "127.0.0.1"
