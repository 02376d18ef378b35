"""`/v1/score`, in vLLM's shape."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec

from syringa.api.embeddings.inputs import MAX_INPUTS, read_texts
from syringa.api.embeddings.pairs import PreparedScores, ScoringFields, TextPairs, prepare_scores
from syringa.api.embeddings.writer import InputUsage, encode
from syringa.api.fields.schema import doc, nullable
from syringa.api.models.served_model import SCORING, Models
from syringa.errors import InvalidRequest
from syringa.types import EmbeddingResult

_TEXT = {"type": "string", "minLength": 1}
_TEXTS = nullable(_TEXT, {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_INPUTS})


class ScoreRequest(ScoringFields, kw_only=True):
    """The body of `POST /v1/score` and `POST /score`."""

    text_1: Annotated[
        Any,
        doc("A text, which is compared with each of `text_2`, or an array of as many texts as `text_2` has.", **_TEXTS),
    ] = None
    text_2: Annotated[Any, doc("A text or an array of texts, at most 2048, none empty.", **_TEXTS)] = None
    queries: Annotated[
        Any, doc("Same as `text_1`, for queries: an embedding model's prompt for them is used.", **_TEXTS)
    ] = None
    documents: Annotated[
        Any, doc("Same as `text_2`, for documents: an embedding model's prompt for them is used.", **_TEXTS)
    ] = None


class ScoreObject(msgspec.Struct):
    index: Annotated[int, doc("Of the pair.")]
    object: Annotated[str, doc("`score`.", const="score")]
    score: Annotated[float, doc("Higher is more similar or more relevant.")]


class ScoreResponse(msgspec.Struct):
    """The scores of all pairs, in their order."""

    id: str
    object: Annotated[str, doc("`list`.", const="list")]
    created: Annotated[int, doc("Unix time in seconds.")]
    model: str
    data: list[ScoreObject]
    usage: InputUsage


class ScoreWriter:
    """Writes the scores of a request."""

    def __init__(self, prepared: PreparedScores, request_id: str | None) -> None:
        self._prepared = prepared
        self._id = prepared.request.id if request_id is None else f"score-{request_id}"
        self._created = int(time.time())

    def render(self, result: EmbeddingResult) -> bytes:
        """Return the JSON body."""
        prepared, tokens = self._prepared, self._prepared.tokens
        data = [ScoreObject(index, "score", score) for index, score in enumerate(prepared.scores(result))]
        usage = InputUsage(tokens, tokens)
        return encode(ScoreResponse(self._id, "list", self._created, prepared.model.id, data, usage))


async def prepare_score(
    body: ScoreRequest, models: Models, ignored: list[str], tenant: str = ""
) -> tuple[PreparedScores, ScoreWriter]:
    """Validate the request and tokenize its texts. The names of ignored fields are appended to `ignored`."""
    model = await models.find(body.model, SCORING)
    named = body.queries is not None or body.documents is not None
    if named and (body.text_1 is not None or body.text_2 is not None):
        raise InvalidRequest("Give either text_1 and text_2, or queries and documents.", param="text_1")
    names = ("queries", "documents") if named else ("text_1", "text_2")
    first, second = (read_texts(getattr(body, name), name) for name in names)
    pairs = TextPairs(first=first, second=second, first_param=names[0], second_param=names[1], prompted=named)
    prepared = await prepare_scores(pairs, model, body, ignored, tenant=tenant)
    return prepared, ScoreWriter(prepared, body.request_id)
