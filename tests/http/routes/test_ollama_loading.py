"""Ollama's endpoints that load and unload models, and those of embedding models."""

from __future__ import annotations

import pytest

from syringa.engine.interface import SingleEngineProvider
from syringa.errors import EngineUnavailable
from tests.chat_models import plain_model
from tests.client import client
from tests.embedding_models import embedding_model
from tests.fake_engine import FakeEngine
from tests.http.routes.ollama_requests import (
    CHAT,
    GENERATE,
    HI,
    KeepingEngines,
    app_client,
    text_of,
)


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_empty_request_loads_or_unloads_the_model(path: str) -> None:
    engines = KeepingEngines(FakeEngine("x"))
    async with app_client(engines) as http:
        loaded = (await http.post(path, json={"model": "fake"})).json()
        unloaded = (await http.post(path, json={"model": "fake", "keep_alive": 0, "messages": [], "prompt": ""})).json()
        missing = await http.post(path, json={"model": "other"})
    assert (loaded["done"], loaded["done_reason"], text_of(path, loaded)) == (True, "load", "")
    assert unloaded["done_reason"] == "unload"
    ((model, seconds),) = engines.kept
    assert model == "fake"
    assert 0 < seconds < 1  # at once, and not never
    assert (missing.status_code, missing.json()) == (404, {"error": "model 'other' not found"})
    invalid = {"options": {"num_ctx": -1}, "format": "yaml", "think": "hard", "keep_alive": "soon"}
    invalid |= {"template": "{{ .Prompt }}"} if path == GENERATE else {"tools": [1]}
    for name, value in invalid.items():
        async with client(model=plain_model()) as http:
            answer = await http.post(path, json={"model": "fake", name: value})
        assert (answer.status_code, name in answer.json()["error"]) == (400, True)


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_empty_request_unloads_a_model_of_any_kind(path: str) -> None:
    engines = KeepingEngines(FakeEngine())
    async with app_client(engines, plain_model(), embedding_model()) as http:
        unloaded = await http.post(path, json={"model": "tiny", "keep_alive": 0})
        loaded = await http.post(path, json={"model": "tiny"})
    assert (unloaded.status_code, unloaded.json()["done_reason"]) == (200, "unload")
    assert [model for model, _ in engines.kept] == ["tiny"]
    assert (loaded.status_code, "embeddings" in loaded.json()["error"]) == (400, True)


async def test_keep_alive_applies_after_the_request() -> None:
    engine = FakeEngine("x")
    engines = KeepingEngines(engine)
    async with app_client(engines) as http:
        for keep_alive in ("10m", -1, None):
            body = {"model": "fake", "messages": HI, "keep_alive": keep_alive}
            assert (await http.post(CHAT, json=body)).status_code == 200
        engine.fail, engine.fail_first = EngineUnavailable("gone"), True
        assert (await http.post(CHAT, json={"model": "fake", "messages": HI, "keep_alive": 5})).status_code == 503
        bad = await http.post(CHAT, json={"model": "fake", "messages": HI, "keep_alive": "soon"})
    assert engines.kept == [("fake", 600.0), ("fake", 0.0), ("fake", 5.0)]
    assert (bad.status_code, "keep_alive" in bad.json()["error"]) == (400, True)


async def test_keep_alive_of_an_ordinary_key_is_ignored_and_named() -> None:
    engines = KeepingEngines(FakeEngine("x"))
    async with app_client(engines, api_key=("secret",)) as http:
        http.headers["authorization"] = "Bearer secret"
        answer = await http.post(CHAT, json={"model": "fake", "messages": HI, "keep_alive": 0})
        unloads = [
            await http.post(CHAT, json={"model": "fake", "keep_alive": 0}),
            await http.post(GENERATE, json={"model": "fake", "keep_alive": "0s"}),
            await http.post("/api/embed", json={"model": "fake", "keep_alive": 0}),
        ]
    assert (answer.status_code, answer.headers["x-syringa-ignored"]) == (200, "keep_alive")
    assert [each.status_code for each in unloads] == [403] * 3  # and not loaded instead
    assert all("administrator" in each.json()["error"] for each in unloads)
    assert engines.kept == []


async def test_embed_returns_a_vector_for_each_input() -> None:
    engine = FakeEngine()
    async with app_client(SingleEngineProvider(engine), plain_model(), embedding_model()) as http:
        body = {"model": "tiny", "input": ["hi", "ho"], "options": {"temperature": 1, "num_ctx": 3}}
        answer = await http.post("/api/embed", json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        single = (await http.post("/api/embeddings", json={"model": "tiny:latest", "prompt": "hi"})).json()
        empty = (await http.post("/api/embed", json={"model": "tiny", "input": []})).json()
        wrong = await http.post("/api/embed", json={"model": "fake", "input": "hi"})
        long = await http.post("/api/embed", json={"model": "tiny", "input": "h" * 99, "truncate": False})
    assert [len(each) for each in found["embeddings"]] == [4, 4]
    assert all(sum(value * value for value in each) == pytest.approx(1.0, abs=1e-5) for each in found["embeddings"])
    assert [len(each) for each in engine.embedded[0].inputs] == [3, 3]  # cut
    assert (found["model"], found["prompt_eval_count"]) == ("tiny", 6)
    assert found["total_duration"] > 0
    assert answer.headers["x-syringa-ignored"] == "options.temperature"
    assert len(single["embedding"]) == 4
    assert empty["embeddings"] == []
    assert (wrong.status_code, long.status_code) == (400, 400)
    assert type(wrong.json()["error"]) is str


async def test_embed_returns_a_vector_for_an_empty_text_among_others() -> None:
    engine = FakeEngine()
    async with app_client(SingleEngineProvider(engine), embedding_model()) as http:
        answer = await http.post("/api/embed", json={"model": "tiny", "input": ["hi", ""]})
        wrong = await http.post("/api/embed", json={"model": "tiny", "input": ["hi", 5]})
    assert len(answer.json()["embeddings"]) == 2
    assert len(engine.embedded[0].inputs[1]) == 2  # the special tokens
    assert (wrong.status_code, wrong.json()) == (400, {"error": "input[1]: expected a text."})


@pytest.mark.parametrize("path", ["/api/embed", "/api/embeddings"])
async def test_embed_without_input_loads_or_unloads_the_model(path: str) -> None:
    engine = FakeEngine()
    engines = KeepingEngines(engine)
    async with app_client(engines, embedding_model()) as http:
        engine.ready = False
        loaded = await http.post(path, json={"model": "tiny"})
        unloaded = await http.post(path, json={"model": "tiny", "keep_alive": 0, "input": "", "prompt": ""})
    assert loaded.status_code == 503  # it waits for the engine
    assert unloaded.status_code == 200
    assert [model for model, seconds in engines.kept] == ["tiny"]
