"""Several tenants on the real engine: who is turned away, what is told of waiting, and that answers stay the same."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Event
from typing import Any

import pytest

from syringa.engine.scheduling.pending import Arrivals
from syringa.engine.scheduling.scheduler import Limits
from syringa.engine.worker.core import EngineCore
from syringa.errors import EngineOverloaded
from syringa.types import EngineRequest, Grammar, Image
from tests.engine.conftest import Driver, drive, request

pytestmark = pytest.mark.model
Make = Callable[..., EngineCore]
PROMPT = list(range(100, 140))


class Clock:
    """What the engine takes for the time."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in ("core", "stats"):
        monkeypatch.setattr(f"syringa.engine.worker.{module}.time", made)
    return made


def ask(name: str, tenant: str, **options: Any) -> EngineRequest:
    return request(name, options.pop("prompt", PROMPT), tenant=tenant, **options)


def test_in_a_full_queue_a_tenant_gets_its_share(engine: Make) -> None:
    core = engine(limits=Limits(max_queue=4))
    for name in "abcd":
        core.submit(ask(name, "noisy"), origin=7)
    with pytest.raises(EngineOverloaded):
        core.submit(ask("e", "noisy"), origin=7)
    for name in "xy":
        core.submit(ask(name, "quiet"))
    with pytest.raises(EngineOverloaded):
        core.submit(ask("z", "quiet"))
    refused = core.take_refused()
    assert [(origin, name) for origin, name, _ in refused] == [(7, "d"), (7, "c")]
    assert all(isinstance(error, EngineOverloaded) for _, _, error in refused)
    assert core.take_refused() == []
    stats = core.stats()
    assert (stats.waiting, stats.queue_tenants, stats.refused) == (4, 2, 4)
    assert {name for name, _ in Driver(core).finish()} == {"a", "b", "x", "y"}


def test_one_that_waits_too_long_is_refused(engine: Make, clock: Clock) -> None:
    core = engine(limits=Limits(max_running=1, queue_seconds=30))
    driver = Driver(core)
    driver.submit(ask("long", "a", max_tokens=200, stopping={"ignore_eos": True}))
    driver.step()
    driver.submit(ask("late", "a", choices=3))
    clock.now += 29
    driver.step()
    assert core.take_refused() == []
    clock.now += 2
    driver.step()
    ((origin, name, error),) = core.take_refused()
    assert (origin, name) == (0, "late")
    assert isinstance(error, EngineOverloaded)
    assert "waited 31.0 s in the queue" in error.message
    assert core.stats().waiting == 0
    assert set(driver.finish()) == {("long", 0)}
    assert (core.stats().started, core.stats().refused) == (1, 1)


def test_one_that_was_preempted_is_not_taken_for_waiting(engine: Make, clock: Clock) -> None:
    core = engine(limits=Limits(queue_seconds=30), kv_cache_tokens=160, prefix_caching=False)
    driver = Driver(core)
    driver.submit(*(ask(name, "a", max_tokens=80, stopping={"ignore_eos": True}) for name in "xy"))
    driver.step()
    while not core.stats().waiting:
        driver.step()
    clock.now += 60
    answers = driver.finish()
    assert core.stats().preemptions > 0
    assert core.take_refused() == []
    assert [len(answers[name, 0].tokens) for name in "xy"] == [80, 80]


