from __future__ import annotations

import pytest

from syringa.config import Config
from tests.chat_models import plain_model, reasoning_model, vision_model
from tests.client import client
from tests.fake_engine import END, FakeEngine, fake_model


async def test_health_ignores_and_ready_follows_the_engine() -> None:
    engine = FakeEngine()
    async with client(engine) as http:
        assert (await http.get("/ready")).json() == {"status": "ready"}
        engine.ready = False
        assert (await http.get("/health")).json() == {"status": "ok"}
        answer = await http.get("/ready")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert answer.json()["error"]["code"] == "engine_unavailable"


@pytest.mark.parametrize("path", ["/v1/models", "/api/v2/models"])
async def test_models_are_listed(path: str) -> None:
    async with client() as http:
        answer = (await http.get(path)).json()
    assert answer["object"] == "list"
    assert answer["data"][0]["id"] == "fake"
    assert answer["data"][0]["max_model_len"] == 4096


@pytest.mark.parametrize("name", ["fake", "alias", "default"])
async def test_model_is_found_by_id_alias_or_default(name: str) -> None:
    async with client() as http:
        assert (await http.get(f"/v1/models/{name}")).json()["id"] == "fake"


@pytest.mark.parametrize("name", ["other", "some/other"])
async def test_unknown_model_is_404_and_lists_known_models(name: str) -> None:
    async with client() as http:
        for answer in (
            await http.get(f"/v1/models/{name}"),
            await http.post("/v1/completions", json={"model": name, "prompt": "x"}),
        ):
            error = answer.json()["error"]
            assert answer.status_code == 404
            assert (error["param"], error["code"]) == ("model", "model_not_found")
            assert "fake" in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/api/v2/completions"])
async def test_completions_on_both_paths(path: str) -> None:
    async with client() as http:
        answer = (await http.post(path, json={"model": "fake", "prompt": "x"})).json()
    ended = {"finish_reason": "stop", "stop_reason": None}
    assert answer["choices"] == [{"index": 0, "text": "hello", "logprobs": None, **ended}]


async def test_tokenize_and_detokenize() -> None:
    async with client() as http:
        given = (await http.post("/tokenize", json={"model": "fake", "prompt": "hé", "return_token_strs": True})).json()
        assert given == {
            "count": 3,
            "max_model_len": 4096,
            "tokens": [104, 195, 169],
            "token_strs": ["h", "bytes:\\xc3", "bytes:\\xa9"],
        }
        back = await http.post("/detokenize", json={"tokens": [*given["tokens"], END]})
        assert back.json() == {"prompt": "hé<end>"}
        bad = await http.post("/detokenize", json={"tokens": [1, 999]})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "tokens[1]")
        bad = await http.post("/tokenize", json={})
        assert bad.status_code == 400


async def test_tokenize_accepts_messages() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"mood": 1}}
    async with client(model=plain_model()) as http:
        answer = await http.post("/tokenize", json=body)
        assert bytes(answer.json()["tokens"]) == b"[u]hi[a]"
        assert answer.headers["x-syringa-ignored"] == "chat_template_kwargs.mood"
        answer = await http.post("/tokenize", json={**body, "add_generation_prompt": False})
        assert bytes(answer.json()["tokens"]) == b"[u]hi"
        tools = [{"type": "function", "function": {"name": "f"}}]
        answer = await http.post("/tokenize", json={**body, "tools": tools, "continue_final_message": True})
        assert bytes(answer.json()["tokens"]).endswith(b"</tool_call>[u]hi")
        assert (await http.post("/tokenize", json={**body, "prompt": "x"})).status_code == 400
        answer = await http.post("/tokenize", json={"prompt": "x", "tools": tools})
        assert (answer.json()["count"], answer.headers["x-syringa-ignored"]) == (1, "tools")
    async with client() as http:
        assert "--chat-template" in (await http.post("/tokenize", json=body)).json()["error"]["message"]


async def test_model_capabilities_are_listed() -> None:
    for model, able in [
        (fake_model(), []),
        (reasoning_model(), ["chat", "reasoning"]),
        (vision_model(), ["chat", "vision"]),
    ]:
        async with client(model=model) as http:
            assert (await http.get("/v1/models/fake")).json()["capabilities"] == ["completion", *able]


async def test_unknown_fields_are_named_or_rejected() -> None:
    body = {"prompt": "x", "frobnicate": 1, "nothing": None, "ü\n": 1, "stream_options": {"zap": 1}, "stream": True}
    async with client() as http:
        answer = await http.post("/v1/completions", json=body)
        assert answer.headers["x-syringa-ignored"] == "frobnicate, \\xfc\\n, stream_options.zap"
    async with client(config=Config(unknown_fields="refuse")) as http:
        answer = await http.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "frobnicate")


async def test_tenant_is_a_hash_of_the_key() -> None:
    engine = FakeEngine("x")
    async with client(engine, Config(api_key=("secret",))) as http:
        await http.post("/v1/completions", json={}, headers={"authorization": "Bearer secret"})
    assert len(engine.requests[0].tenant) == 16
    assert "secret" not in engine.requests[0].tenant


async def test_compressed_body_is_rejected() -> None:
    async with client(FakeEngine("x")) as http:
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        answer = await http.post("/v1/completions", content=b"\x1f\x8b", headers=headers)
    assert answer.status_code == 415
    assert "gzip" in answer.json()["error"]["message"]


async def test_large_body_is_decoded_in_a_thread() -> None:
    async with client(FakeEngine("x")) as http:
        answer = await http.post("/v1/completions", json={"prompt": "x", "unknown": ["y"] * 200_000})
    assert answer.headers["x-syringa-ignored"] == "unknown"
