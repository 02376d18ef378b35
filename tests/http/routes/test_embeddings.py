"""Embeddings, rerank and score over HTTP, with a fake engine."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from syringa.api.models.served_model import FixedModels, ServedModel
from syringa.config import Config, Prices
from syringa.engine.interface import SingleEngineProvider
from syringa.errors import EngineOverloaded, RequestSuspected
from syringa.http.app import create_app
from syringa.http.dispatch import GenerationDispatcher
from syringa.service.app_state import AppState
from syringa.service.usage.accounting import RequestAccounting, usage_record
from tests.chat_models import plain_model
from tests.client import eventually, server
from tests.embedding_models import ScoringEngine, embedding_model, scoring_model, tokens_of
from tests.fake_engine import FakeEngine, fake_vector
from tests.schemas import validate_openai


def client(
    *models: ServedModel,
    engine: FakeEngine | None = None,
    app_state: AppState | None = None,
    dispatcher: GenerationDispatcher | None = None,
) -> httpx.AsyncClient:
    """Return a client of an app with a model that generates text, and these."""
    chosen = FixedModels([plain_model(id="text"), *(models or (embedding_model(),))])
    app = create_app(Config(), SingleEngineProvider(engine or FakeEngine()), chosen, app_state, dispatcher)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def post(path: str, body: dict[str, Any], *models: ServedModel, engine: FakeEngine | None = None) -> Any:
    async with client(*models, engine=engine) as http:
        return await http.post(path, json=body)


def vector_of(text: str) -> list[float]:
    """Return the fake engine's vector of a word, as 32-bit floats."""
    values = fake_vector(embedding_model().tokenizer.encode(text), 4)
    return list(struct.unpack("<4f", struct.pack("<4f", *values)))


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))


# Embeddings


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/v2/embeddings"])
async def test_embeddings_follow_openai_schema(path: str) -> None:
    answer = await post(path, {"input": ["ab", "c"], "model": "tiny"})
    body = answer.json()
    validate_openai(body, "CreateEmbeddingResponse")
    assert [each["embedding"] for each in body["data"]] == [vector_of("ab"), vector_of("c")]
    assert [each["index"] for each in body["data"]] == [0, 1]
    assert (body["model"], body["usage"]) == ("tiny", {"prompt_tokens": 7, "total_tokens": 7})


async def test_embeddings_in_base64_are_the_same_numbers() -> None:
    for dimensions in (4, 2):
        body = {"input": ["ab", "c"], "dimensions": dimensions}
        floats, encoded = [
            (await post("/v1/embeddings", body | {"encoding_format": format}, embedding_model(matryoshka=True))).json()
            for format in ("float", "base64")
        ]
        for number, text in zip(floats["data"], encoded["data"], strict=True):
            values = struct.unpack(f"<{dimensions}f", base64.b64decode(text["embedding"]))
            assert values == pytest.approx(number["embedding"], abs=1e-7)
            assert math.hypot(*values) == pytest.approx(1)


async def test_large_response_is_complete() -> None:
    engine = FakeEngine()
    engine.dimensions = 512
    answer = await post("/v1/embeddings", {"input": ["ab"] * 200}, embedding_model(dimensions=512), engine=engine)
    assert len(engine.embedded[0].inputs) == 200
    vectors = [each["embedding"] for each in answer.json()["data"]]
    assert len(vectors[0]) == 512
    assert vectors == [vectors[0]] * 200


async def test_request_id_is_that_of_the_response() -> None:
    assert (await post("/v1/embeddings", {"input": "a", "request_id": "x.1"})).json()["id"] == "embd-x.1"


async def test_unknown_and_ineffective_fields_are_named() -> None:
    answer = await post("/v1/embeddings", {"input": "a", "input_type": "query", "color": 1})
    assert answer.headers["x-syringa-ignored"] == "color, input_type"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "makes embeddings"),
        ("/v1/completions", {"prompt": "a"}, "makes embeddings"),
        ("/v1/responses", {"input": "a"}, "makes embeddings"),
        ("/v1/embeddings", {"input": "a", "model": "text"}, "generates text"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "model": "text"}, "generates text"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "model": "text"}, "generates text"),
        ("/v1/embeddings", {"input": "a", "model": "ranker"}, "scores pairs of texts"),
    ],
)
async def test_endpoint_refuses_model_of_another_kind(path: str, body: dict[str, Any], message: str) -> None:
    answer = await post(path, {"model": "tiny"} | body, embedding_model(), scoring_model())
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "model", "wrong_model_kind")
    assert message in error["message"]


