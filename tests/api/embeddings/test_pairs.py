"""Pairs of texts for a cross-encoder: how long ones are cut, and which are refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from syringa.api.decoding import convert
from syringa.api.embeddings import inputs
from syringa.api.embeddings.pairs import PreparedScores
from syringa.api.embeddings.rerank import RerankRequest, prepare_rerank
from syringa.api.models.served_model import FixedModels, ServedModel
from syringa.errors import ContextLengthExceeded, InvalidRequest
from tests.embedding_models import MAX_LENGTH, scoring_model, tokens_of

LETTERS, DIGITS = "abcdefghijklmnopqrstuvwxyz", "0123456789" * 3
SPECIAL_TOKENS = 3


async def prepare(model: ServedModel | None = None, **body: Any) -> PreparedScores:
    request = convert(body, RerankRequest)
    return (await prepare_rerank(request, FixedModels([model or scoring_model()]), []))[0]


def cut_pair(first: list[int], second: list[int], limit: int, side: str) -> tuple[list[int], list[int]]:
    """Return what remains of two texts if the longer one loses a token until both fit."""
    remaining = first, second
    while sum(map(len, remaining)) > max(0, limit - SPECIAL_TOKENS):
        longer = 0 if len(remaining[0]) >= len(remaining[1]) else 1
        cut = remaining[longer][1:] if side == "left" else remaining[longer][:-1]
        remaining = (cut, remaining[1]) if longer == 0 else (remaining[0], cut)
    return remaining


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("limit", [1, 3, 4, 9, MAX_LENGTH])
@pytest.mark.parametrize("per_document", [None, 5, 18])
async def test_longer_text_of_a_pair_is_cut_from_its_side(side: str, limit: int, per_document: int | None) -> None:
    for query, document in itertools.product((1, 2, 7, 13, 20), repeat=2):
        prepared = await prepare(
            query=LETTERS[:query],
            documents=[DIGITS[:document]],
            truncate_prompt_tokens=limit,
            truncation_side=side,
            max_tokens_per_doc=per_document,
        )
        (tokens,), (start,) = prepared.request.inputs, prepared.request.second
        expected = cut_pair(tokens_of(LETTERS[:query]), tokens_of(DIGITS[:document])[:per_document], limit, side)
        assert (tokens[1 : start - 1], tokens[start:-1]) == expected


async def test_pair_that_is_too_long_is_named_with_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_SLICE_CHARACTERS", 10)
    body: dict[str, Any] = {"documents": ["b", "c" * 12, *["d" * 20] * 3], "truncation": False}
    with pytest.raises(ContextLengthExceeded, match=r"documents\[1\] with query has 17\."):
        await prepare(query="ab", **body)
    with pytest.raises(ContextLengthExceeded, match=r"; query has 23\.") as caught:
        await prepare(query="a" * 20, **body)
    assert caught.value.param == "query"


async def test_query_counts_for_each_document() -> None:
    model = scoring_model(max_request_tokens=100)
    await prepare(model, query="a" * 10, documents=["b"] * 7)
    with pytest.raises(InvalidRequest, match="documents: at most 100 tokens in one request, got 112:"):
        await prepare(model, query="a" * 10, documents=["b"] * 8)
