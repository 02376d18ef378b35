"""A response on its way: from a body, by way of what it goes on from, to something that runs, is written and is kept.

HTTP, background runs and WebSockets all go this way; they differ in where the events go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from syringa.api.models.served_model import Models
from syringa.api.responses import (
    CompactRequest,
    Context,
    InputTokensRequest,
    ResponseCall,
    ResponseRequest,
    ResponseWriter,
    prepare,
    referenced,
)
from syringa.config import Config
from syringa.errors import InvalidRequest, StoreUnavailable
from syringa.events import Event, Usage
from syringa.generation import Emit
from syringa.http.dispatch import Desk, Drive
from syringa.http.streaming.framing import encode
from syringa.http.streaming.writer import ClientGone
from syringa.output.collect import collect
from syringa.service.responses import history
from syringa.service.responses.encryption import NoSeal
from syringa.service.responses.record import Appendix, Record, Response
from syringa.service.responses.state import State
from syringa.service.usage.account import Account

Body = ResponseRequest | InputTokensRequest | CompactRequest
Items = list[dict[str, Any]]


class Turn:
    """One response of one client."""

    def __init__(
        self, call: ResponseCall, drive: Drive, record: Record | None, history: Items, account: Account
    ) -> None:
        assert isinstance(call.writer, ResponseWriter)
        self.writer = call.writer
        self.input, self.history = call.input, history
        self.record = record
        self.failure: Sequence[Any] = ()  # the events that tell a client of it
        self.drive, self.account = drive, account

    @property
    def response(self) -> Response:
        found: Response = msgspec.to_builtins(self.writer.response)
        return found

    async def generate(self, emit: Emit) -> Usage:
        """Runs it, and no more. What it had used by then is in the response, whatever the end."""
        try:
            return await self.drive(emit)
        except BaseException:
            if self.account.trace.first_at is not None:
                self.writer.spend(self.account.trace.usage)
            raise

    async def run(self, emit: Emit) -> Sequence[Any]:
        """Runs it. The result are the events that close the stream: by then the response is stored."""
        try:
            closing = self.writer.write(await self.generate(emit))
        except (asyncio.CancelledError, ClientGone):
            self._give_up()
            raise
        except Exception as error:
            self.failure = self.writer.fail(error)
            await self._keep()
            raise
        await self._keep()
        return closing

    async def whole(self) -> bytes:
        """Runs it. The result is the body."""
        events: list[Event] = []
        try:
            usage = await self.generate(events.extend)
            body = encode(self.writer.render(collect([*events, usage])))
        except asyncio.CancelledError:
            for event in events:
                self.writer.write(event)
            self._give_up()
            raise
        except Exception as error:
            self.failure = self.writer.fail(error)
            await self._keep()
            raise
        await self._keep()
        return body

    async def skip(self) -> Sequence[Any]:
        """Ends it without a word, as `run` does otherwise: nothing is generated, and nothing is counted."""
        closing = self.writer.write(Usage(0, 0))
        await self._keep()
        return closing

    async def _keep(self) -> None:
        if self.record is not None:
            await self.record.finish(self.response)

    def _give_up(self) -> None:
        """The client is gone: what there is of the response is kept as cancelled, and nobody waits for that."""
        self.writer.cancel()
        if self.record is not None:
            self.record.finish_later(self.response)


class Turns:
    """Begins turns."""

    def __init__(self, config: Config, desk: Desk, models: Models, state: State) -> None:
        self.config, self.desk, self.models, self.state = config, desk, models, state

    async def prepare(
        self,
        body: ResponseRequest,
        ignored: list[str],
        account: Account,
        *,
        open_mode: bool,
        memory: Mapping[str, Items] | None = None,
    ) -> Turn:
        """Nothing is stored yet: `begin` does. `memory`: the histories that a connection keeps, by response id."""
        organisation = account.caller.organisation
        context = await self.context(body, organisation, open_mode=open_mode, memory=memory)
        call = await prepare(body, self.models.for_key(account.caller.models), ignored, context)
        if body.conversation_id is not None:
            _refuse_known(call.input, context.history)
        record: Record | None = None
        if body.store is not False:
            record = Record(self.state, organisation, call.request.id)
        elif body.conversation_id is not None:
            record = Appendix(self.state, organisation, call.request.id, body.conversation_id)
        return Turn(call, self.desk.drive(call, account), record, list(context.history), account)

    async def begin(self, turn: Turn, response: Response | None = None) -> None:
        """Stores that it has begun. Raises `StoreUnavailable`: then nothing is generated."""
        if turn.record is not None:
            try:
                await turn.record.begin(response or turn.response, turn.input)
            except StoreUnavailable as error:
                raise StoreUnavailable(
                    f"The response was not begun, because it cannot be stored: {error.message}. With store: false it"
                    " can be had now."
                ) from error

    async def context(
        self, body: Body, organisation: str, *, open_mode: bool = False, memory: Mapping[str, Items] | None = None
    ) -> Context:
        said = await self._history(body, organisation, memory or {})
        ids = referenced(body)
        found = await history.named(self.state.store, organisation, ids) if ids else {}
        sealed = isinstance(body, CompactRequest) or _is_sealed(body, said, found)
        seal = await self.state.seal(organisation) if sealed else NoSeal()
        return Context(tenant=organisation, history=said, found=found, seal=seal, open_mode=open_mode)

    async def _history(self, body: Body, organisation: str, memory: Mapping[str, Items]) -> Items:
        previous = body.previous_response_id
        conversation = None if isinstance(body, CompactRequest) else body.conversation_id
        if previous is not None and conversation is not None:
            raise InvalidRequest(
                "previous_response_id and conversation cannot both say what a response goes on from.",
                param="previous_response_id",
            )
        if previous is not None:
            if previous in memory:
                return memory[previous]
            return await history.of_response(self.state.store, organisation, previous)
        if conversation is not None:
            return await history.of_conversation(self.state.store, organisation, conversation)
        return []


def _refuse_known(input: Items, said: Sequence[Mapping[str, Any]]) -> None:
    """A conversation has each id once; an item that it has already would be left out of it."""
    known = {item.get("id") for item in said}
    for index, item in enumerate(input):
        if item["id"] in known:
            param = f"input[{index}].id"
            raise InvalidRequest(f"{param}: the conversation has an item {item['id']!r} already.", param=param)


def _is_sealed(body: ResponseRequest | InputTokensRequest, said: Items, found: Mapping[str, Any]) -> bool:
    """Whether anything is to be sealed or opened, for which the store has the key."""
    if isinstance(body, ResponseRequest) and "reasoning.encrypted_content" in (body.include or ()):
        return True
    given = body.input if isinstance(body.input, list) else []
    return any(isinstance(item, dict) and item.get("encrypted_content") for item in (*given, *said, *found.values()))