async def test_model_list_names_kinds_and_dimensions() -> None:
    async with client(embedding_model(), scoring_model()) as http:
        models = (await http.get("/v1/models")).json()["data"]
        shown = (await http.get("/v1/models/tiny")).json()
        tokens = (await http.post("/tokenize", json={"model": "tiny", "prompt": "ab"})).json()
        text = (await http.post("/detokenize", json={"model": "tiny", "tokens": tokens["tokens"]})).json()
    assert [(each["id"], each["kind"], each["dimensions"]) for each in models] == [
        ("text", "generate", None),
        ("tiny", "embed", 4),
        ("ranker", "score", None),
    ]
    assert shown == models[1]
    assert models[1]["capabilities"] == ["embedding", "rerank", "score"]
    assert (tokens["count"], text["prompt"]) == (4, "[CLS] ab [SEP]")


# Rerank


async def test_rerank_orders_documents_by_cross_encoder() -> None:
    engine = ScoringEngine()
    body = {"query": "ab", "documents": ["c", "ddd", "ee"], "top_n": 2}
    async with client(scoring_model(), engine=engine) as http:
        first, second, bare = [
            (await http.post(path, json=body)).json() for path in ("/v1/rerank", "/v2/rerank", "/rerank")
        ]
    expected = [(1, 1 / (1 + math.exp(-4))), (2, 1 / (1 + math.exp(-3)))]
    for answer in (first, second, bare):
        assert [each["index"] for each in answer["results"]] == [1, 2]
        assert [each["relevance_score"] for each in answer["results"]] == pytest.approx([each for _, each in expected])
        assert answer["usage"] == {"prompt_tokens": 21, "total_tokens": 21}
        assert answer["meta"]["billed_units"] == {"search_units": 1}
    assert [each["document"] for each in first["results"]] == [{"text": "ddd"}, {"text": "ee"}]
    assert all("document" not in each for each in second["results"])
    (tokens, *_), (start, *_) = engine.embedded[0].inputs, engine.embedded[0].second
    assert tokens[start:-1] == tokens_of("c")
    assert tokens[1 : start - 1] == tokens_of("ab")


async def test_rerank_with_embedding_model_orders_by_cosine_similarity() -> None:
    documents = ["cc", "ab", "dd"]
    answer = (await post("/v1/rerank", {"query": "ab", "documents": documents, "return_documents": False})).json()
    expected = {index: cosine(vector_of("ab"), vector_of(text)) for index, text in enumerate(documents)}
    assert [each["index"] for each in answer["results"]] == sorted(expected, key=lambda index: -expected[index])
    assert answer["results"][0]["index"] == 1
    for each in answer["results"]:
        assert each["relevance_score"] == pytest.approx(expected[each["index"]])
        assert "document" not in each
    assert answer["usage"]["total_tokens"] == 16  # the query once


@pytest.mark.parametrize(
    ("similarity", "compare"),
    [
        ("dot", lambda a, b: sum(x * y for x, y in zip(a, b, strict=True))),
        ("euclidean", lambda a, b: -math.dist(a, b)),
        ("manhattan", lambda a, b: -sum(abs(x - y) for x, y in zip(a, b, strict=True))),
    ],
)
async def test_rerank_uses_the_similarity_of_the_embedding_model(similarity: str, compare: Any) -> None:
    model, documents = embedding_model(similarity=similarity, normalize=False), ["cc", "ab", "dd"]
    answer = (await post("/v1/rerank", {"query": "ab", "documents": documents}, model)).json()
    expected = [compare(vector_of("ab"), vector_of(text)) for text in documents]
    assert [each["index"] for each in answer["results"]] == sorted(range(3), key=lambda index: -expected[index])
    for each in answer["results"]:
        assert each["relevance_score"] == pytest.approx(expected[each["index"]])


async def test_rerank_prefers_cross_encoder_by_default() -> None:
    body = {"query": "a", "documents": ["b"]}
    answer = await post("/v1/rerank", body, embedding_model(), scoring_model(), engine=ScoringEngine())
    assert answer.json()["model"] == "ranker"


async def test_rerank_puts_prompts_of_embedding_model_before_texts() -> None:
    engine = FakeEngine()
    model = embedding_model(prompts={"query": "q ", "document": "d "})
    await post("/v1/rerank", {"query": "a", "documents": ["b"]}, model, engine=engine)
    assert engine.embedded[0].inputs == [model.tokenizer.encode("q a"), model.tokenizer.encode("d b")]


