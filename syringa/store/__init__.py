"""Persistence: responses, conversations, API keys, usage records and models configured at run time.

The store knows rows, transactions and organizations. Items, events and response bodies are JSON text to it: it does not
know the API types, how a request is answered, or HTTP.

A query is a method in `store/queries`, run through `Store.read` or `Store.write`:

    key = await store.read(lambda session: session.keys.get(id))

SQLAlchemy takes 0.2 s to import, so only the store's threads import it, when the first query runs.
"""

from __future__ import annotations

from syringa.store.records import (
    ACTIVE,
    ApiKey,
    BrokenChain,
    Chain,
    ChainLink,
    Grouping,
    ItemPage,
    KeySnapshot,
    ListSize,
    ModelUsage,
    Order,
    Organization,
    Outcome,
    ResponseKey,
    ResponseStatus,
    RevisionName,
    StoredConversation,
    StoredEvent,
    StoredItem,
    StoredModel,
    StoredResponse,
    UsageFilter,
    UsageRecord,
    UsageSum,
)
from syringa.store.store import Store

__all__ = [
    "ACTIVE",
    "ApiKey",
    "BrokenChain",
    "Chain",
    "ChainLink",
    "Grouping",
    "ItemPage",
    "KeySnapshot",
    "ListSize",
    "ModelUsage",
    "Order",
    "Organization",
    "Outcome",
    "ResponseKey",
    "ResponseStatus",
    "RevisionName",
    "Store",
    "StoredConversation",
    "StoredEvent",
    "StoredItem",
    "StoredModel",
    "StoredResponse",
    "UsageFilter",
    "UsageRecord",
    "UsageSum",
]
