"""Fetch client-supplied URLs without server-side request forgery (SSRF).

A host name is resolved here, its addresses are checked, and the connection goes to a checked address, so DNS rebinding
gains nothing. Every redirect is checked the same way. Error messages contain no addresses, which could reveal the
server's network.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from syringa import addresses
from syringa.errors import InvalidRequest

if TYPE_CHECKING:
    import httpx

MAX_REDIRECTS = 3
_MAX_PORT = 65535
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_FAILED, _BAD_URL, _TOO_LARGE = "failed_to_download_image", "invalid_image_url", "image_file_too_large"


class FetchLimits(msgspec.Struct, frozen=True, kw_only=True):
    allow_private: bool  # loopback and private networks
    max_bytes: int
    timeout: float  # seconds for the whole fetch; 0: none


async def fetch(url: str, limits: FetchLimits, spend: Callable[[int], None] = lambda size: None) -> bytes:
    """Return the content of an http or https URL. Raises `InvalidRequest` with the reason, without a `param`.

    `spend` is called with the number of bytes as they arrive, and may raise too.
    """
    try:
        async with asyncio.timeout(limits.timeout or None):
            # Loading httpx and the certificates takes 0.1 s the first time.
            ssl_context = await asyncio.get_running_loop().run_in_executor(addresses.RESOLVER_THREADS, _ssl_context)
            return await _follow_redirects(url, limits, ssl_context, spend)
    except TimeoutError:
        raise InvalidRequest(f"fetching it took longer than {limits.timeout:g} seconds.", code=_FAILED) from None


async def _follow_redirects(
    location: str, limits: FetchLimits, ssl_context: ssl.SSLContext, spend: Callable[[int], None]
) -> bytes:
    import httpx

    url = httpx.URL()
    for _ in range(MAX_REDIRECTS + 1):
        try:
            url = url.join(location)
        except (httpx.InvalidURL, ValueError):
            raise InvalidRequest("this is not a URL.", code=_BAD_URL) from None
        try:
            _check_url(url)
        except ValueError:  # raised on access to an invalid internationalized host
            raise InvalidRequest("this is not a URL.", code=_BAD_URL) from None
        try:
            answer = await _get(url, limits, ssl_context, spend)
        except httpx.HTTPError:
            raise InvalidRequest("its server sent no complete and valid response.", code=_FAILED) from None
        except (httpx.InvalidURL, ValueError):  # httpx parses the location of a redirect that it does not follow
            raise InvalidRequest("its server redirects to something that is not a URL.", code=_FAILED) from None
        if isinstance(answer, bytes):
            return answer
        location = answer
    raise InvalidRequest(f"its server redirects more than {MAX_REDIRECTS} times.", code=_FAILED)


def _check_url(url: httpx.URL) -> None:
    if url.scheme not in ("http", "https"):
        raise InvalidRequest("only http, https and data URLs are fetched.", code=_BAD_URL)
    if not url.host:
        raise InvalidRequest("the URL names no host.", code=_BAD_URL)
    if url.port is not None and not 0 < url.port <= _MAX_PORT:
        raise InvalidRequest(f"the URL has the port {url.port}, which does not exist.", code=_BAD_URL)
    if url.userinfo:
        raise InvalidRequest("a URL with a user name or a password is not fetched.", code=_BAD_URL)


async def _get(
    url: httpx.URL, limits: FetchLimits, ssl_context: ssl.SSLContext, spend: Callable[[int], None]
) -> bytes | str:
    import httpx

    found = await _resolve(url, limits.allow_private)
    connect_timeout = limits.timeout / len(found) or None  # leaves time for the other addresses
    for address in found:
        try:
            return await _request(url, address, connect_timeout, limits.max_bytes, ssl_context, spend)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            continue
    raise InvalidRequest("no connection to its server could be made.", code=_FAILED)


async def _request(
    url: httpx.URL,
    address: str,
    connect_timeout: float | None,
    max_bytes: int,
    ssl_context: ssl.SSLContext,
    spend: Callable[[int], None],
) -> bytes | str:
    """Return the body that `address` serves for the URL, or the location it redirects to.

    Each request has its own client: connections are pooled by address, and must not be shared between hosts.
    """
    import httpx

    headers = {
        "Host": url.netloc.decode("ascii"),
        "Accept": "image/*",
        "Accept-Encoding": "identity",  # avoids decompression bombs
        "User-Agent": "syringa",
    }
    timeout = httpx.Timeout(None, connect=connect_timeout)
    async with (
        httpx.AsyncClient(verify=ssl_context, trust_env=False, follow_redirects=False, timeout=timeout) as client,
        client.stream(
            "GET",
            url.copy_with(host=address),
            headers=headers,
            extensions={"sni_hostname": url.raw_host.decode("ascii")},  # the host of the certificate
        ) as response,
    ):
        if response.status_code in _REDIRECTS and "location" in response.headers:
            return response.headers["location"]
        if response.status_code != 200:
            raise InvalidRequest(f"its server responded with status {response.status_code}.", code=_FAILED)
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise InvalidRequest("its server compressed it although the request forbids that.", code=_FAILED)
        return await _read_body(response, max_bytes, spend)


async def _read_body(response: httpx.Response, max_bytes: int, spend: Callable[[int], None]) -> bytes:
    """Read at most `max_bytes`, whatever length the server states."""
    stated = response.headers.get("content-length", "")
    size = int(stated) if stated.isdecimal() else 0
    data = bytearray()
    if size <= max_bytes:
        async for chunk in response.aiter_raw():
            data += chunk
            if len(data) > max_bytes:
                break
            spend(len(chunk))
        else:
            return bytes(data)
    raise too_large(max_bytes)


def too_large(max_bytes: int) -> InvalidRequest:
    return InvalidRequest(f"it has more than {max_bytes} bytes, which is the most allowed.", code=_TOO_LARGE)


async def _resolve(url: httpx.URL, allow_private: bool) -> list[str]:
    """Return the allowed addresses of the URL's host. Unknown and private names give the same error."""
    allowed = await addresses.resolve(url.host, allow_private=allow_private)
    if not allowed:
        public = "" if allow_private else "public "
        raise InvalidRequest(f"its host has no {public}address that may be fetched from.", code=_BAD_URL)
    return allowed


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    import httpx

    return httpx.create_ssl_context(trust_env=False)