async def test_rerank_reads_objects_as_documents() -> None:
    documents: list[Any] = [{"text": "b", "id": 7}, "ccc"]
    answer = (
        await post("/v1/rerank", {"query": "a", "documents": documents}, scoring_model(), engine=ScoringEngine())
    ).json()
    assert [each["document"] for each in answer["results"]] == [{"text": "ccc"}, {"text": "b", "id": 7}]
    engine = ScoringEngine()
    fields = {"query": "a", "documents": [{"t": "b", "n": 1}], "rank_fields": ["t", "n"]}
    await post("/v1/rerank", fields, scoring_model(), engine=engine)
    assert engine.embedded[0].inputs[0][3:-1] == scoring_model().tokenizer.encode("t: b\nn: 1", add_special=False)
    ignored = await post("/v1/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["t"]}, scoring_model())
    assert ignored.headers["x-syringa-ignored"] == "rank_fields"


@pytest.mark.parametrize("model", [embedding_model(), scoring_model()], ids=["embed", "score"])
async def test_rerank_cuts_long_documents_unless_told_otherwise(model: ServedModel) -> None:
    engine = ScoringEngine() if model.kind == "score" else FakeEngine()
    body = {"query": "ab", "documents": ["c" * 40], "model": model.id}
    async with client(model, engine=engine) as http:
        assert (await http.post("/v1/rerank", json=body)).status_code == 200
        refused = await http.post("/v1/rerank", json=body | {"truncation": False})
        await http.post("/v1/rerank", json=body | {"max_tokens_per_doc": 3, "truncation": False})
    assert len(engine.embedded[0].inputs[-1]) == 16
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert engine.embedded[1].inputs[-1][-4:-1] == tokens_of("ccc")


@pytest.mark.parametrize(
    ("query", "document", "expected"), [(2, 40, (2, 11)), (40, 2, (11, 2)), (40, 40, (6, 7)), (6, 8, (6, 7))]
)
async def test_pairs_are_cut_at_the_longer_text(query: int, document: int, expected: tuple[int, int]) -> None:
    engine = ScoringEngine()
    body = {"query": "a" * query, "documents": ["b" * document]}
    await post("/v1/rerank", body, scoring_model(), engine=engine)
    (tokens,), (start,) = engine.embedded[0].inputs, engine.embedded[0].second
    assert (start - 2, len(tokens) - start - 1) == expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"query": ""}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": [""]}, "documents[0]"),
        ({"documents": ["a", 1]}, "documents[1]"),
        ({"documents": [{"title": "a"}]}, "documents[0].text"),
        ({"documents": [{"title": "a"}], "rank_fields": ["name"]}, "documents[0]"),
        ({"documents": ["a"] * 2049}, "documents"),
        ({"top_n": -1}, "top_n"),
        ({"max_tokens_per_doc": 0}, "max_tokens_per_doc"),
    ],
)
async def test_rerank_refuses_field(body: dict[str, Any], param: str) -> None:
    answer = await post("/v1/rerank", {"query": "a", "documents": ["b"]} | body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_score_needs_model_with_one_label() -> None:
    answer = await post("/v1/rerank", {"query": "a", "documents": ["b"]}, scoring_model(dimensions=3))
    assert answer.status_code == 400
    assert "has 3 labels" in answer.json()["error"]["message"]


# Score


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
async def test_score_compares_one_text_with_many_and_pairs(path: str, names: tuple[str, str]) -> None:
    first, second = names
    one = (await post(path, {first: "ab", second: ["c", "ab"]})).json()
    assert [each["score"] for each in one["data"]] == pytest.approx([cosine(vector_of("ab"), vector_of("c")), 1])
    assert [(each["index"], each["object"]) for each in one["data"]] == [(0, "score"), (1, "score")]
    pairs = (await post(path, {first: ["ab", "c"], second: ["c", "d"]})).json()
    expected = [cosine(vector_of(a), vector_of(b)) for a, b in (("ab", "c"), ("c", "d"))]
    assert [each["score"] for each in pairs["data"]] == pytest.approx(expected)
    assert pairs["usage"] == {"prompt_tokens": 13, "total_tokens": 13}


@pytest.mark.parametrize("field", ["use_activation", "activation", "softmax"])
async def test_score_returns_logits_without_activation(field: str) -> None:
    body = {"text_1": "a", "text_2": ["bb", "c"]}
    async with client(scoring_model(), engine=ScoringEngine()) as http:
        activated = (await http.post("/v1/score", json=body)).json()
        raw = (await http.post("/v1/score", json=body | {field: False})).json()
    assert [each["score"] for each in raw["data"]] == [3, 2]
    assert [each["score"] for each in activated["data"]] == pytest.approx([1 / (1 + math.exp(-x)) for x in (3, 2)])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text_1"),
        ({"text_1": "a"}, "text_2"),
        ({"queries": "a"}, "documents"),
        ({"text_1": "a", "text_2": "b", "queries": "c"}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ({"text_1": ["a", "b", "c"], "text_2": ["c", "d"]}, "text_1"),
        ({"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
        ({"text_1": "a", "text_2": "b" * 40}, "text_2"),
    ],
)
async def test_score_refuses_field(body: dict[str, Any], param: str) -> None:
    answer = await post("/v1/score", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


# Around the engine


async def test_only_input_tokens_are_priced() -> None:
    engine, seen = FakeEngine(), list[RequestAccounting]()
    app_state = AppState(Config())
    app_state.observers.append(seen.append)
    async with client(engine=engine, app_state=app_state) as http:
        await http.post("/v1/embeddings", json={"input": "ab"})
    record = usage_record(seen[0], Prices(input=1_000_000, output=7_000_000))
    assert (record.input_tokens, record.output_tokens, record.cost) == (4, 0, 4)


async def test_token_limit_counts_embedded_tokens(tmp_path: Path) -> None:
    config = Config(database=str(tmp_path / "x.db"), api_key=("k",), requests_per_minute=0, tokens_per_minute=6)
    app = create_app(config, SingleEngineProvider(FakeEngine()), FixedModels([embedding_model()]))
    headers = {"authorization": "Bearer k"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        answers = [
            (await http.post("/v1/embeddings", json={"input": "abcdef"}, headers=headers)).status_code for _ in range(2)
        ]
    assert answers == [200, 429]


async def test_key_may_not_use_other_models() -> None:
    models = FixedModels([plain_model(id="text"), embedding_model("a"), embedding_model("b")])
    allowed = models.for_key(frozenset({"text", "b"}))
    assert (await allowed.find(None, ("embed",))).id == "b"


async def test_deadline_ends_request_in_the_engine() -> None:
    engine = FakeEngine()
    engine.pause()
    async with client(engine=engine) as http:
        answer = await http.post("/v1/embeddings", json={"input": "a"}, headers={"x-syringa-timeout": "0.05"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "timeout")
    # On a slow machine, the deadline may pass before the engine gets the request.
    assert [id for id, _ in engine.aborted] == [request.id for request in engine.embedded]
    assert not engine.running


async def test_stopped_server_ends_running_and_later_requests() -> None:
    engine = FakeEngine()
    engine.pause()
    app_state = AppState(Config())
    dispatcher = GenerationDispatcher(SingleEngineProvider(engine), app_state.key_watch)
    async with client(app_state=app_state, dispatcher=dispatcher) as http:
        running = asyncio.create_task(http.post("/v1/embeddings", json={"input": "a"}))
        assert await eventually(lambda: engine.running)
        dispatcher.stop()
        later = await http.post("/v1/score", json={"text_1": "a", "text_2": "b"})
        answers = [await running, later]
    assert [(each.status_code, each.json()["error"]["code"]) for each in answers] == [(503, "server_ending")] * 2
    assert len(engine.aborted) == len(engine.embedded) == 1


async def test_engine_error_is_that_of_the_response() -> None:
    engine = FakeEngine()
    engine.fail = EngineOverloaded("The queue is full.")
    answer = await post("/v1/embeddings", {"input": "a"}, engine=engine)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_overloaded")
    assert float(answer.headers["retry-after"]) > 0


async def test_suspected_request_is_logged_without_its_content(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    engine.fail = RequestSuspected("It is not run again.")
    answer = await post("/v1/embeddings", {"input": ["a", "bc"]}, engine=engine)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "request_suspected")
    (record,) = [each for each in caplog.records if "suspected" in each.getMessage()]
    fields = record.fields  # type: ignore[attr-defined]
    assert (fields["inputs"], fields["input_tokens"], fields["model"]) == (2, [3, 4], "tiny")


async def test_of_64_clients_one_that_disconnects_ends_only_its_own_request() -> None:
    engine, seen = FakeEngine(), list[RequestAccounting]()
    engine.pause()
    texts = [chr(ord("a") + number % 26) * (1 + number // 26) for number in range(64)]
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(server(engine, model=embedding_model(), observe=seen.append))
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=http.base_url, trust_env=False, timeout=60, limits=httpx.Limits())
        )
        tasks = [asyncio.create_task(http.post("/v1/embeddings", json={"input": text})) for text in texts]
        assert await eventually(lambda: len(engine.embedded) == 64)
        tasks[17].cancel()
        assert await eventually(lambda: engine.aborted)
        engine.resume()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert await eventually(lambda: len(seen) == 64)
    assert isinstance(answers.pop(17), asyncio.CancelledError)
    assert len(engine.aborted) == 1
    del texts[17]
    for text, answer in zip(texts, answers, strict=True):
        assert isinstance(answer, httpx.Response)
        assert answer.json()["data"][0]["embedding"] == vector_of(text)
    assert sorted(each.outcome for each in seen) == ["cancelled", *["ok"] * 63]
    assert [each.stats.prompt_tokens for each in seen if each.outcome == "cancelled"] == [0]