def test_a_request_whose_grammar_is_never_reached_is_refused_too(
    engine: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine(limits=Limits(queue_seconds=0.5))
    pending: list[Future[Any]] = [Future(), Future()]
    compiler = core.arrivals._compiler()
    monkeypatch.setattr(compiler, "compile", lambda *_: pending[len(core.arrivals)])
    pending[1].set_running_or_notify_cancel()
    for name in ("waits", "is compiled"):
        core.submit(ask(name, "a", grammar=Grammar("regex", "a+")))
    assert core.patience == 0.5
    assert not core.busy
    assert core.step() == []
    assert core.take_refused() == []
    clock.now += 1
    assert core.step() == []
    assert [name for _, name, _ in core.take_refused()] == ["waits"]
    assert pending[0].cancelled()
    assert core.stats().waiting == 1
    assert core.stats().idle_seconds == 0
    core.abort("is compiled")
    assert core.patience is None


def test_how_long_a_request_waited_is_told_once(engine: Make, clock: Clock) -> None:
    core = engine()
    core.submit(ask("a", "", choices=2, max_tokens=3))
    clock.now += 0.25
    answers = Driver(core).finish()
    waits = [delta.queued_ms for delta in answers["a", 0].deltas]
    assert waits == [250, 0, 0]
    assert [delta.queued_ms for delta in answers["a", 1].deltas] == [0, 0, 0]
    stats = core.stats()
    assert (stats.started, stats.queue_seconds) == (1, 0.25)


def test_idle_seconds(engine: Make, clock: Clock) -> None:
    core = engine()
    clock.now += 3
    assert core.stats().idle_seconds == 3
    core.submit(ask("a", ""))
    clock.now += 1
    assert core.stats().idle_seconds == 0
    Driver(core).finish()
    clock.now += 2
    assert core.stats().idle_seconds == 2


class Preparing:
    """A compiler and a studio that never come to an end."""

    def __init__(self) -> None:
        self.tenants: list[str] = []

    def compile(self, grammar: Grammar, tenant: str) -> Future[Any]:
        self.tenants.append(tenant)
        return Future()


@pytest.fixture
def arrivals(engine: Make, monkeypatch: pytest.MonkeyPatch) -> Arrivals:
    found = Arrivals(engine().loaded, 100, 4, None)
    monkeypatch.setattr(found, "_compiler", Preparing)
    return found


def test_those_that_are_prepared_are_shared_out_too(arrivals: Arrivals) -> None:
    def add(name: str, tenant: str) -> str | None:
        displaced = arrivals.add(ask(name, tenant, grammar=Grammar("regex", "a")), 0)
        if displaced is None:
            return None
        arrivals.forget(0, displaced.request.id)
        assert displaced.grammar is not None
        assert displaced.grammar.cancelled()
        return displaced.request.id

    assert [add(name, "noisy") for name in "abcd"] == [None] * 4
    with pytest.raises(EngineOverloaded):
        add("e", "noisy")
    assert [add(name, "quiet") for name in "xy"] == ["d", "c"]
    with pytest.raises(EngineOverloaded):
        add("z", "quiet")
    assert arrivals.tenants == {"noisy", "quiet"}
    assert len(arrivals) == 4


def test_bytes_of_images_are_shared_out_too(arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syringa.engine.scheduling.pending.MOST_IMAGE_BYTES", 100)

    def add(name: str, tenant: str, size: int) -> str | None:
        images = (Image(data=b"x" * size, digest=b""),) if size else ()
        displaced = arrivals.add(ask(name, tenant, grammar=Grammar("regex", "a"), images=images), 0)
        if displaced is not None:
            arrivals.forget(0, displaced.request.id)
        return displaced.request.id if displaced else None

    assert add("a", "noisy", 110) is None
    assert add("b", "quiet", 20) == "a"
    assert add("c", "noisy", 90) is None
    with pytest.raises(EngineOverloaded):
        add("d", "noisy", 1)
    assert add("e", "third", 0) == "c"


def test_grammars_of_tenants_are_compiled_in_turns(engine: Make) -> None:
    """One tenant's many do not come before another's one."""
    core = engine()
    drive(core, [ask("warm", "", grammar=Grammar("regex", "a"), max_tokens=1)])
    for number in range(60):
        core.submit(ask(f"noisy {number}", "noisy", grammar=Grammar("regex", f"[a-z]{{{number + 1},300}}x{number}")))
    core.submit(ask("quiet", "quiet", grammar=Grammar("regex", "[0-9]+"), max_tokens=1))
    order: list[str] = []
    told = Event()

    def note(name: str) -> None:
        order.append(name)
        if name == "quiet":
            told.set()

    for arrival in core.arrivals._waiting:
        assert arrival.grammar is not None
        arrival.grammar.add_done_callback(lambda _, name=arrival.request.id: note(name))  # type: ignore[misc]
    assert told.wait(60)
    assert order.index("quiet") < 30
    core.abort_all(0)


def test_answers_do_not_change_when_a_place_is_given_away(engine: Make) -> None:
    """Sent back for another tenant's sake, for places and for blocks, and computed again to the bit."""

    def noisy(name: str) -> EngineRequest:
        return ask(name, "noisy", seed=5, max_tokens=24, logprobs=2, stopping={"ignore_eos": True})

    alone = drive(engine(prefix_caching=False), [noisy("alone")])["alone", 0]
    for limits, tokens in ((Limits(max_running=3), 4096), (Limits(), 192)):
        core = engine(limits=limits, kv_cache_tokens=tokens, prefix_caching=False)
        driver = Driver(core)
        driver.submit(*(noisy(name) for name in "abc"))
        driver.step(5)
        for turn in range(4):
            driver.submit(ask(f"small {turn}", "small", prompt=PROMPT[:20], max_tokens=2))
            driver.step()
            assert driver.answers[f"small {turn}", 0].tokens, "it has its first token at once"
            driver.step(4)
        answers = driver.finish()
        assert core.stats().preemptions > 0
        for name in "abc":
            assert (answers[name, 0].tokens, answers[name, 0].logprobs) == (alone.tokens, alone.logprobs)
