"""`/version`, `/ping`, `/load`, `/tokenizer_info` and `/props`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from syringa.api.models.served_model import FixedModels
from syringa.config import Config
from syringa.engine.interface import SingleEngineProvider
from syringa.http.app import create_app
from syringa.service.app_state import AppState
from syringa.service.auth.keys import create_api_key
from syringa.types import EngineStats
from syringa.version import installed_version
from tests.chat_models import plain_model
from tests.client import client
from tests.fake_engine import END, FakeEngine, fake_model


class BusyEngine(FakeEngine):
    async def stats(self) -> EngineStats:
        return EngineStats(running=3, waiting=2)


async def test_version_and_ping_need_no_key() -> None:
    engine = FakeEngine()
    async with client(engine, Config(api_key=("secret",))) as http:
        assert (await http.get("/version")).json() == {"version": installed_version()}
        assert (await http.get("/ping")).status_code == (await http.post("/ping")).status_code == 200
        engine.ready = False
        answers = [await http.get("/ping"), await http.post("/ping")]
        assert [each.status_code for each in answers] == [503, 503]
        for path in ("/load", "/tokenizer_info", "/props"):
            assert (await http.get(path)).status_code == 401, path


async def test_load_is_shown_unless_it_would_tell_of_other_organizations(tmp_path: Path) -> None:
    async with client(BusyEngine()) as http:
        assert (await http.get("/load")).json() == {"server_load": 5}
    for config, status in (
        (Config(api_key=("secret",)), 200),  # the only organization
        (Config(api_key=("secret", "other")), 403),
        (Config(api_key=("secret", "other"), public_metrics=True), 200),
    ):
        async with client(BusyEngine(), config) as http:
            answer = await http.get("/load", headers={"authorization": "Bearer secret"})
            assert answer.status_code == status
    state = AppState(Config(api_key=("secret", "other"), database=str(tmp_path / "db")))
    key, record = create_api_key("ops", admin=True)
    await state.store.write(lambda session: session.keys.create(record))
    await state.start()
    app = create_app(Config(), SingleEngineProvider(BusyEngine()), FixedModels([fake_model()]), state)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        answer = await http.get("/load", headers={"authorization": f"Bearer {key}"})
        assert answer.json() == {"server_load": 5}
    await state.close()


async def test_concurrent_requests_for_the_load_share_one_reading() -> None:
    class CountingEngine(FakeEngine):
        readings = 0

        async def stats(self) -> EngineStats:
            self.readings += 1
            await asyncio.sleep(0.01)
            return EngineStats(running=1)

    engine = CountingEngine()
    async with client(engine) as http:
        answers = await asyncio.gather(*(http.get("/load") for _ in range(5)))
    assert [each.json()["server_load"] for each in answers] == [1] * 5
    assert engine.readings == 1


async def test_tokenizer_info_has_special_tokens_and_chat_template() -> None:
    model = plain_model(special_tokens={"eos_token": "<end>", "bos_token": ["odd"]})
    assert model.template is not None
    async with client(model=model) as http:
        found = (await http.get("/tokenizer_info")).json()
        assert found["tokenizer_class"]
        assert (found["eos_token"], found["bos_token"]) == ("<end>", None)
        assert found["vocab_size"] == model.vocab_size
        assert found["model_max_length"] == model.max_model_len
        assert found["chat_template"] == model.template.source
        assert found["added_tokens_decoder"][str(END)] == {"content": "<end>", "special": True}
        assert (await http.get("/tokenizer_info", params={"model": "alias"})).json() == found
        missing = await http.get("/tokenizer_info", params={"model": "unknown"})
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_props_have_the_defaults_of_the_model() -> None:
    model = fake_model(
        defaults={"temperature": 0.3, "repetition_penalty": 1.2, "max_tokens": 50},
        special_tokens={"eos_token": "<end>"},
    )
    async with client(config=Config(max_running=7), model=model) as http:
        found = (await http.get("/props")).json()
    settings = found["default_generation_settings"]
    assert settings["n_ctx"] == model.max_model_len
    assert settings["params"] | {"temperature": 0.3, "repeat_penalty": 1.2, "n_predict": 50} == settings["params"]
    assert settings["params"]["seed"] == -1
    assert (found["total_slots"], found["model_alias"], found["eos_token"]) == (7, "fake", "<end>")
    assert found["modalities"] == {"vision": False, "audio": False, "video": False}
    assert found["chat_template"] == ""
    assert not found["is_sleeping"]


async def test_models_have_root_parent_and_length() -> None:
    async with client() as http:
        (entry,) = (await http.get("/v1/models")).json()["data"]
    assert (entry["root"], entry["parent"], entry["max_model_len"]) == ("fake", None, 4096)
