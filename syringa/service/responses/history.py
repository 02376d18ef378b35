"""The context of a new response: its previous responses, its conversation, and items referenced by id."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from syringa.errors import InvalidRequest, NotFound
from syringa.service.limits.memory_budget import MemoryBudget
from syringa.service.responses.manager import ResponseManager
from syringa.store import ACTIVE, BrokenChain, Chain, ListSize, Store, StoredItem

if TYPE_CHECKING:
    from syringa.store.session import Session

MEMORY_BYTES = 64 << 20  # of all histories that are read and rendered at the same time

_decode = msgspec.json.Decoder(dict[str, Any]).decode
_PARAM = "previous_response_id"
NOT_FOUND = "previous_response_not_found"
TOO_LARGE = "history_too_large"


class HistoryLimits(NamedTuple):
    """The settings `history_max_items` and `history_max_bytes`."""

    max_items: int
    max_bytes: int

    def check(self, size: ListSize, param: str) -> None:
        """Raise `InvalidRequest` for a history above a limit. `param`: the field that names it."""
        for found, limit, unit in ((size.items, self.max_items, "items"), (size.bytes, self.max_bytes, "bytes")):
            if found > limit:
                subject = "history" if param == _PARAM else "conversation"
                message = f"{param}: a {subject} of {found} {unit} exceeds this server's limit of {limit}"
                raise InvalidRequest(f"{message} (history_max_{unit}).", param=param, code=TOO_LARGE)


class History(NamedTuple):
    """The stored items that a request refers to."""

    items: list[dict[str, Any]]
    referenced: dict[str, dict[str, Any]]  # by id; unknown ids are left out: the caller knows which field named them
    size: ListSize  # of `items`


class HistoryReader:
    """Reads histories within limits on the size of each, and on the memory of all that are read at the same time."""

    def __init__(self, responses: ResponseManager, limits: HistoryLimits) -> None:
        self.limits = limits
        self._responses = responses
        self._memory = MemoryBudget(max(MEMORY_BYTES, limits.max_bytes))

    @asynccontextmanager
    async def read(
        self,
        organization: str,
        *,
        previous_response: str | None = None,
        conversation: str | None = None,
        references: Sequence[str] = (),
    ) -> AsyncIterator[History]:
        """Read the history of a response, or of a conversation, and items referenced by id.

        Its size is checked before it is loaded. It counts against the memory of this process until the block ends.
        """
        if previous_response is None and conversation is None and not references:
            yield History([], {}, ListSize())
            return
        store = self._responses.store

        def measure(session: Session) -> tuple[ListSize, ListSize]:
            size = ListSize()
            if previous_response is not None:
                size = session.chains.chain_size(organization, previous_response)
            elif conversation is not None:
                size = session.conversations.size(organization, conversation)
            return size, session.chains.items_size(organization, references)

        size, referenced_size = await store.read(measure)
        self.limits.check(size, _PARAM if previous_response is not None else "conversation")
        self.limits.check(referenced_size, "input")
        async with self._memory.reserve(organization, size.bytes + referenced_size.bytes):
            items: list[dict[str, Any]] = []
            if previous_response is not None:
                items = await _response_history(store, organization, previous_response)
            elif conversation is not None:
                items = await _conversation_history(store, organization, conversation)
            referenced = await _referenced_items(store, organization, references) if references else {}
            yield History(items, referenced, size)


async def _response_history(store: Store, organization: str, id: str) -> list[dict[str, Any]]:
    """Return all items that a response with this `previous_response_id` continues, oldest first."""
    chain = await store.read(lambda session: session.chains.chain(organization, id))
    if isinstance(chain, BrokenChain):
        raise missing_response(chain.missing, chain.after)
    status = chain.links[-1].status
    if status in ACTIVE:
        raise InvalidRequest(
            f"{_PARAM}: the response {id!r} is still {status}; wait until it has finished before you continue it.",
            param=_PARAM,
        )
    if status == "failed":
        raise InvalidRequest(
            f"{_PARAM}: the response {id!r} has failed; continue the one before it, or send it again.", param=_PARAM
        )
    before = await _conversation_before(store, organization, chain)
    return decode_items([*before, *chain.items])


async def _conversation_before(store: Store, organization: str, chain: Chain) -> list[StoredItem]:
    """Return the conversation items before a chain whose first response ran in a conversation.

    If all its items were deleted from the conversation, its position is unknown and nothing is returned.
    """
    conversation = chain.links[0].conversation_id
    if conversation is None:
        return []
    in_chain = {item.id for item in chain.items}
    items = await store.read(lambda session: session.conversations.all_items(organization, conversation)) or ()
    if not any(item.id in in_chain for item in items):
        return []
    return list(itertools.takewhile(lambda item: item.id not in in_chain, items))


async def _conversation_history(store: Store, organization: str, id: str) -> list[dict[str, Any]]:
    """Return all items of a conversation. Raises `NotFound`."""
    items = await store.read(lambda session: session.conversations.all_items(organization, id))
    if items is None:
        raise missing_conversation(id, param="conversation")
    return decode_items(items)


async def _referenced_items(store: Store, organization: str, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    found = await store.read(lambda session: session.chains.find_items(organization, ids))
    return {id: _decode(item.json) for id, item in found.items()}


def missing_response(id: str, after: str | None = None) -> InvalidRequest:
    message = f"{_PARAM}: there is no response {id!r}"
    message += f", which {after!r} continues: it was deleted or has expired." if after else "."
    return InvalidRequest(message, param=_PARAM, code=NOT_FOUND)


def missing_conversation(id: str, param: str | None = None) -> NotFound:
    return NotFound(f"There is no conversation {id!r}.", param=param, code="conversation_not_found")


def decode_items(items: Iterable[StoredItem]) -> list[dict[str, Any]]:
    return [_decode(item.json) for item in items]


def size_of(items: Sequence[StoredItem]) -> ListSize:
    return ListSize(len(items), sum(len(item.json.encode()) for item in items))


def encode_items(items: Iterable[dict[str, Any]]) -> list[StoredItem]:
    return [StoredItem(item["id"], msgspec.json.encode(item).decode()) for item in items]
