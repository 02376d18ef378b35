"""Wire types of `/v1/models`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from syringa.api.fields.schema import doc
from syringa.api.models.served_model import ModelCard, ModelStatus
from syringa.types import LoadPhase, ModelKind, ModelLoading


class PriceEntry(msgspec.Struct):
    """Prices per million tokens."""

    input: float
    cached_input: Annotated[float, doc("Price of input tokens found in the prefix cache.")]
    output: float


class LoadingEntry(msgspec.Struct):
    """How far a model is in being loaded."""

    phase: Annotated[
        LoadPhase,
        doc(
            "`queued`: it waits for memory or for a node; `fetching`: its files are copied to the node; `starting`: "
            "its worker is started; `weights`: they are read; `warmup`: kernels are compiled and CUDA graphs recorded."
        ),
    ]
    fraction: Annotated[float | None, doc("Part of the phase that is done, from 0 to 1; null: not known.")]
    seconds: Annotated[float, doc("Seconds since loading was asked for.")]


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
    loading: Annotated[LoadingEntry | None, doc("How far loading is; null if the status is another one.")]


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
        loading=None if card.loading is None else to_loading_entry(card.loading),
    )


def to_loading_entry(loading: ModelLoading) -> LoadingEntry:
    return LoadingEntry(loading.progress.phase, loading.progress.fraction, round(loading.seconds, 1))
