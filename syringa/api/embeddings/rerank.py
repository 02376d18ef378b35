"""`/v1/rerank` and `/v2/rerank`, in the shapes of Jina, Cohere and vLLM."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from syringa.api.embeddings.inputs import MAX_INPUTS
from syringa.api.embeddings.pairs import PreparedScores, ScoringFields, TextPairs, prepare_scores, ranking
from syringa.api.embeddings.writer import InputUsage, encode
from syringa.api.fields.sampling import MAX_COUNT
from syringa.api.fields.schema import doc, ignored_field
from syringa.api.models.served_model import SCORING, Models
from syringa.errors import InvalidRequest
from syringa.types import EmbeddingResult

_DOCUMENT = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "object"}]}
_SEARCH_UNIT = 100  # documents, in Cohere's prices


class RerankRequest(ScoringFields, kw_only=True):
    """The body of `POST /v1/rerank`, `POST /v2/rerank` and `POST /rerank`."""

    query: Annotated[Annotated[str, Meta(min_length=1)], doc("Text that the documents are compared with.")]
    documents: Annotated[
        Annotated[list[Any], Meta(min_length=1, max_length=MAX_INPUTS)],
        doc(
            "Texts to rank, none empty, or objects with a text in `text`; at most 2048.",
            items=_DOCUMENT,
        ),
    ]
    top_n: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None, doc("Number of documents to return; 0: all.", 0)
    ] = None
    return_documents: Annotated[
        bool | None, doc("Return the documents too. Default: true; on `/v2/rerank`, as Cohere has it, false.")
    ] = None
    rank_fields: Annotated[
        Annotated[list[str], Meta(min_length=1, max_length=64)] | None,
        doc(
            "With objects as documents: names of the fields that are compared, as lines of their names and values. "
            "Reported as ignored if there are none."
        ),
    ] = None
    max_tokens_per_doc: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_COUNT)] | None,
        doc("Further tokens of a document are cut. Default: no limit but that of the model."),
    ] = None
    truncation: Annotated[
        bool | None,
        doc("Cut documents that are longer than the model takes with the query; false: they get 400.", True),
    ] = None
    max_chunks_per_doc: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_COUNT)] | None,
        ignored_field("Documents are not split; reported unless 1.", default=1),
    ] = None


class RerankResult(msgspec.Struct):
    index: Annotated[int, doc("Of the document in the request.")]
    relevance_score: Annotated[float, doc("Higher is more relevant.")]
    document: Annotated[dict[str, Any] | UnsetType, doc("With `return_documents`: an object with `text`.")] = UNSET


class BilledUnits(msgspec.Struct):
    search_units: Annotated[int, doc("One for each 100 documents; the usage record counts tokens.")]


class ApiVersion(msgspec.Struct):
    version: str


class RerankMeta(msgspec.Struct):
    """What Cohere's clients read; the tokens are in `usage`."""

    api_version: ApiVersion
    billed_units: BilledUnits


class RerankResponse(msgspec.Struct):
    """The documents, most relevant first."""

    id: str
    object: Annotated[str, doc("`list`.", const="list")]
    model: str
    results: list[RerankResult]
    usage: InputUsage
    meta: RerankMeta


class RerankWriter:
    """Writes the ranked documents of a request."""

    def __init__(self, prepared: PreparedScores, body: RerankRequest, *, version: str) -> None:
        self._prepared, self._top, self._version = prepared, body.top_n or 0, version
        shown = version == "1" if body.return_documents is None else body.return_documents
        self._documents: list[Any] | None = body.documents if shown else None
        self._id = f"rerank-{body.request_id or prepared.request.id.partition('-')[2]}"

    def render(self, result: EmbeddingResult) -> bytes:
        """Return the JSON body."""
        prepared, tokens = self._prepared, self._prepared.tokens
        scores = prepared.scores(result)
        results = [RerankResult(index, scores[index], self._document(index)) for index in ranking(scores, self._top)]
        units = BilledUnits(-(-len(scores) // _SEARCH_UNIT))
        meta = RerankMeta(ApiVersion(self._version), units)
        usage = InputUsage(tokens, tokens)
        return encode(RerankResponse(self._id, "list", prepared.model.id, results, usage, meta))

    def _document(self, index: int) -> dict[str, Any] | UnsetType:
        if self._documents is None:
            return UNSET
        document = self._documents[index]
        return document if isinstance(document, dict) else {"text": document}


async def prepare_rerank(
    body: RerankRequest, models: Models, ignored: list[str], tenant: str = "", *, version: str = "1"
) -> tuple[PreparedScores, RerankWriter]:
    """Validate the request and tokenize its texts. The names of ignored fields are appended to `ignored`.

    `version` is that of Cohere's API, whose defaults differ.
    """
    model = await models.find(body.model, SCORING)
    if body.max_chunks_per_doc not in (None, 1):
        ignored.append("max_chunks_per_doc")
    if body.rank_fields is not None and not any(isinstance(each, dict) for each in body.documents):
        ignored.append("rank_fields")
    texts = [_read_document(each, f"documents[{index}]", body) for index, each in enumerate(body.documents)]
    pairs = TextPairs(
        first=[body.query],
        second=texts,
        first_param="query",
        second_param="documents",
        prompted=True,
        max_second_tokens=body.max_tokens_per_doc,
    )
    truncate = body.truncation is not False
    prepared = await prepare_scores(pairs, model, body, ignored, tenant=tenant, truncate=truncate)
    return prepared, RerankWriter(prepared, body, version=version)


def _read_document(document: Any, param: str, body: RerankRequest) -> str:
    """Return the text of a document. Raises `InvalidRequest`."""
    if isinstance(document, str) and document:
        return document
    if not isinstance(document, dict):
        raise InvalidRequest(f"{param}: expected a text that is not empty, or an object with one.", param=param)
    if body.rank_fields is not None:
        missing = next((name for name in body.rank_fields if name not in document), None)
        if missing is not None:
            raise InvalidRequest(f"{param}: has no {missing!r}, which is in rank_fields.", param=param)
        return "\n".join(f"{name}: {_show(document[name])}" for name in body.rank_fields)
    text = document.get("text")
    if not isinstance(text, str) or not text:
        raise InvalidRequest(f"{param}.text: expected a text that is not empty.", param=f"{param}.text")
    return text


def _show(value: Any) -> str:
    return value if isinstance(value, str) else encode(value).decode()
