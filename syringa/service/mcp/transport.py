"""The HTTP transport of MCP connections: hosts and addresses are checked for every request, also after a redirect."""

from __future__ import annotations

import functools
import ssl
from collections.abc import AsyncIterator

import httpx2

from syringa import addresses
from syringa.service.mcp.hosts import AllowedHosts


class ForbiddenServer(httpx2.TransportError):
    """The URL may not be connected to. The message contains no addresses, which could reveal the server's network."""


class ResponseTooLarge(httpx2.StreamError):
    """A response has more bytes than allowed."""


class GuardedTransport(httpx2.AsyncBaseTransport):
    """Connects to checked addresses of allowed hosts only, and bounds the size of responses.

    Used for one server: connections are pooled by address, and must not be shared between hosts.
    """

    def __init__(self, hosts: AllowedHosts, *, max_bytes: int, ssl_context: ssl.SSLContext) -> None:
        self._hosts, self._max_bytes = hosts, max_bytes
        self._inner = httpx2.AsyncHTTPTransport(verify=ssl_context, trust_env=False)
        self.too_large = False  # whether a response was
        self.status = 200  # of the last response to a message

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await self._send(request)
        if request.method == "POST":
            self.status = response.status_code
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            await response.aclose()
            raise httpx2.RemoteProtocolError("The response is compressed, although the request forbids that.")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _BoundedStream(response.stream, self)
        return response

    async def _send(self, request: httpx2.Request) -> httpx2.Response:
        url = request.url
        place = (url.scheme, url.host, url.port)
        if url.scheme not in ("http", "https") or not self._hosts.allows(*place):
            raise ForbiddenServer("the host is not one of those that mcp_hosts allows")
        found = await addresses.resolve(url.host, allow_private=self._hosts.allows_private(*place))
        if not found:
            raise ForbiddenServer("the host has no address that may be connected to")
        extensions = {**request.extensions, "sni_hostname": url.raw_host.decode("ascii")}  # the certificate's host
        failure: Exception | None = None
        for address in found:
            # The client has set the `Host` header from the original URL.
            addressed = httpx2.Request(
                request.method,
                url.copy_with(host=address),
                headers=request.headers,
                stream=request.stream,
                extensions=extensions,
            )
            try:
                return await self._inner.handle_async_request(addressed)
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                failure = error
        assert failure is not None
        raise failure

    async def aclose(self) -> None:
        await self._inner.aclose()

    def count(self, size: int) -> None:
        """Raise `ResponseTooLarge` for a response that has reached this size."""
        if size > self._max_bytes:
            self.too_large = True
            raise ResponseTooLarge(f"The response has more than {self._max_bytes} bytes.")


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, transport: GuardedTransport) -> None:
        self._stream, self._transport = stream, transport

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self._stream:
            size += len(chunk)
            self._transport.count(size)
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


@functools.cache
def ssl_context() -> ssl.SSLContext:
    return httpx2.create_ssl_context(trust_env=False)
