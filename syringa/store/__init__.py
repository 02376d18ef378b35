"""Persistence: responses, conversations, files, batches, API keys, usage records and models configured at run time.

The store knows rows, transactions and organizations. Items, events and response bodies are JSON text to it: it does not
know the API types, how a request is answered, or HTTP.

A query is a method in `store/queries`, run through `Store.read` or `Store.write`:

    key = await store.read(lambda session: session.keys.get(id))

SQLAlchemy takes 0.2 s to import, so only the store's threads import it, when the first query runs.
"""

from __future__ import annotations

from syringa.store.records import (
    ACTIVE,
    ACTIVE_BATCH,
    ActiveBatch,
    ApiKey,
    BatchCounts,
    BatchResult,
    BatchStatus,
    BrokenChain,
    Chain,
    ChainLink,
    FilePurpose,
    FinishedResponse,
    Grouping,
    ItemPage,
    KeySnapshot,
    ListedConversation,
    ListedResponse,
    ListSize,
    ModelUsage,
    Order,
    Organization,
    Outcome,
    PullStage,
    PullStatus,
    ResponseFilter,
    ResponseKey,
    ResponseStatus,
    RevisionName,
    SeriesRow,
    StoredBatch,
    StoredConversation,
    StoredEvent,
    StoredFile,
    StoredItem,
    StoredModel,
    StoredPull,
    StoredResponse,
    UsageFilter,
    UsageRecord,
    UsageSum,
)
from syringa.store.store import Store

__all__ = [
    "ACTIVE",
    "ACTIVE_BATCH",
    "ActiveBatch",
    "ApiKey",
    "BatchCounts",
    "BatchResult",
    "BatchStatus",
    "BrokenChain",
    "Chain",
    "ChainLink",
    "FilePurpose",
    "FinishedResponse",
    "Grouping",
    "ItemPage",
    "KeySnapshot",
    "ListSize",
    "ListedConversation",
    "ListedResponse",
    "ModelUsage",
    "Order",
    "Organization",
    "Outcome",
    "PullStage",
    "PullStatus",
    "ResponseFilter",
    "ResponseKey",
    "ResponseStatus",
    "RevisionName",
    "SeriesRow",
    "Store",
    "StoredBatch",
    "StoredConversation",
    "StoredEvent",
    "StoredFile",
    "StoredItem",
    "StoredModel",
    "StoredPull",
    "StoredResponse",
    "UsageFilter",
    "UsageRecord",
    "UsageSum",
]
