"""Tests of the model registry."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from syringa.api.models import registry as module
from syringa.api.models.entries import LoadingEntry, to_model_entry
from syringa.api.models.loading import load_model
from syringa.api.models.registry import ModelRegistry
from syringa.api.models.served_model import ModelStatus
from syringa.config import Config, ModelSpec, Prices
from syringa.errors import ConfigError, EngineUnavailable, Forbidden, InvalidRequest, ModelError, NotFound
from syringa.types import LoadProgress, ModelLoading
from tests.api.model_files import write_model_folder
from tests.embedding_models import write_embedding_folder


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = write_model_folder(tmp_path)
    return Config(
        models=(
            ModelSpec(id="a", path=path, aliases=("x",), prices=Prices(input=1)),
            ModelSpec(id="b", path=path, max_model_len=9),
            ModelSpec(id="broken", path=str(tmp_path / "nowhere")),
        )
    )


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the models that were read, in order."""
    done: list[str] = []

    def read(config: Config, spec: ModelSpec) -> Any:
        done.append(spec.id)
        return load_model(config, spec)

    monkeypatch.setattr(module, "load_model", read)
    return done


async def test_registry_reads_default_at_start_and_others_on_first_use(config: Config, reads: list[str]) -> None:
    registry = ModelRegistry(config)
    await registry.start()
    assert reads == ["a"]
    first = await registry.find(None)
    assert [await registry.find(name) for name in ("", "a", "x", "default")] == [first] * 4
    assert (first.id, first.aliases, first.prices) == ("a", ("x",), Prices(input=1))
    assert reads == ["a"]
    second, again = await asyncio.gather(registry.find("b"), registry.find("b"))
    assert second is again
    assert reads == ["a", "b"]
    with pytest.raises(NotFound, match="Available: a, b, broken"):
        await registry.find("c")


async def test_registry_start_fails_if_default_cannot_be_read(tmp_path: Path) -> None:
    registry = ModelRegistry(Config(models=(ModelSpec(id="a", path=str(tmp_path / "nowhere")),)))
    with pytest.raises(ModelError, match="no such file"):
        await registry.start()


