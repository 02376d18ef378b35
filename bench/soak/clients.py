"""The clients: each sends one request after another over every endpoint and WebSocket, fuzzed ones included."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import Any

import msgspec
import websockets
from websockets.asyncio.client import ClientConnection, connect

from bench.soak.fuzz import FuzzedRequest, Fuzzer
from bench.soak.results import LostConnection, MeteredRequest, Results
from bench.soak.server import SoakServer
from bench.soak.wire import LIMIT_SECONDS, Reply, encode_form, encode_request, error_details, exchange, is_terminal
from bench.soak.workload import Draw, OrganizationState, SoakRequest, draw_request, remember, response_body
from syringa.http.routing import WEBSOCKET

FUZZED = 0.1  # share of requests
LEAVING = 0.08  # share of requests whose client disconnects
MESSAGES = 5  # over one WebSocket, at most
_WEBSOCKET_NAME = "WEBSOCKET /v1/responses"
# Refused before their accounting begins.
_UNACCOUNTED_STATUSES = (401, 405, 431)
_UNACCOUNTED_CODES = ("server_ending", "too_many_connections")


class Client:
    """One client of an organization. It stops when its task is cancelled, after the current request."""

    def __init__(
        self,
        number: int,
        server: SoakServer,
        results: Results,
        fuzzer: Fuzzer,
        *,
        organization: str,
        key: str,
        state: OrganizationState,
        model: str,
        pause: float,
        seed: int,
    ) -> None:
        self._number, self._server, self._results, self._fuzzer = number, server, results, fuzzer
        self._organization, self._key, self._state, self._pause = organization, key, state, pause
        self._rng = random.Random(f"{seed} client {number}")
        self._draw = Draw(self._rng, state, model, number)
        self._sent = 0
        self.stopping = False

    async def run(self) -> None:
        await asyncio.sleep(self._rng.uniform(0, 2 * self._pause))
        while not self.stopping:
            self._sent += 1
            if self._rng.random() < FUZZED:
                await self._send_fuzzed(self._fuzzer.draw(self._rng))
            else:
                request = draw_request(self._draw)
                send = self._use_websocket if request.endpoint.method == WEBSOCKET else self._send
                await send(request)
            await asyncio.sleep(self._rng.uniform(0, 2 * self._pause))

    def _request_id(self) -> str:
        return f"soak-{self._number}-{self._sent}"

    def _leave_after(self) -> float | None:
        return self._rng.uniform(0.001, 2.0) if self._rng.random() < LEAVING else None

    async def _send(self, request: SoakRequest) -> None:
        key = self._server.admin.text if request.as_admin else self._key
        headers = {"Authorization": f"Bearer {key}", "X-Request-Id": self._request_id()}
        data = None if request.body is None else msgspec.json.encode(request.body)
        if request.endpoint.upload and request.body is not None:
            headers["Content-Type"], data = encode_form(request.body)
        raw = encode_request(self._server.address, request.endpoint.method, request.path, headers, data)
        reply = await exchange(self._server.address, raw, leave_after=self._leave_after())
        where = f"{request.endpoint.method} {request.endpoint.path}"
        self._results.add(reply, where, self._request_id())
        is_background = bool(request.body and request.body.get("background"))
        if request.endpoint.metered:
            self._account(reply, known=reply.is_stream or reply.status != 200 or not is_background)
        if reply.status == 200 and not reply.failure and not reply.is_stream:
            with contextlib.suppress(msgspec.DecodeError):
                remember(self._state, request, msgspec.json.decode(reply.body))

    async def _send_fuzzed(self, request: FuzzedRequest) -> None:
        headers = {"Authorization": f"Bearer {self._key}", **request.headers, "X-Request-Id": self._request_id()}
        raw = encode_request(self._server.address, request.method, request.path, headers, request.body)
        reply = await exchange(self._server.address, raw, leave_after=self._leave_after())
        self._results.add(reply, f"fuzzed {request.where}", self._request_id())
        if request.metered:
            self._account(reply, known=reply.is_stream or reply.status != 200)

    def _account(self, reply: Reply, *, known: bool) -> None:
        """Note a generating request for the check of usage rows. `known`: its end is the end of the response."""
        error = reply.error
        if reply.status in _UNACCOUNTED_STATUSES or (error is not None and error.code in _UNACCOUNTED_CODES):
            return
        if reply.failure or not known or (reply.is_stream and not reply.has_terminal_event):
            self._results.unknown[self._organization] += 1
        else:
            self._note_ended(self._request_id(), reply.status)

    def _note_ended(self, request_id: str, status: int) -> None:
        refused = 400 <= status < 500
        self._results.metered.append(MeteredRequest(request_id, self._organization, status, refused))

    # WebSocket

    async def _use_websocket(self, request: SoakRequest) -> None:
        address = self._server.address
        headers = {"Authorization": f"Bearer {self._key}", "X-Request-Id": self._request_id()}
        began = time.monotonic()
        connection: ClientConnection | None = None
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                connection = await connect(
                    f"ws://{address.host}:{address.port}{request.path}",
                    additional_headers=headers,
                    proxy=None,
                    compression=None,
                    open_timeout=None,
                    close_timeout=1,
                    max_size=None,
                )
                for number in range(1, self._rng.randint(1, MESSAGES) + 1):
                    leave_after = self._leave_after()
                    body = request.body if number == 1 else response_body(self._draw)
                    began = time.monotonic()
                    if not await self._respond(connection, body or {}, number, leave_after):
                        break
        except TimeoutError:
            self._results.outcomes["hang"] += 1
            self._results.hanging.append(f"{_WEBSOCKET_NAME} {self._request_id()}")
        except websockets.InvalidStatus as error:
            self._note_handshake(error.response.status_code, bytes(error.response.body), began)
        except (OSError, websockets.InvalidHandshake, websockets.ConnectionClosed, EOFError) as error:
            self._note_lost(connection, began, opened=not isinstance(error, ConnectionRefusedError))
        finally:
            if connection is not None:
                connection.transport.abort()

    async def _respond(
        self, connection: ClientConnection, body: dict[str, Any], number: int, leave_after: float | None
    ) -> bool:
        """Ask for one response. Return whether the connection can be used for another one."""
        began = time.monotonic()
        await connection.send(msgspec.json.encode({"type": "response.create", **body}).decode())
        last = b""
        try:
            async with asyncio.timeout(leave_after) as leaving:
                while not is_terminal(last):
                    message = await connection.recv()
                    last = message.encode() if isinstance(message, str) else message
        except TimeoutError:
            if not leaving.expired():
                raise  # of the whole connection
            self._results.outcomes["client left"] += 1
            self._results.unknown[self._organization] += 1
            return False
        self._note_response(last, began, f"{self._request_id()}-{number}")
        return True

    def _note_response(self, last: bytes, began: float, request_id: str) -> None:
        error = error_details(last)
        event = msgspec.json.decode(last)
        status = event.get("status", 500) if event["type"] == "error" else 200
        if error is None:
            self._results.note_ok(time.monotonic() - began, _WEBSOCKET_NAME)
        elif 400 <= status < 500:
            self._results.outcomes[f"refused, {status}"] += 1
        else:
            self._results.add_event_failure(began, _WEBSOCKET_NAME, error.code, error.message, status)
        if status not in _UNACCOUNTED_STATUSES:
            self._note_ended(request_id, status)

    def _note_handshake(self, status: int, body: bytes, began: float) -> None:
        if status < 500:
            self._results.outcomes[f"refused, {status}"] += 1
            return
        error = error_details(body)
        code, message = (error.code, error.message) if error else (None, "")
        self._results.add_event_failure(began, _WEBSOCKET_NAME, code, message, status)

    def _note_lost(self, connection: ClientConnection | None, began: float, *, opened: bool) -> None:
        self._results.unknown[self._organization] += 1
        lost = LostConnection(
            began=began,
            ended=time.monotonic(),
            port=0 if connection is None else connection.local_address[1],
            where=_WEBSOCKET_NAME,
            started=connection is not None,
            stream=True,
            request_id=self._request_id(),
        )
        self._results.add_lost(lost, opened=opened)
