"""Background responses: starting one, and streaming its events, also from another process or from the middle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from syringa.api.error_formats import error_envelope
from syringa.api.responses import StreamEvent, error_event, event_type_for_mode
from syringa.errors import EngineUnavailable
from syringa.events import Event
from syringa.generation import Emit
from syringa.http.middleware.access_log import log_response
from syringa.http.routes.response_run import ResponseRun, ResponseRuns
from syringa.http.streaming.cancellation import CancelScope
from syringa.http.streaming.sse import DONE, EventStreamResponse, Framing, encode
from syringa.service.app_state import AppState
from syringa.service.auth.key_watch import Cancel
from syringa.service.responses.background import BackgroundResponse, follow_stored
from syringa.service.responses.recorder import ResponseObject
from syringa.store import Store, StoredEvent

_STOPPED = "The server was stopped before the response was finished."


async def begin(
    runs: ResponseRuns, response_run: ResponseRun, app_state: AppState
) -> tuple[BackgroundResponse, ResponseObject]:
    """Start a response that continues without its client, and return it in its queued state."""
    assert response_run.recorder is not None
    created, queued, started = response_run.writer.begin(queued=True)
    response: ResponseObject = msgspec.to_builtins(created)["response"]
    with app_state.background.reserve(response_run.recorder.organization):
        await runs.begin(response_run, response)
        background = BackgroundResponse(response_run.recorder)
        background.publish(_to_stored([created, queued]))
        response_run.accounting.detached = True
        app_state.background.start(background, _generate(response_run, background, [started]))
    return background, response


async def _generate(response_run: ResponseRun, background: BackgroundResponse, opening: list[StreamEvent]) -> None:
    assert response_run.recorder is not None
    recorder, writer = response_run.recorder, response_run.writer

    def emit(batch: Sequence[Event]) -> None:
        events = [each for event in batch for each in writer.write(event)]
        if opening:
            events[:0] = opening
            opening.clear()
            recorder.update_later(response_run.response)
        background.publish(_to_stored(events))

    try:
        closing = writer.write(await response_run.generate(emit))
    except asyncio.CancelledError:
        if background.cancelled:
            writer.cancel()
            closing = []
        else:
            closing = writer.fail(EngineUnavailable(_STOPPED))
    except Exception as error:
        closing = writer.fail(error)
    finally:
        response_run.accounting.close()
        log_response(response_run.accounting)
    # The sequence numbers of the opening events precede those of the closing ones.
    await background.finish(response_run.response, _to_stored([*opening, *closing]))


def _to_stored(events: Sequence[StreamEvent]) -> list[StoredEvent]:
    return [StoredEvent(event.sequence_number, encode(event).decode()) for event in events]


class _TypedEvent(msgspec.Struct):
    type: str


_decode_type = msgspec.json.Decoder(_TypedEvent).decode


class _StoredEventFraming:
    """Frames stored events, converting their types if they were generated in the other mode."""

    def __init__(self, open_mode: bool) -> None:
        self._open_mode = open_mode
        self._last_sequence = 0

    def frame(self, event: StoredEvent) -> bytes:
        self._last_sequence = event.sequence
        stored_type = _decode_type(event.json).type
        type_ = event_type_for_mode(stored_type, self._open_mode)
        data = event.json
        if type_ != stored_type:
            # Quotes inside a string are escaped, so the first match is the field itself.
            data = data.replace(f'"type":"{stored_type}"', f'"type":"{type_}"', 1)
        return f"event: {type_}\ndata: {data}\n\n".encode()

    def fail(self, error: Exception) -> bytes:
        """Report that this stream cannot continue; the response itself may.

        The error is not an event of the response: it repeats the last sequence number, so that a client that continues
        after it misses nothing.
        """
        event = error_event(error_envelope(error).error, self._last_sequence, self._open_mode)
        return b"event: error\ndata: " + encode(event) + b"\n\n" + (DONE if self._open_mode else b"")


def stream_response(
    source: AsyncIterator[Sequence[StoredEvent]],
    watching: Callable[[Cancel], AbstractContextManager[None]],
    *,
    open_mode: bool,
    headers: dict[str, str],
    keep_alive: float,
) -> EventStreamResponse:
    """Return a stream of the events of `source`. A client that disconnects does not affect the response itself.

    `watching` ends the stream when the client's API key becomes invalid.
    """

    async def emit_stored(emit: Emit) -> None:
        emit_any: Any = emit  # stored events take the place of generated ones
        with CancelScope() as scope, watching(scope.cancel):
            async for events in source:
                emit_any(events)

    stored = _StoredEventFraming(open_mode)
    framing = Framing(stored.frame, stored.fail, DONE if open_mode else b"")
    return EventStreamResponse(emit_stored, lambda event: (event,), framing, headers=headers, keep_alive=keep_alive)


def stored_events(
    app_state: AppState, store: Store, organization: str, id: str, after: int
) -> AsyncIterator[Sequence[StoredEvent]]:
    """Return the events of a background response after a sequence number, and those to come."""
    running = app_state.background.find(organization, id)
    return running.follow(after) if running is not None else follow_stored(store, organization, id, after)
