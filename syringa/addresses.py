"""Network addresses that a URL of a client may reach, against server-side request forgery (SSRF).

A host name is resolved here, and the caller connects to one of the addresses that were checked, so DNS rebinding gains
nothing.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor

MAX_ADDRESSES = 3  # tried for one host name

# Separate from the default executor: a slow name server must not block the tokenization of other requests.
RESOLVER_THREADS = ThreadPoolExecutor(16, thread_name_prefix="resolve")

_PRIVATE = [
    ipaddress.ip_network(each)
    for each in ("10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "::1/128", "fc00::/7")
]
# From IANA's registries of special-purpose addresses. 2001::/23 and 2002::/16 (Teredo, 6to4) embed other addresses.
_SPECIAL = [
    ipaddress.ip_network(each)
    for each in (
        *("0.0.0.0/8", "169.254.0.0/16", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "198.18.0.0/15"),
        *("198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
        *("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),
    )
]
# The public IPv6 addresses, without link-local, multicast, unspecified and IPv4-mapped addresses (::ffff:0:0/96,
# 64:ff9b::/96).
_GLOBAL_V6 = ipaddress.ip_network("2000::/3")


async def resolve(host: str, *, allow_private: bool) -> list[str]:
    """Return the allowed addresses of a host; none for an unknown name, and for one with forbidden addresses only."""
    lookup = functools.partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
    try:
        found = await asyncio.get_running_loop().run_in_executor(RESOLVER_THREADS, lookup)
    except (OSError, UnicodeError):
        return []
    addresses = dict.fromkeys(str(entry[4][0]) for entry in found)
    return [address for address in addresses if is_allowed_address(address, allow_private)][:MAX_ADDRESSES]


def is_allowed_address(address: str, allow_private: bool) -> bool:
    """Return whether an address may be connected to: public ones, and with `allow_private` loopback and private ones.

    Link-local addresses are never allowed: cloud providers serve credentials there.
    """
    if "%" in address:
        return False
    ip = ipaddress.ip_address(address)
    if any(ip in network for network in _PRIVATE):
        return allow_private
    if ip.version == 6 and ip not in _GLOBAL_V6:
        return False
    return not any(ip in network for network in _SPECIAL)
