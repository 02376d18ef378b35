"""What has to outlive a process: responses, conversations, keys, and what was used.

The store knows rows, transactions and organisations. It must not know what an item means, how a request is answered, or
that HTTP exists: an item, an event and a response's body are JSON text to it.

SQLAlchemy takes a fifth of a second to import. Only `Store`'s own threads do so, and only once something is stored or
read, so importing this package and making a `Store` cost nothing.
"""

from __future__ import annotations

from syringa.store.records import (
    ACTIVE,
    ApiKey,
    BrokenChain,
    Chain,
    ChainLink,
    Conversation,
    Event,
    Grouping,
    Item,
    KeySnapshot,
    ModelRow,
    ModelUsage,
    Order,
    Organisation,
    Outcome,
    Page,
    Revised,
    Running,
    Status,
    StoredResponse,
    UsageFilter,
    UsageRow,
    UsageSum,
)
from syringa.store.store import Store

__all__ = [
    "ACTIVE",
    "ApiKey",
    "BrokenChain",
    "Chain",
    "ChainLink",
    "Conversation",
    "Event",
    "Grouping",
    "Item",
    "KeySnapshot",
    "ModelRow",
    "ModelUsage",
    "Order",
    "Organisation",
    "Outcome",
    "Page",
    "Revised",
    "Running",
    "Status",
    "Store",
    "StoredResponse",
    "UsageFilter",
    "UsageRow",
    "UsageSum",
]
