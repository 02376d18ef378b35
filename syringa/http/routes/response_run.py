"""The run of one response of the Responses API: history, generation, output events and storage.

HTTP, background responses and WebSockets all use it; they differ in where the events go.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from syringa.api.models.served_model import Models
from syringa.api.responses import (
    CompactRequest,
    InputTokensRequest,
    PreparedResponse,
    ResponseContext,
    ResponseRequest,
    ResponseWriter,
    prepare_response,
    referenced_item_ids,
)
from syringa.config import Config
from syringa.errors import InvalidRequest, StoreUnavailable
from syringa.events import Event, Usage
from syringa.generation import Emit
from syringa.http.dispatch import Generation, GenerationDispatcher
from syringa.http.streaming.sse import encode
from syringa.http.streaming.writer import ClientDisconnected
from syringa.output.collect import collect
from syringa.service.app_state import AppState
from syringa.service.responses import history
from syringa.service.responses.encryption import NullCipher
from syringa.service.responses.history import History
from syringa.service.responses.recorder import (
    ConversationRecorder,
    DeferredRecorder,
    ResponseObject,
    ResponseRecorder,
)
from syringa.service.usage.accounting import RequestAccounting
from syringa.store import FinishedResponse

Body = ResponseRequest | InputTokensRequest | CompactRequest
Items = list[dict[str, Any]]


class ResponseRun:
    """One response, from its prepared request to its stored result."""

    def __init__(
        self,
        prepared: PreparedResponse,
        generation: Generation,
        recorder: ResponseRecorder | None,
        kept_history: History | None,
        accounting: RequestAccounting,
    ) -> None:
        assert isinstance(prepared.writer, ResponseWriter)
        self.writer = prepared.writer
        self.input, self._kept_history = prepared.input, kept_history
        self.recorder = recorder
        self.failure: Sequence[Any] = ()  # the events that report an error to the client
        self._generation, self.accounting = generation, accounting
        self._writes_at_once = prepared.rounds is not None  # which depend on what was written

    @property
    def response(self) -> ResponseObject:
        found: ResponseObject = msgspec.to_builtins(self.writer.response)
        return found

    def remembered(self) -> History:
        """Return what a continuation of this response begins with, for a connection that remembers it."""
        assert self._kept_history is not None
        new: Items = [*self.input, *self.writer.output]
        size = self._kept_history.size + history.size_of(history.encode_items(new))
        return History([*self._kept_history.items, *new], {}, size)

    async def generate(self, emit: Emit) -> Usage:
        """Generate the response, without storing it. Also after an error, the response has the usage so far."""
        try:
            return await self._generation(emit)
        except BaseException:
            if self.accounting.stats.first_token_at is not None:
                self.writer.set_usage(self.accounting.stats.usage)
            raise

    async def run(self, emit: Emit) -> Sequence[Any]:
        """Generate and store the response. Return the events that end the stream."""
        try:
            closing = self.writer.write(await self.generate(emit))
        except (asyncio.CancelledError, ClientDisconnected):
            self._store_cancelled()
            raise
        except Exception as error:
            self.failure = self.writer.fail(error)
            await self._store()
            raise
        await self._store()
        return closing

    async def run_buffered(self) -> bytes:
        """Generate and store the response. Return its body."""
        if self._writes_at_once:
            await self.run(self._write)
            return encode(self.writer.response)
        events: list[Event] = []
        try:
            usage = await self.generate(events.extend)
            body = encode(self.writer.render(collect([*events, usage])))
        except asyncio.CancelledError:
            for event in events:
                self.writer.write(event)
            self._store_cancelled()
            raise
        except Exception as error:
            self.failure = self.writer.fail(error)
            await self._store()
            raise
        await self._store()
        return body

    async def skip(self) -> Sequence[Any]:
        """Store the response without generating anything. Return the events that end the stream."""
        closing = self.writer.write(Usage(0, 0))
        await self._store()
        return closing

    def _write(self, events: Sequence[Event]) -> None:
        for event in events:
            self.writer.write(event)

    async def _store(self) -> None:
        if self.recorder is not None:
            await self.recorder.finish(self.response)

    def _store_cancelled(self) -> None:
        """Store the incomplete response as cancelled, without waiting: the client has disconnected."""
        self.writer.cancel()
        if self.recorder is not None:
            self.recorder.finish_later(self.response)


class ResponseRuns:
    """Prepares and begins response runs."""

    def __init__(self, config: Config, dispatcher: GenerationDispatcher, models: Models, app_state: AppState) -> None:
        self.config, self.dispatcher, self.models = config, dispatcher, models
        self._responses, self._history, self._mcp = app_state.responses, app_state.history, app_state.mcp

    async def prepare(
        self,
        body: ResponseRequest,
        ignored: list[str],
        accounting: RequestAccounting,
        *,
        open_mode: bool,
        memory: Mapping[str, History] | None = None,
        finished: list[FinishedResponse] | None = None,
    ) -> ResponseRun:
        """Prepare a response; `begin` stores it.

        `memory`: histories that a connection remembers, by response id. Only then the run keeps its own history.
        `finished`: a list to which the response is added at its end, to be stored by the caller.
        """
        with self.dispatcher.deadline(accounting):
            return await self._prepare(body, ignored, accounting, open_mode=open_mode, memory=memory, finished=finished)

    async def _prepare(
        self,
        body: ResponseRequest,
        ignored: list[str],
        accounting: RequestAccounting,
        *,
        open_mode: bool,
        memory: Mapping[str, History] | None,
        finished: list[FinishedResponse] | None,
    ) -> ResponseRun:
        organization = accounting.caller.organization
        async with self._read_history(body, organization, memory or {}) as found:
            context = await self._context(body, organization, found, open_mode)
            prepared = await prepare_response(body, self.models.for_key(accounting.caller.models), ignored, context)
            if body.conversation_id is not None:
                _check_new_ids(prepared.input, found.items)
                new = history.size_of(history.encode_items(prepared.input))
                self._history.limits.check(found.size + new, "conversation")
            kept = None if memory is None else History(list(found.items), {}, found.size)
        recorder: ResponseRecorder | None = None
        conversation, is_stored, id = body.conversation_id, body.store is not False, prepared.request.id
        if finished is not None:
            recorder = DeferredRecorder(
                self._responses, organization, id, finished, conversation=conversation, is_stored=is_stored
            )
        elif is_stored:
            recorder = ResponseRecorder(self._responses, organization, id)
        elif conversation is not None:
            recorder = ConversationRecorder(self._responses, organization, id, conversation)
        return ResponseRun(prepared, self.dispatcher.generation(prepared, accounting), recorder, kept, accounting)

    async def begin(self, run: ResponseRun, response: ResponseObject | None = None) -> None:
        """Store that the response is in progress. Raises `StoreUnavailable`, so that nothing is generated."""
        if run.recorder is not None:
            try:
                await run.recorder.begin(response or run.response, run.input)
            except StoreUnavailable as error:
                raise StoreUnavailable(
                    f"The response was not started, because it cannot be stored: {error.message}. Send store: false to"
                    " create it without storing it."
                ) from error

    @asynccontextmanager
    async def context(self, body: Body, organization: str) -> AsyncIterator[ResponseContext]:
        """Read what a body refers to, which counts against the memory of this process until the block ends."""
        async with self._read_history(body, organization, {}) as found:
            yield await self._context(body, organization, found, open_mode=False)

    async def _context(self, body: Body, organization: str, found: History, open_mode: bool) -> ResponseContext:
        encrypted = isinstance(body, CompactRequest) or _needs_cipher(body, found)
        cipher = await self._responses.cipher(organization) if encrypted else NullCipher()
        return ResponseContext(
            tenant=organization,
            history=found.items,
            referenced_items=found.referenced,
            cipher=cipher,
            open_mode=open_mode,
            mcp=self._mcp,
            max_mcp_calls=self.config.mcp_calls_per_response,
        )

    @asynccontextmanager
    async def _read_history(
        self, body: Body, organization: str, memory: Mapping[str, History]
    ) -> AsyncIterator[History]:
        previous = body.previous_response_id
        conversation = None if isinstance(body, CompactRequest) else body.conversation_id
        if previous is not None and conversation is not None:
            raise InvalidRequest(
                "previous_response_id and conversation cannot be combined.",
                param="previous_response_id",
            )
        remembered = None if previous is None else memory.get(previous)
        if remembered is not None:
            self._history.limits.check(remembered.size, "previous_response_id")
            previous = None
        references = referenced_item_ids(body)
        async with self._history.read(
            organization, previous_response=previous, conversation=conversation, references=references
        ) as found:
            yield found if remembered is None else remembered._replace(referenced=found.referenced)


def _check_new_ids(input: Items, items_before: Sequence[Mapping[str, Any]]) -> None:
    """Raise `InvalidRequest` for an item whose id the conversation already has: it would not be added."""
    known = {item.get("id") for item in items_before}
    for index, item in enumerate(input):
        if item["id"] in known:
            param = f"input[{index}].id"
            raise InvalidRequest(f"{param}: the conversation has an item {item['id']!r} already.", param=param)


def _needs_cipher(body: ResponseRequest | InputTokensRequest, found: History) -> bool:
    """Whether any content has to be encrypted or decrypted, which requires the key in the store."""
    if isinstance(body, ResponseRequest) and "reasoning.encrypted_content" in (body.include or ()):
        return True
    input_items = body.input if isinstance(body.input, list) else []
    return any(
        isinstance(item, dict) and item.get("encrypted_content")
        for item in (*input_items, *found.items, *found.referenced.values())
    )
