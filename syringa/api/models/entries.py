"""Wire types of `/v1/models`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from syringa.api.fields.schema import doc
from syringa.api.models.served_model import ModelCard, ModelStatus
from syringa.types import ModelKind


class PriceEntry(msgspec.Struct):
    """Prices per million tokens."""

    input: float
    cached_input: Annotated[float, doc("Price of input tokens found in the prefix cache.")]
    output: float


class ModelEntry(msgspec.Struct):
    """A model in the answer of `/v1/models`."""

    id: str
    created: Annotated[int, doc("Unix time in seconds.")]
    object: Annotated[str, doc("`model`.", const="model")]
    owned_by: str
    root: Annotated[str, doc("The id of the model: paths of files are not shown.")]
    parent: Annotated[str | None, doc("Null: there are no adapters of other models.")]
    max_model_len: Annotated[
        int | None, doc("Maximum prompt plus output length, in tokens; null if the model's files cannot be read.")
    ]
    context_length: Annotated[int | None, doc("Same as `max_model_len`, under the name that some clients read.")]
    aliases: list[str]
    kind: Annotated[
        ModelKind | None,
        doc(
            "`generate`: text; `embed`: embeddings; `score`: scores of pairs of texts; null if its files cannot be "
            "read."
        ),
    ]
    dimensions: Annotated[int | None, doc("Of an embedding model's vectors; null for other models.")]
    capabilities: Annotated[
        list[str],
        doc("Any of `completion`, `chat`, `vision`, `reasoning`; or of `embedding`, `rerank`, `score`."),
    ]
    prices: Annotated[PriceEntry | None, doc("Null if no prices are set.")]
    status: Annotated[
        ModelStatus, doc("`cold`: loaded by the first request, which waits; `failed`: could not be loaded.")
    ]


class ModelList(msgspec.Struct):
    object: Annotated[str, doc("`list`.", const="list")]
    data: list[ModelEntry]


def to_model_entry(card: ModelCard) -> ModelEntry:
    """Return a model card in the wire format."""
    prices = None
    if card.prices is not None:
        cached = card.prices.input if card.prices.cached_input is None else card.prices.cached_input
        prices = PriceEntry(card.prices.input, cached, card.prices.output)
    return ModelEntry(
        id=card.id,
        created=card.created,
        object="model",
        owned_by="syringa",
        root=card.id,
        parent=None,
        max_model_len=card.max_model_len,
        context_length=card.max_model_len,
        aliases=[name for name in dict.fromkeys(card.aliases) if name != card.id],
        kind=card.kind,
        dimensions=card.dimensions,
        capabilities=list(card.capabilities or ()),
        prices=prices,
        status=card.status,
    )
