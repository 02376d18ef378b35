"""The stored state of one response, from its creation to its end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from syringa.errors import StoreError
from syringa.service.responses.history import encode_items
from syringa.service.responses.manager import ResponseManager
from syringa.store import (
    FinishedResponse,
    ResponseKey,
    ResponseStatus,
    Store,
    StoredEvent,
    StoredItem,
    StoredResponse,
)

logger = logging.getLogger("syringa.service")

_ADDED_TO_CONVERSATION = ("completed", "incomplete")  # statuses

ResponseObject = dict[str, Any]
"""A response object as clients see it."""


class ResponseRecorder:
    """Stores a response that this process runs."""

    def __init__(self, manager: ResponseManager, organization: str, id: str) -> None:
        self.manager, self.organization, self.id = manager, organization, id

    async def begin(self, response: ResponseObject, input: Sequence[dict[str, Any]]) -> None:
        """Store the response before anything is generated. Raises `StoreUnavailable`: then it must not run."""
        row = msgspec.structs.replace(self._row(response), process=self.manager.process)
        items = encode_items(input)
        if not await self.manager.store.write(lambda session: session.responses.create(row, items)):
            raise StoreError(f"the response id {self.id} exists already")
        self.manager.track(self._key)

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call `callback` if another process cancels or deletes the response."""
        self.manager.track(self._key, callback)

    def update_later(self, response: ResponseObject) -> None:
        """Store an intermediate state without waiting for it. A failed write is dropped: `finish` stores the rest."""
        body, _ = _split(response)
        status: ResponseStatus = response["status"]
        self.manager.spawn(self._update(status, body))

    async def _update(self, status: ResponseStatus, body: str) -> None:
        try:
            await self.manager.store.write(
                lambda session: session.responses.update(self.organization, self.id, status=status, body=body)
            )
        except StoreError as error:
            logger.warning("responses: update not stored: response=%s error=%s", self.id, error.message)

    async def finish(self, response: ResponseObject, events: Sequence[StoredEvent] = ()) -> None:
        """Store the final state and the last events. Does not raise: a failed write is retried."""
        await self.manager.finish(self._key, lambda: self._write(response, events))

    def finish_later(self, response: ResponseObject) -> None:
        """Like `finish`, without waiting for it."""
        self.manager.spawn(self.finish(response))

    async def _write(self, response: ResponseObject, events: Sequence[StoredEvent]) -> None:
        body, output = _split(response)
        status: ResponseStatus = response["status"]
        await self.manager.store.write(
            lambda session: (
                session.events.append(self.organization, self.id, events) if events else None,
                session.responses.finish(self.organization, self.id, status=status, body=body, output=output),
            )
        )

    def _row(self, response: ResponseObject) -> StoredResponse:
        """Return the response as it is stored, without an output and a process."""
        body, _ = _split(response)
        conversation = response.get("conversation")
        return StoredResponse(
            id=self.id,
            organization=self.organization,
            created_at=int(response["created_at"]),
            expires_at=self.manager.expiry(int(response["created_at"])),
            model=response["model"],
            status=response["status"],
            background=bool(response.get("background")),
            previous_id=response.get("previous_response_id"),
            conversation_id=conversation["id"] if conversation else None,
            body=body,
        )

    @property
    def _key(self) -> ResponseKey:
        return ResponseKey(self.organization, self.id)


class ConversationRecorder(ResponseRecorder):
    """Adds the items of a response that is not stored itself to its conversation."""

    def __init__(self, manager: ResponseManager, organization: str, id: str, conversation: str) -> None:
        super().__init__(manager, organization, id)
        self._conversation = conversation
        self._input: list[StoredItem] = []

    async def begin(self, response: ResponseObject, input: Sequence[dict[str, Any]]) -> None:
        self._input = encode_items(input)

    async def _write(self, response: ResponseObject, events: Sequence[StoredEvent]) -> None:
        if response["status"] not in _ADDED_TO_CONVERSATION:
            return
        new = [*self._input, *encode_items(response["output"])]
        await self.manager.store.write(
            lambda session: session.conversations.add_items(
                self.organization, self._conversation, new, duplicates="skip"
            )
        )


class DeferredRecorder(ResponseRecorder):
    """Stores nothing, but appends the finished response to a list.

    The response to a line of a batch is stored in one transaction with the result of the line: after a crash, either
    both are there, or the line is run again as if it had never been. What was cancelled is not stored.
    """

    def __init__(
        self,
        manager: ResponseManager,
        organization: str,
        id: str,
        finished: list[FinishedResponse],
        *,
        conversation: str | None,
        is_stored: bool,
    ) -> None:
        """`is_stored`: whether the response itself is, beside the items that it adds to `conversation`."""
        super().__init__(manager, organization, id)
        self._finished, self._conversation, self._is_stored = finished, conversation, is_stored
        self._input: list[StoredItem] = []

    async def begin(self, response: ResponseObject, input: Sequence[dict[str, Any]]) -> None:
        self._input = encode_items(input)
        self.manager.start()

    async def finish(self, response: ResponseObject, events: Sequence[StoredEvent] = ()) -> None:
        _, output = _split(response)
        if self._is_stored:
            row = msgspec.structs.replace(self._row(response), output=tuple(output))
            self._finished.append(FinishedResponse(response=row, items=tuple(self._input)))
        elif self._conversation is not None and response["status"] in _ADDED_TO_CONVERSATION:
            items = (*self._input, *output)
            self._finished.append(FinishedResponse(conversation_id=self._conversation, items=items))

    def finish_later(self, response: ResponseObject) -> None:
        pass


async def read_response(store: Store, organization: str, id: str) -> tuple[StoredResponse, ResponseObject] | None:
    """Return a stored response, and the object that clients see."""
    found = await store.read(lambda session: session.responses.get(organization, id))
    if found is None:
        return None
    response = msgspec.json.decode(found.body, type=dict[str, Any])
    response["output"] = [msgspec.json.decode(item.json) for item in found.output]
    return found, response


def _split(response: ResponseObject) -> tuple[str, list[StoredItem]]:
    """Return the object without its output, and the output: items are stored one by one, to be referenced."""
    output = encode_items(response.get("output") or [])
    return msgspec.json.encode(response | {"output": []}).decode(), output
