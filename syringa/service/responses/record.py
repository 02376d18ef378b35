"""One response in the store, from the row that says it has begun to the one that says how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from syringa.errors import StoreError
from syringa.service.responses.history import encoded
from syringa.service.responses.state import State
from syringa.store import Event, Item, Running, Status, Store, StoredResponse

Response = dict[str, Any]
"""A response object as clients see it."""


class Record:
    """A response of this process that runs and is stored."""

    def __init__(self, state: State, organisation: str, id: str) -> None:
        self.state, self.organisation, self.id = state, organisation, id

    async def begin(self, response: Response, input: Sequence[dict[str, Any]]) -> None:
        """Before anything is generated. Raises `StoreUnavailable`: then nothing is."""
        body, _ = _split(response)
        conversation = response.get("conversation")
        row = StoredResponse(
            id=self.id,
            organisation=self.organisation,
            created_at=int(response["created_at"]),
            expires_at=self.state.expiry(int(response["created_at"])),
            model=response["model"],
            status=response["status"],
            background=bool(response.get("background")),
            previous_id=response.get("previous_response_id"),
            conversation_id=conversation["id"] if conversation else None,
            body=body,
            owner=self.state.owner,
        )
        if not await self.state.store.create_response(row, encoded(input)):
            raise StoreError(f"the id {self.id} is taken already")
        self.state.run(self._key)

    def on_loss(self, lost: Any) -> None:
        """`lost` is called if the response is cancelled or deleted by another process."""
        self.state.run(self._key, lost)

    async def update(self, response: Response) -> None:
        body, _ = _split(response)
        await self.state.store.update_response(self.organisation, self.id, status=response["status"], body=body)

    async def finish(self, response: Response, events: Sequence[Event] = ()) -> None:
        """Keeps how it ended, with the last of its events. Does not fail: what cannot be written is tried again."""
        await self.state.end(self._key, lambda: self._write(response, events))

    def finish_later(self, response: Response) -> None:
        """For a client that went away: nobody waits."""
        self.state.later(self.finish(response))

    async def _write(self, response: Response, events: Sequence[Event]) -> None:
        body, output = _split(response)
        status: Status = response["status"]
        await self.state.store.write(
            lambda session: (
                session.events.append(self.organisation, self.id, events) if events else None,
                session.responses.finish(self.organisation, self.id, status, body, output),
            )
        )

    @property
    def _key(self) -> Running:
        return Running(self.organisation, self.id)


class Appendix(Record):
    """A response that is not stored itself, in a conversation that grows by it all the same."""

    def __init__(self, state: State, organisation: str, id: str, conversation: str) -> None:
        super().__init__(state, organisation, id)
        self._conversation = conversation
        self._input: list[Item] = []

    async def begin(self, response: Response, input: Sequence[dict[str, Any]]) -> None:
        self._input = encoded(input)

    async def _write(self, response: Response, events: Sequence[Event]) -> None:
        if response["status"] not in ("completed", "incomplete"):
            return
        new = [*self._input, *encoded(response["output"])]
        await self.state.store.write(
            lambda session: session.conversations.add_items(self.organisation, self._conversation, new, known="skip")
        )


async def read(store: Store, organisation: str, id: str) -> tuple[StoredResponse, Response] | None:
    """A stored response, and the object that clients see."""
    found = await store.get_response(organisation, id)
    if found is None:
        return None
    response = msgspec.json.decode(found.body, type=dict[str, Any])
    response["output"] = [msgspec.json.decode(item.json) for item in found.output]
    return found, response


def _split(response: Response) -> tuple[str, list[Any]]:
    """The object without its output, and the output: as items, they can be found and gone on from one by one."""
    output = encoded(response.get("output") or [])
    return msgspec.json.encode(response | {"output": []}).decode(), output