async def test_registry_reports_broken_model_to_its_requests_only(
    config: Config, reads: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry = ModelRegistry(config)
    for _ in range(2):
        with pytest.raises(EngineUnavailable) as caught:
            await registry.find("broken")
        assert (caught.value.status, caught.value.code) == (503, "model_unavailable")
        # Paths of the server are for its operator, not for clients.
        assert caught.value.message == "The model 'broken' cannot be loaded: the log of the server has the reason"
    assert "no such file" in caplog.text
    assert "no such file" in registry.failure("broken")
    assert registry.failure("a") == ""
    assert reads == ["broken"]  # the failure is cached
    assert (await registry.find("a")).id == "a"
    monkeypatch.setattr(module.time, "monotonic", lambda: 1e12)
    with pytest.raises(EngineUnavailable):
        await registry.find("broken")
    assert reads == ["broken", "a", "broken"]


async def test_registry_hides_details_of_internal_errors(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(config: Config, spec: ModelSpec) -> Any:
        raise ValueError("secret")

    monkeypatch.setattr(module, "load_model", read)
    with pytest.raises(EngineUnavailable) as caught:
        await ModelRegistry(config).find("a")
    assert "secret" not in caught.value.message


async def test_registry_read_survives_canceled_caller(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def read(config: Config, spec: ModelSpec) -> Any:
        assert go.wait(60)
        return load_model(config, spec)

    monkeypatch.setattr(module, "load_model", read)
    registry = ModelRegistry(config)
    canceled = asyncio.create_task(registry.find("a"))
    waiting = asyncio.create_task(registry.find("a"))
    await asyncio.sleep(0)
    canceled.cancel()
    await asyncio.gather(canceled, return_exceptions=True)
    go.set()
    assert (await waiting).id == "a"


async def test_registry_lists_models_without_reading_tokenizers(config: Config, reads: list[str]) -> None:
    states: dict[str, ModelStatus] = {"a": "loaded", "b": "cold", "broken": "cold"}
    registry = ModelRegistry(config, status=states.__getitem__)
    cards = {card.id: card for card in await registry.all()}
    assert list(cards) == ["a", "b", "broken"]
    assert [card.status for card in cards.values()] == ["loaded", "cold", "failed"]
    assert [card.max_model_len for card in cards.values()] == [64, 9, None]
    assert cards["a"].prices == Prices(input=1)
    assert cards["b"].capabilities == ("completion", "chat")
    assert not reads
    await registry.find("b")
    states["b"] = "loading"
    card = await registry.show("b")
    assert card.status == "loading"
    assert card.capabilities == ("completion", "chat", "reasoning")  # detected from its tokenizer


async def test_registry_says_how_far_a_model_is_while_it_is_loaded(config: Config) -> None:
    states: dict[str, ModelStatus] = {"a": "loading", "b": "loaded", "broken": "loading"}
    loading = ModelLoading(LoadProgress("weights", 0.42), 3.14)
    registry = ModelRegistry(config, status=states.__getitem__, loading=lambda model: loading)
    cards = {card.id: card for card in await registry.all()}
    assert [card.loading for card in cards.values()] == [loading, None, None]  # the last one cannot be read
    entry = to_model_entry(cards["a"])
    assert entry.loading == LoadingEntry("weights", 0.42, 3.1)
    assert to_model_entry(cards["b"]).loading is None


async def test_registry_for_key_hides_other_models(config: Config) -> None:
    models = ModelRegistry(config).for_key(frozenset({"b"}))
    assert [card.id for card in await models.all()] == ["b"]
    assert (await models.find("b")).id == "b"
    assert (await models.show("b")).id == "b"
    for name in (None, "a", "x"):
        with pytest.raises(Forbidden, match="may not use the model 'a'"):
            await models.find(name)
    with pytest.raises(Forbidden):
        await models.show("a")
    with pytest.raises(NotFound, match="Available: b"):
        await models.find("c")
    assert await models.for_key(frozenset({"a"})).all() == []


async def test_registry_set_added_replaces_models(config: Config, reads: list[str], tmp_path: Path) -> None:
    changes: list[list[str]] = []
    registry = ModelRegistry(config, on_change=lambda specs: changes.append([each.id for each in specs]))
    new = ModelSpec(id="new", path=str(tmp_path), aliases=("n", "x"))
    registry.set_added([new])
    assert changes == [["a", "b", "broken"], ["a", "b", "broken", "new"]]
    assert (await registry.find("n")).id == "new"
    assert (await registry.find("x")).id == "a"  # belongs to the first model
    assert registry.specs[-1].idle_seconds == config.model_idle
    registry.set_added([new])
    await registry.find("new")
    assert reads == ["new", "a"]
    registry.set_added([ModelSpec(id="new", path=str(tmp_path), max_model_len=5)])
    assert (await registry.find("new")).max_model_len == 5
    assert reads == ["new", "a", "new"]
    registry.set_added([])
    with pytest.raises(NotFound):
        await registry.find("new")
    assert (await registry.find("a")).id == "a"


async def test_registry_settings_take_precedence(config: Config, tmp_path: Path) -> None:
    registry = ModelRegistry(config)
    other = ModelSpec(id="b", path=str(tmp_path), max_model_len=3)
    registry.set_added([other])
    assert (await registry.find("b")).max_model_len == 9
    with pytest.raises(ConfigError, match="defined in the settings") as caught:
        registry.check_names(other)
    assert caught.value.param == "id"
    with pytest.raises(ConfigError, match="'x' is already used by the model 'a'") as caught:
        registry.check_names(ModelSpec(id="new", path="p", aliases=("y", "x")))
    assert caught.value.param == "aliases[1]"
    registry.set_added([ModelSpec(id="new", path="p", aliases=("y",))])
    registry.check_names(ModelSpec(id="new", path="p", aliases=("y", "z")))


async def test_registry_set_max_model_len(config: Config) -> None:
    registry = ModelRegistry(config)
    registry.set_max_model_len("a", 20)  # before the model is read
    model = await registry.find("a")
    assert model.max_model_len == 20
    registry.set_max_model_len("a", 1000)
    assert model.max_model_len == 64
    registry.set_max_model_len("unknown", 1)


def test_registry_prices(config: Config) -> None:
    registry = ModelRegistry(config)
    assert [registry.prices(name) for name in ("a", "b", "unknown")] == [Prices(input=1), Prices(), Prices()]


async def test_registry_finds_models_by_kind(tmp_path: Path) -> None:
    embedding = write_embedding_folder(tmp_path / "e")
    scoring = write_embedding_folder(
        tmp_path / "s", architectures=["BertForSequenceClassification"], id2label={"0": "x"}
    )
    models = (
        ModelSpec(id="text", path=write_model_folder(tmp_path)),
        ModelSpec(id="one", path=embedding),
        ModelSpec(id="ranker", path=scoring),
        ModelSpec(id="two", path=embedding, aliases=("second",)),
    )
    registry = ModelRegistry(Config(models=models))
    assert (await registry.find(None)).id == "text"
    assert [(await registry.find(name, ("embed",))).id for name in (None, "", "default", "two")] == ["one"] * 3 + [
        "two"
    ]
    assert (await registry.find(None, ("score", "embed"))).id == "ranker"
    assert (await registry.for_key(frozenset({"two"})).find(None, ("embed",))).id == "two"
    with pytest.raises(InvalidRequest, match="'one' makes embeddings"):
        await registry.find("one")
    with pytest.raises(InvalidRequest, match="no model that makes embeddings"):
        await registry.for_key(frozenset({"text", "ranker"})).find(None, ("embed",))
    preferring = ModelRegistry(Config(models=models, embedding_model="second"))
    assert (await preferring.find(None, ("embed",))).id == "two"
    assert [(card.id, card.kind) for card in await preferring.all()] == [
        ("text", "generate"),
        ("one", "embed"),
        ("ranker", "score"),
        ("two", "embed"),
    ]
