"""Fetches what a client's URL points at, without becoming the client's way into the network behind the server.

A name is resolved here, its addresses are checked, and the connection goes to a checked one, so that a name that
resolves differently the next time gains nothing. Every redirect goes through the same. What is refused is told without
the addresses: they are the inside of a network.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from syringa.errors import InvalidRequest

if TYPE_CHECKING:
    import httpx

MAX_REDIRECTS = 3
_MAX_ADDRESSES = 3  # that are tried, where a name has many
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_FAILED, _BAD_URL, _TOO_LARGE = "failed_to_download_image", "invalid_image_url", "image_file_too_large"

# A slow name server must not hold the threads that other requests are tokenized in.
_THREADS = ThreadPoolExecutor(16, thread_name_prefix="resolve")


class FetchLimits(msgspec.Struct, frozen=True, kw_only=True):
    private: bool  # whether loopback and private networks may be reached
    max_bytes: int
    timeout: float  # for all of it, in seconds; 0: none


async def fetch(url: str, limits: FetchLimits) -> bytes:
    """What is at an http or https URL. Raises `InvalidRequest` that says what went wrong, without a `param`."""
    try:
        async with asyncio.timeout(limits.timeout or None):
            # httpx and the certificates take a tenth of a second to load, the first time.
            tls = await asyncio.get_running_loop().run_in_executor(_THREADS, _tls)
            return await _follow(url, limits, tls)
    except TimeoutError:
        raise InvalidRequest(f"fetching it took longer than {limits.timeout:g} seconds.", code=_FAILED) from None


async def _follow(given: str, limits: FetchLimits, tls: ssl.SSLContext) -> bytes:
    import httpx

    url = httpx.URL()
    for _ in range(MAX_REDIRECTS + 1):
        try:
            url = url.join(given)
        except (httpx.InvalidURL, ValueError):
            raise InvalidRequest("this is not a URL.", code=_BAD_URL) from None
        try:
            _check(url)
        except ValueError:  # a host that is no name in any language is found out when it is read
            raise InvalidRequest("this is not a URL.", code=_BAD_URL) from None
        try:
            answer = await _get(url, limits, tls)
        except httpx.HTTPError:
            raise InvalidRequest("its server sent no whole and proper answer.", code=_FAILED) from None
        if isinstance(answer, bytes):
            return answer
        given = answer
    raise InvalidRequest(f"its server redirects more than {MAX_REDIRECTS} times.", code=_FAILED)


def _check(url: httpx.URL) -> None:
    if url.scheme not in ("http", "https"):
        raise InvalidRequest("only http, https and data URLs are fetched.", code=_BAD_URL)
    if not url.host:
        raise InvalidRequest("the URL names no host.", code=_BAD_URL)
    if url.userinfo:
        raise InvalidRequest("a URL with a user name or a password is not fetched.", code=_BAD_URL)


async def _get(url: httpx.URL, limits: FetchLimits, tls: ssl.SSLContext) -> bytes | str:
    import httpx

    addresses = await _addresses(url, limits.private)
    patience = limits.timeout / len(addresses) or None  # so that there is time for the next
    for address in addresses:
        try:
            return await _ask(url, address, patience, limits.max_bytes, tls)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            continue
    raise InvalidRequest("no connection to its server could be made.", code=_FAILED)


async def _ask(
    url: httpx.URL, address: str, patience: float | None, max_bytes: int, tls: ssl.SSLContext
) -> bytes | str:
    """The body that `address` has for the URL, or where it says to look instead.

    A client for each: connections are kept by address, and one that was made for a host must not serve another.
    """
    import httpx

    headers = {
        "Host": url.netloc.decode("ascii"),
        "Accept": "image/*",
        "Accept-Encoding": "identity",  # a few compressed bytes can be very many
        "User-Agent": "syringa",
    }
    timeout = httpx.Timeout(None, connect=patience)
    async with (
        httpx.AsyncClient(verify=tls, trust_env=False, follow_redirects=False, timeout=timeout) as client,
        client.stream(
            "GET",
            url.copy_with(host=address),
            headers=headers,
            extensions={"sni_hostname": url.raw_host.decode("ascii")},  # whose certificate it must be
        ) as response,
    ):
        if response.status_code in _REDIRECTS and "location" in response.headers:
            return response.headers["location"]
        if response.status_code != 200:
            raise InvalidRequest(f"its server answered with status {response.status_code}.", code=_FAILED)
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise InvalidRequest("its server compressed it, although asked not to.", code=_FAILED)
        return await _body(response, max_bytes)


async def _body(response: httpx.Response, max_bytes: int) -> bytes:
    """Reads no further than the limit, whatever length the server states."""
    stated = response.headers.get("content-length", "")
    size = int(stated) if stated.isdecimal() else 0
    data = bytearray()
    if size <= max_bytes:
        async for chunk in response.aiter_raw():
            data += chunk
            if len(data) > max_bytes:
                break
        else:
            return bytes(data)
    raise too_large(max_bytes)


def too_large(max_bytes: int) -> InvalidRequest:
    return InvalidRequest(f"it has more than {max_bytes} bytes, which is the most allowed.", code=_TOO_LARGE)


async def _addresses(url: httpx.URL, private: bool) -> list[str]:
    """Those of the URL's host that may be reached. An unknown name and a private one are not told apart."""
    loop = asyncio.get_running_loop()
    lookup = functools.partial(socket.getaddrinfo, url.host, None, type=socket.SOCK_STREAM)
    try:
        found = await loop.run_in_executor(_THREADS, lookup)
    except (OSError, UnicodeError):
        found = []
    addresses = dict.fromkeys(str(entry[4][0]) for entry in found)
    allowed = [address for address in addresses if may_reach(address, private)]
    if not allowed:
        public = "" if private else "public "
        raise InvalidRequest(f"its host has no {public}address that may be fetched from.", code=_BAD_URL)
    return allowed[:_MAX_ADDRESSES]


@functools.cache
def _tls() -> ssl.SSLContext:
    import httpx

    return httpx.create_ssl_context(trust_env=False)


_PRIVATE = [
    ipaddress.ip_network(each)
    for each in ("10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "::1/128", "fc00::/7")
]
# After IANA's registries of special-purpose addresses. What lies in 2001::/23 and 2002::/16 (Teredo, 6to4) carries
# another address inside.
_SPECIAL = [
    ipaddress.ip_network(each)
    for each in (
        *("0.0.0.0/8", "169.254.0.0/16", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "198.18.0.0/15"),
        *("198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
        *("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),
    )
]
# All that is public in IPv6. Outside are link-local, multicast and unspecified addresses, and those that stand for an
# IPv4 address (::ffff:0:0/96, 64:ff9b::/96).
_GLOBAL_V6 = ipaddress.ip_network("2000::/3")


def may_reach(address: str, private: bool) -> bool:
    """Whether an address is public, or `private` and of this machine or a private network.

    Link-local addresses never are: clouds keep credentials there.
    """
    if "%" in address:
        return False
    ip = ipaddress.ip_address(address)
    if any(ip in network for network in _PRIVATE):
        return private
    if ip.version == 6 and ip not in _GLOBAL_V6:
        return False
    return not any(ip in network for network in _SPECIAL)
