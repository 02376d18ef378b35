"""An API process whose models can be changed, for the tests of Ollama's endpoints about models."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from syringa.api.fields.defaults import read_defaults
from syringa.api.models.registry import ModelRegistry
from syringa.api.ollama.pull import ModelPulls
from syringa.config import Config
from syringa.engine.interface import SingleEngineProvider
from syringa.http.app import create_app
from syringa.http.routes import ollama_models
from syringa.service.app_state import AppState
from syringa.service.model_catalog import ModelCatalog
from syringa.store import Store
from tests.api.model_files import write_model_folder
from tests.fake_engine import FakeEngine

MODEL = "small"
HI = [{"role": "user", "content": "aa"}]


class Client(httpx.AsyncClient):
    engine: FakeEngine
    app_state: AppState


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "syringa.db")


@pytest.fixture
def path(tmp_path: Path) -> str:
    """The folder of a model with the tokens `a`, `b`, … and the template `<s>system<u>user<a>`."""
    folder = tmp_path / MODEL
    folder.mkdir()
    write_model_folder(folder, max_position_embeddings=256, vocab_size=99)
    tokens = [*"ABCabc<>sumhi.,! ", "<think>"]
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {token: index for index, token in enumerate(tokens)}
    tokenizer["added_tokens"][0]["id"] = len(tokens) - 1
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}<a>"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return str(folder)


@asynccontextmanager
async def process(file: str, path: str, **settings: Any) -> AsyncIterator[Client]:
    """An API process with one model."""
    config = Config(database=file, model=path, **settings)
    models = ModelRegistry(config)
    await models.start()
    store = Store(file)
    catalog = ModelCatalog(store, config, models.set_added, read_defaults)
    app_state = AppState(config, store=store, catalog=catalog, prices=models.prices)
    engine = FakeEngine("hello")
    app = create_app(config, SingleEngineProvider(engine), models, app_state)
    await app_state.start()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with Client(transport=transport, base_url="http://127.0.0.1:8000") as http:
        http.engine, http.app_state = engine, app_state
        try:
            yield http
        finally:
            await app_state.close()


def statuses(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line).get("status", line) for line in response.text.splitlines()]


async def names(http: httpx.AsyncClient) -> list[str]:
    return [each["name"] for each in (await http.get("/api/tags")).json()["models"]]


async def prompt_of(http: Client, model: str, messages: list[dict[str, Any]] = HI, endpoint: str = "/api/chat") -> str:
    """Return the prompt that the engine gets for a conversation."""
    answer = await http.post(endpoint, json={"model": model, "messages": messages, "stream": False})
    assert answer.status_code == 200, answer.text
    tokens = http.engine.requests[-1].prompt
    text: str = (await http.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
    return text


@pytest.fixture
def pull(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Sets the function that downloads models, of processes that are started afterwards."""

    def use(function: Any) -> None:
        monkeypatch.setattr(ollama_models, "ModelPulls", lambda: ModelPulls(function))

    return use
