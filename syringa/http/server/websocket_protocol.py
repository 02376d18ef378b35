"""A client's WebSocket: uvicorn's own, as far as it ends when it should."""

from __future__ import annotations

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from syringa.http.server.limits import Watched


class SocketConnection(Watched, WebSocketsSansIOProtocol):
    def shutdown(self) -> None:
        """The server begins to end. Whoever answers here says goodbye when it is time."""

    def give_up(self) -> None:
        """The server has ended, and so has whoever answers here."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # No app was asked, so nobody else would end it.
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()
