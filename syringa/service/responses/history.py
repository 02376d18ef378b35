"""What a new response goes on from: a chain of responses, a conversation, and items that are named by their ids."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import msgspec

from syringa.errors import InvalidRequest, NotFound
from syringa.store import ACTIVE, BrokenChain, Chain, Item, Store

_decode = msgspec.json.Decoder(dict[str, Any]).decode
_PARAM = "previous_response_id"
NOT_FOUND = "previous_response_not_found"


async def of_response(store: Store, organisation: str, id: str) -> list[dict[str, Any]]:
    """All items that a response with this `previous_response_id` goes on from, oldest first."""
    chain = await store.chain(organisation, id)
    if isinstance(chain, BrokenChain):
        raise missing_response(chain.missing, chain.after)
    status = chain.links[-1].status
    if status in ACTIVE:
        raise InvalidRequest(
            f"{_PARAM}: the response {id!r} is still {status}; wait for its end before you go on from it.", param=_PARAM
        )
    if status == "failed":
        raise InvalidRequest(
            f"{_PARAM}: the response {id!r} has failed; go on from the one before it, or send it again.", param=_PARAM
        )
    before = await _conversation_before(store, organisation, chain)
    return decoded([*before, *chain.items])


async def _conversation_before(store: Store, organisation: str, chain: Chain) -> list[Item]:
    """A chain may begin with a response that ran in a conversation, and went on from what that held until then.

    Where all that it left in the conversation was deleted, nothing says what came before it, and nothing is taken.
    """
    conversation = chain.links[0].conversation_id
    if conversation is None:
        return []
    theirs = {item.id for item in chain.items}
    items = await store.conversation_history(organisation, conversation) or ()
    if not any(item.id in theirs for item in items):
        return []
    return list(itertools.takewhile(lambda item: item.id not in theirs, items))


async def of_conversation(store: Store, organisation: str, id: str) -> list[dict[str, Any]]:
    items = await store.conversation_history(organisation, id)
    if items is None:
        raise missing_conversation(id, param="conversation")
    return decoded(items)


async def named(store: Store, organisation: str, ids: list[str]) -> dict[str, dict[str, Any]]:
    """The items that references name. What is not there is left out: the wire layer knows where it was named."""
    found = await store.find_items(organisation, ids)
    return {id: _decode(item.json) for id, item in found.items()}


def missing_response(id: str, after: str | None = None) -> InvalidRequest:
    said = f"{_PARAM}: there is no response {id!r}"
    said += f", which {after!r} went on from: it was deleted or has expired." if after else "."
    return InvalidRequest(said, param=_PARAM, code=NOT_FOUND)


def missing_conversation(id: str, param: str | None = None) -> NotFound:
    return NotFound(f"There is no conversation {id!r}.", param=param, code="conversation_not_found")


def decoded(items: Iterable[Item]) -> list[dict[str, Any]]:
    return [_decode(item.json) for item in items]


def encoded(items: Iterable[dict[str, Any]]) -> list[Item]:
    return [Item(item["id"], msgspec.json.encode(item).decode()) for item in items]
