from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from syringa.api.models import registry as module
from syringa.api.models.loading import load_model
from syringa.api.models.registry import Registry
from syringa.api.models.served_model import Status
from syringa.config import Config, ModelSpec, Prices
from syringa.errors import ConfigError, EngineUnavailable, Forbidden, ModelError, NotFound
from tests.api.model_files import folder


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = folder(tmp_path)
    return Config(
        models=(
            ModelSpec(id="a", path=path, aliases=("x",), prices=Prices(input=1)),
            ModelSpec(id="b", path=path, max_model_len=9),
            ModelSpec(id="broken", path=str(tmp_path / "nowhere")),
        )
    )


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which models were read, in order."""
    done: list[str] = []

    def read(config: Config, spec: ModelSpec) -> Any:
        done.append(spec.id)
        return load_model(config, spec)

    monkeypatch.setattr(module, "load_model", read)
    return done


async def test_the_default_is_read_at_the_start_and_others_on_first_use(config: Config, reads: list[str]) -> None:
    registry = Registry(config)
    await registry.start()
    assert reads == ["a"]
    first = await registry.find(None)
    assert [await registry.find(name) for name in ("a", "x", "default")] == [first] * 3
    assert (first.id, first.aliases, first.prices) == ("a", ("x",), Prices(input=1))
    assert reads == ["a"]
    second, again = await asyncio.gather(registry.find("b"), registry.find("b"))
    assert second is again
    assert reads == ["a", "b"]
    with pytest.raises(NotFound, match="Available: a, b, broken"):
        await registry.find("c")


async def test_a_default_that_cannot_be_read_ends_the_start(tmp_path: Path) -> None:
    registry = Registry(Config(models=(ModelSpec(id="a", path=str(tmp_path / "nowhere")),)))
    with pytest.raises(ModelError, match="no such file"):
        await registry.start()


async def test_a_broken_one_is_told_to_who_asks_for_it(
    config: Config, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(config)
    for _ in range(2):
        with pytest.raises(EngineUnavailable, match=r"The model .broken. cannot be used: .*no such file") as caught:
            await registry.find("broken")
        assert (caught.value.status, caught.value.code) == (503, "model_unavailable")
    assert reads == ["broken"]  # remembered
    assert (await registry.find("a")).id == "a"
    monkeypatch.setattr(module.time, "monotonic", lambda: 1e12)
    with pytest.raises(EngineUnavailable):
        await registry.find("broken")
    assert reads == ["broken", "a", "broken"]


async def test_an_error_nobody_foresaw_shows_no_details(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(config: Config, spec: ModelSpec) -> Any:
        raise ValueError("secret")

    monkeypatch.setattr(module, "load_model", read)
    with pytest.raises(EngineUnavailable) as caught:
        await Registry(config).find("a")
    assert "secret" not in caught.value.message


async def test_who_leaves_stops_nobody(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def read(config: Config, spec: ModelSpec) -> Any:
        assert go.wait(10)
        return load_model(config, spec)

    monkeypatch.setattr(module, "load_model", read)
    registry = Registry(config)
    impatient = asyncio.create_task(registry.find("a"))
    patient = asyncio.create_task(registry.find("a"))
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.gather(impatient, return_exceptions=True)
    go.set()
    assert (await patient).id == "a"


async def test_the_list_reads_no_tokenizer(config: Config, reads: list[str]) -> None:
    states: dict[str, Status] = {"a": "loaded", "b": "cold", "broken": "cold"}
    registry = Registry(config, status=states.__getitem__)
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
    assert card.capabilities == ("completion", "chat", "reasoning")  # its tokens tell that it thinks


async def test_a_key_sees_its_own_models(config: Config) -> None:
    models = Registry(config).for_key(frozenset({"b"}))
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


async def test_models_come_and_go(config: Config, reads: list[str], tmp_path: Path) -> None:
    told: list[list[str]] = []
    registry = Registry(config, changed=lambda specs: told.append([each.id for each in specs]))
    new = ModelSpec(id="new", path=str(tmp_path), aliases=("n", "x"))
    registry.replace([new])
    assert told == [["a", "b", "broken"], ["a", "b", "broken", "new"]]
    assert (await registry.find("n")).id == "new"
    assert (await registry.find("x")).id == "a"  # the first one's
    assert registry.specs[-1].idle_seconds == config.model_idle
    registry.replace([new])
    await registry.find("new")
    assert reads == ["new", "a"]
    registry.replace([ModelSpec(id="new", path=str(tmp_path), max_model_len=5)])
    assert (await registry.find("new")).max_model_len == 5
    assert reads == ["new", "a", "new"]
    registry.replace([])
    with pytest.raises(NotFound):
        await registry.find("new")
    assert (await registry.find("a")).id == "a"


async def test_the_settings_are_not_overruled(config: Config, tmp_path: Path) -> None:
    registry = Registry(config)
    other = ModelSpec(id="b", path=str(tmp_path), max_model_len=3)
    registry.replace([other])
    assert (await registry.find("b")).max_model_len == 9
    with pytest.raises(ConfigError, match="in the settings") as caught:
        registry.check(other)
    assert caught.value.param == "id"
    with pytest.raises(ConfigError, match="'a' has the name 'x' already") as caught:
        registry.check(ModelSpec(id="new", path="p", aliases=("y", "x")))
    assert caught.value.param == "aliases[1]"
    registry.replace([ModelSpec(id="new", path="p", aliases=("y",))])
    registry.check(ModelSpec(id="new", path="p", aliases=("y", "z")))


async def test_what_a_worker_says_of_its_cache(config: Config) -> None:
    registry = Registry(config)
    registry.learn("a", 20)  # before it was read
    model = await registry.find("a")
    assert model.max_model_len == 20
    registry.learn("a", 1000)
    assert model.max_model_len == 64
    registry.learn("nobody", 1)


def test_prices(config: Config) -> None:
    registry = Registry(config)
    assert [registry.prices(name) for name in ("a", "b", "nobody")] == [Prices(input=1), Prices(), Prices()]
