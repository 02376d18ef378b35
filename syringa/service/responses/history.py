"""The context of a new response: its previous responses, its conversation, and items referenced by id."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import msgspec

from syringa.errors import InvalidRequest, NotFound
from syringa.store import ACTIVE, BrokenChain, Chain, Store, StoredItem

_decode = msgspec.json.Decoder(dict[str, Any]).decode
_PARAM = "previous_response_id"
NOT_FOUND = "previous_response_not_found"


async def response_history(store: Store, organization: str, id: str) -> list[dict[str, Any]]:
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


async def conversation_history(store: Store, organization: str, id: str) -> list[dict[str, Any]]:
    """Return all items of a conversation. Raises `NotFound`."""
    items = await store.read(lambda session: session.conversations.all_items(organization, id))
    if items is None:
        raise missing_conversation(id, param="conversation")
    return decode_items(items)


async def referenced_items(store: Store, organization: str, ids: list[str]) -> dict[str, dict[str, Any]]:
    """Return the items with these ids. Unknown ids are left out: the caller knows which field named them."""
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


def encode_items(items: Iterable[dict[str, Any]]) -> list[StoredItem]:
    return [StoredItem(item["id"], msgspec.json.encode(item).decode()) for item in items]
