"""`/v1/models` in Anthropic's shape."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

import msgspec

from syringa.api.fields.schema import doc
from syringa.api.models.served_model import ModelCard
from syringa.errors import NotFound

MAX_PAGE = 1000


class AnthropicModel(msgspec.Struct, kw_only=True):
    id: str
    type: Annotated[str, doc("`model`.", const="model")] = "model"
    display_name: str
    created_at: Annotated[str, doc("Time in RFC 3339.", format="date-time")]
    max_input_tokens: Annotated[int | None, doc("Length of the context; null if the model's files cannot be read.")]
    max_tokens: Annotated[int | None, doc("Maximum number of output tokens.")]
    lifecycle: Annotated[str, doc("`active`.", const="active")] = "active"


class AnthropicModelList(msgspec.Struct, kw_only=True):
    """The list of models for clients that send `anthropic-version`, or their key in `x-api-key`."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def to_anthropic_model(card: ModelCard) -> AnthropicModel:
    return AnthropicModel(
        id=card.id,
        display_name=card.id,
        created_at=datetime.fromtimestamp(card.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_input_tokens=card.max_model_len,
        max_tokens=card.max_model_len,
    )


def list_anthropic_models(
    cards: Sequence[ModelCard], *, after: str | None, before: str | None, limit: int, lifecycles: Sequence[str] = ()
) -> AnthropicModelList:
    """Return a page of the models: those after one id or before another. Raises `NotFound` for an unknown id.

    All models are `active`: where `lifecycles` has other values alone, there are none.
    """
    ids = [card.id for card in cards]
    for name, id in (("after_id", after), ("before_id", before)):
        if id is not None and id not in ids:
            raise NotFound(f"{name}: there is no model {id!r}.", param=name)
    start = 0 if after is None else ids.index(after) + 1
    end = len(ids) if before is None else ids.index(before)
    rest = list(cards[start:end]) if not lifecycles or "active" in lifecycles else []
    page = rest[:limit] if before is None else rest[-limit:]
    data = [to_anthropic_model(card) for card in page]
    return AnthropicModelList(
        data=data,
        has_more=len(rest) > len(page),
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
    )
