"""Scores of pairs of texts: by a cross-encoder, or by the similarity of an embedding model's vectors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from syringa.api.embeddings.inputs import (
    MAX_INPUTS,
    EncoderFields,
    Truncation,
    check_total,
    encode_texts,
    fit,
    input_length,
    read_truncation,
    require_encoder,
)
from syringa.api.embeddings.prepare import find_prompt
from syringa.api.embeddings.vectors import SIMILARITIES, read_vectors
from syringa.api.fields.schema import doc, ignored_field
from syringa.api.models.served_model import ServedModel
from syringa.errors import InvalidRequest
from syringa.ids import random_id
from syringa.modelfiles.embedding import Activation
from syringa.types import EmbeddingRequest, EmbeddingResult

_ACTIVATIONS: dict[Activation, Callable[[float], float]] = {
    "identity": float,
    "tanh": math.tanh,
    "relu": lambda value: max(0.0, value),
    "gelu": lambda value: value * (1 + math.erf(value / math.sqrt(2))) / 2,
    # The same as 1 / (1 + e^-x), which overflows for large negative numbers.
    "sigmoid": lambda value: (1 + math.tanh(value / 2)) / 2,
}


class ScoringFields(EncoderFields, kw_only=True):
    """Base of the bodies of rerank and score requests."""

    use_activation: Annotated[
        bool | None,
        doc("Of a cross-encoder: apply the activation of the model's files; false: return its logits.", True),
    ] = None
    activation: Annotated[bool | None, doc("Same as `use_activation`, which takes precedence.", True)] = None
    softmax: Annotated[bool | None, doc("Same as `use_activation`, which takes precedence.", True)] = None
    mm_processor_kwargs: Annotated[
        dict[str, Any] | None, ignored_field("There are no images; reported as ignored.", default={})
    ] = None

    @property
    def raw(self) -> bool:
        """Whether the logits of a cross-encoder are wanted."""
        given = (self.use_activation, self.softmax, self.activation)
        return next((value for value in given if value is not None), True) is False


@dataclass(frozen=True, kw_only=True)
class TextPairs:
    """Texts to be scored: each second one with the first one of the same index, or with the only one.

    `first_param` and `second_param` name the fields in errors.
    """

    first: list[str]
    second: list[str]
    first_param: str
    second_param: str
    prompted: bool = False  # the first are queries and the second documents, for which a model may have prompts
    max_second_tokens: int | None = None  # further tokens of a second text are cut

    def __post_init__(self) -> None:
        if len(self.first) not in (1, len(self.second)):
            raise InvalidRequest(
                f"{self.first_param}: expected one text or {len(self.second)}, as many as {self.second_param} has, "
                f"not {len(self.first)}.",
                param=self.first_param,
            )

    def first_of(self, index: int) -> int:
        """Return the index of the first text of a pair."""
        return index if len(self.first) > 1 else 0


@dataclass(frozen=True, kw_only=True)
class PreparedScores:
    """A validated request: what to run in the engine, and how scores are made of the result."""

    request: EmbeddingRequest
    model: ServedModel
    pairs: TextPairs
    activation: Activation
    user: str | None = None

    @property
    def tokens(self) -> int:
        return sum(map(len, self.request.inputs))

    def scores(self, result: EmbeddingResult) -> list[float]:
        """Return the score of each pair."""
        vectors = read_vectors(result)
        if self.model.kind == "score":
            activate = _ACTIVATIONS[self.activation]
            return [activate(vector[0]) for vector in vectors]
        count, similarity = len(self.pairs.first), SIMILARITIES[require_encoder(self.model).spec.similarity]
        first, second = vectors[:count], vectors[count:]
        return [similarity(first[self.pairs.first_of(index)], each) for index, each in enumerate(second)]


async def prepare_scores(
    pairs: TextPairs,
    model: ServedModel,
    fields: ScoringFields,
    ignored: list[str],
    *,
    tenant: str = "",
    truncate: bool = False,
) -> PreparedScores:
    """Tokenize pairs of texts. Raises `InvalidRequest`. The names of ignored fields are appended to `ignored`.

    Pairs that are too long are cut, the longer text first, if the fields say so, or by default with `truncate`.
    """
    truncation = read_truncation(fields, model, default=truncate)
    if fields.mm_processor_kwargs:
        ignored.append("mm_processor_kwargs")
    spec = require_encoder(model).spec
    if spec.kind == "score" and spec.dimensions != 1:
        raise InvalidRequest(
            f"The model {model.id!r} has {spec.dimensions} labels, and a score needs a model with one.",
            param="model",
            code="wrong_model_kind",
        )
    prepare = _prepare_pairs if spec.kind == "score" else _prepare_texts
    inputs, second = await prepare(pairs, model, truncation)
    check_total(sum(map(len, inputs)), model, pairs.second_param)
    request = EmbeddingRequest(
        id=random_id("score-"), inputs=inputs, second=second, tenant=tenant, priority=fields.priority or 0
    )
    activation: Activation = "identity" if fields.raw else spec.activation
    return PreparedScores(request=request, model=model, pairs=pairs, activation=activation, user=fields.user)


async def _prepare_pairs(
    pairs: TextPairs, model: ServedModel, truncation: Truncation | None
) -> tuple[list[list[int]], list[int]]:
    """Return the tokens of each pair, and the index of the second text in each."""
    tokenizer = require_encoder(model).tokenizer
    special = tokenizer.special_tokens_pair
    first, second = await _encode_both(pairs, model, truncation, special, together=True)
    room = max(0, input_length(model, truncation) - special)
    firsts = [first[pairs.first_of(index)] for index in range(len(second))]
    lengths = (min(room, len(own) + len(tokens)) for own, tokens in zip(firsts, second, strict=True))
    check_total(special * len(second) + sum(lengths), model, pairs.second_param)  # before the pairs take memory
    inputs, starts = [], []
    for own, tokens in zip(firsts, second, strict=True):
        if truncation is not None and len(own) + len(tokens) > room:
            own_length, length = _share(len(own), len(tokens), room)
            own, tokens = truncation.cut(own, own_length), truncation.cut(tokens, length)
        wrapped, start = tokenizer.wrap_pair(own, tokens)
        inputs.append(wrapped)
        starts.append(start)
    return inputs, starts


async def _prepare_texts(
    pairs: TextPairs, model: ServedModel, truncation: Truncation | None
) -> tuple[list[list[int]], list[int]]:
    """Return the tokens of the first texts, then those of the second ones: each text is embedded once."""
    encoder = require_encoder(model)
    spec, tokenizer = encoder.spec, encoder.tokenizer
    default = spec.prompts[spec.default_prompt] if spec.default_prompt is not None else ""
    query = document = default
    if pairs.prompted:
        found = find_prompt(spec, "query"), find_prompt(spec, "document")
        query, document = (default if prompt is None else prompt for prompt in found)
    special = tokenizer.special_tokens_single
    first, second = await _encode_both(pairs, model, truncation, special, query=query, document=document)
    return [tokenizer.wrap(tokens) for tokens in (*first, *second)], []


async def _encode_both(
    pairs: TextPairs,
    model: ServedModel,
    truncation: Truncation | None,
    special: int,
    *,
    query: str = "",
    document: str = "",
    together: bool = False,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the tokens of the first and the second texts, none more than an input may have. Raises `InvalidRequest`.

    An input has `special` special tokens. `together`: the two texts of a pair are one input, to be cut further.
    """
    if len(pairs.second) > MAX_INPUTS:
        raise InvalidRequest(
            f"{pairs.second_param}: at most {MAX_INPUTS} in one request, got {len(pairs.second)}.",
            param=pairs.second_param,
        )
    room = max(0, input_length(model, truncation) - special)
    first_params, second_params = (
        [_param(name, index, len(texts)) for index in range(len(texts))]
        for name, texts in ((pairs.first_param, pairs.first), (pairs.second_param, pairs.second))
    )

    def keep_first(index: int, tokens: list[int]) -> list[int]:
        return fit(tokens, room, model, truncation, first_params[index], special)

    encode = functools.partial(encode_texts, model=model, truncation=truncation, total_param=pairs.second_param)
    first = await encode([query + text for text in pairs.first], params=first_params, keep=keep_first)

    def keep_second(index: int, tokens: list[int]) -> list[int]:
        tokens = tokens[: pairs.max_second_tokens]
        if truncation is not None or not together:
            return fit(tokens, room, model, truncation, second_params[index], special)
        other = pairs.first_of(index)
        used = len(first[other])
        where = f"{second_params[index]} with {first_params[other]}"
        return fit(tokens, room - used, model, truncation, where, special + used)

    second = await encode([document + text for text in pairs.second], params=second_params, keep=keep_second)
    return first, second


def _share(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens of two texts fit in `room`: the longer one is cut until both are equally long."""
    if 2 * min(first, second) <= room:
        return (first, room - first) if first <= second else (room - second, second)
    return room // 2, room - room // 2


def _param(name: str, index: int, count: int) -> str:
    return name if count == 1 else f"{name}[{index}]"


def ranking(scores: Sequence[float], top: int) -> list[int]:
    """Return the indexes of the best scores, best first; of all scores if `top` is 0."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return order[:top] if top else order
