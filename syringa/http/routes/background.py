"""Background responses: beginning one, and following one, from whatever place and in whatever process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from syringa.api.responses import StreamEvent, error_event, in_mode
from syringa.errors import EngineUnavailable
from syringa.events import Event as Generated
from syringa.generation import Emit
from syringa.http.middleware.access_log import account_line
from syringa.http.middleware.errors import envelope
from syringa.http.routes.response_run import Turn, Turns
from syringa.http.streaming.framing import DONE, Framing, encode
from syringa.http.streaming.sse import StreamedAnswer
from syringa.service.app_state import Work
from syringa.service.responses.background import Run, follow_stored
from syringa.service.responses.record import Response
from syringa.store import Event, Store

_ENDING = "The server was stopped before the response was finished."


async def begin(turns: Turns, turn: Turn, work: Work) -> tuple[Run, Response]:
    """Starts a turn that goes on without its client. The result has the response as it stands, which is queued."""
    assert turn.record is not None
    created, queued, started = turn.writer.begin(queued=True)
    response: Response = msgspec.to_builtins(created)["response"]
    with work.background.room():
        await turns.begin(turn, response)
        run = Run(turn.record)
        run.publish(_stored([created, queued]))
        turn.account.later = True
        work.background.start(run, _carry_out(turn, run, [started]))
    return run, response


async def _carry_out(turn: Turn, run: Run, opening: list[StreamEvent]) -> None:
    assert turn.record is not None
    record, writer = turn.record, turn.writer

    def emit(batch: Sequence[Generated]) -> None:
        events = [each for event in batch for each in writer.write(event)]
        if opening:
            events[:0] = opening
            opening.clear()
            record.state.later(record.update(turn.response))
        run.publish(_stored(events))

    try:
        closing = writer.write(await turn.generate(emit))
    except asyncio.CancelledError:
        if run.cancelled:
            writer.cancel()
            closing = []
        else:
            closing = writer.fail(EngineUnavailable(_ENDING))
    except Exception as error:
        closing = writer.fail(error)
    finally:
        turn.account.close()
        account_line(turn.account)
    # Its numbers were given before those of what closes it.
    await run.finish(turn.response, _stored([*opening, *closing]))


def _stored(events: Sequence[StreamEvent]) -> list[Event]:
    return [Event(event.sequence_number, encode(event).decode()) for event in events]


class _Named(msgspec.Struct):
    type: str


_name = msgspec.json.Decoder(_Named).decode


class _Follower:
    """Frames the events of one stream, which may be in another mode than the one they were written in."""

    def __init__(self, open_mode: bool) -> None:
        self._open_mode = open_mode
        self._last = 0

    def frame(self, event: Event) -> bytes:
        self._last = event.sequence
        written = _name(event.json).type
        name = in_mode(written, self._open_mode)
        data = event.json
        if name != written:
            # Inside of a text every quote is escaped, so this stands nowhere else.
            data = data.replace(f'"type":"{written}"', f'"type":"{name}"', 1)
        return f"event: {name}\ndata: {data}\n\n".encode()

    def broken(self, error: Exception) -> bytes:
        """The stream cannot go on here; the response itself may. The response did not send this, so it has the number
        of the last event: who goes on after it misses nothing."""
        event = error_event(envelope(error).error, self._last, self._open_mode)
        return b"event: error\ndata: " + encode(event) + b"\n\n" + (DONE if self._open_mode else b"")


def following(
    source: AsyncIterator[Sequence[Event]], *, open_mode: bool, headers: dict[str, str], keep_alive: float
) -> StreamedAnswer:
    """A stream of what `source` gives. It may be left at any time: what it follows goes on."""

    async def run(emit: Emit) -> None:
        take: Any = emit  # stored events go the way of generated ones
        async for events in source:
            take(events)

    follower = _Follower(open_mode)
    framing = Framing(follower.frame, follower.broken, DONE if open_mode else b"")
    return StreamedAnswer(run, lambda event: (event,), framing, headers=headers, keep_alive=keep_alive)


def source(work: Work, store: Store, organisation: str, id: str, after: int) -> AsyncIterator[Sequence[Event]]:
    run = work.background.find(organisation, id)
    return run.follow(after) if run is not None else follow_stored(store, organisation, id, after)
