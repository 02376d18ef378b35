"""Fairness of the engine between tenants: refusals, queue times, and unchanged tokens after preemption."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Event
from typing import Any

import msgspec
import pytest

from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.engine.scheduling.pending import PendingRequest, PendingRequests
from syringa.engine.worker.core import EngineCore
from syringa.errors import EngineOverdue, EngineOverloaded
from syringa.types import EngineRequest, Grammar, Image
from tests.engine.conftest import Driver, drive, request

pytestmark = pytest.mark.model
Make = Callable[..., EngineCore]
PROMPT = list(range(100, 140))


class Clock:
    """A replacement for `time` in the engine."""

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


def make_request(name: str, tenant: str, **options: Any) -> EngineRequest:
    return request(name, options.pop("prompt", PROMPT), tenant=tenant, **options)


def test_full_queue_gives_each_tenant_its_share(engine: Make) -> None:
    core = engine(limits=SchedulerLimits(max_queue=4))
    for name in "abcd":
        core.submit(make_request(name, "noisy"), client_id=7)
    with pytest.raises(EngineOverloaded):
        core.submit(make_request("e", "noisy"), client_id=7)
    for name in "xy":
        core.submit(make_request(name, "quiet"))
    with pytest.raises(EngineOverloaded):
        core.submit(make_request("z", "quiet"))
    refused = core.take_refused()
    assert [(client_id, name) for client_id, name, _ in refused] == [(7, "d"), (7, "c")]
    assert all(isinstance(error, EngineOverloaded) for _, _, error in refused)
    assert core.take_refused() == []
    stats = core.stats()
    assert (stats.waiting, stats.queue_tenants, stats.refused) == (4, 2, 4)
    assert {name for name, _ in Driver(core).finish()} == {"a", "b", "x", "y"}


def test_request_is_refused_after_queue_seconds(engine: Make, clock: Clock) -> None:
    core = engine(limits=SchedulerLimits(max_running=1, queue_seconds=30))
    driver = Driver(core)
    driver.submit(make_request("long", "a", max_tokens=200, stopping={"ignore_eos": True}))
    driver.step()
    driver.submit(make_request("late", "a", choices=3))
    clock.now += 29
    driver.step()
    assert core.take_refused() == []
    clock.now += 2
    driver.step()
    ((client_id, name, error),) = core.take_refused()
    assert (client_id, name) == (0, "late")
    assert isinstance(error, EngineOverdue)
    assert "waited 31.0 s in the queue" in error.message
    assert core.stats().waiting == 0
    assert set(driver.finish()) == {("long", 0)}
    assert (core.stats().started, core.stats().refused) == (1, 1)


def test_time_at_other_workers_counts_in_the_queue(engine: Make, clock: Clock) -> None:
    core = engine(limits=SchedulerLimits(max_running=1, queue_seconds=30))
    driver = Driver(core)
    driver.submit(make_request("long", "a", max_tokens=200, stopping={"ignore_eos": True}))
    driver.step()
    moved = msgspec.structs.replace(make_request("moved", "a"), waited=20.0)
    driver.submit(make_request("new", "a"), moved)
    clock.now += 11
    driver.step()
    ((_, name, error),) = core.take_refused()
    assert (name, isinstance(error, EngineOverdue)) == ("moved", True)
    assert {name for name, _ in driver.finish()} == {"long", "new"}


def test_preempted_request_is_not_refused_as_overdue(engine: Make, clock: Clock) -> None:
    core = engine(limits=SchedulerLimits(queue_seconds=30), kv_cache_tokens=160, prefix_caching=False)
    driver = Driver(core)
    driver.submit(*(make_request(name, "a", max_tokens=80, stopping={"ignore_eos": True}) for name in "xy"))
    driver.step()
    while not core.stats().waiting:
        driver.step()
    clock.now += 60
    answers = driver.finish()
    assert core.stats().preemptions > 0
    assert core.take_refused() == []
    assert [len(answers[name, 0].tokens) for name in "xy"] == [80, 80]


def test_pending_request_is_refused_after_queue_seconds_unless_started(
    engine: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine(limits=SchedulerLimits(queue_seconds=0.5))
    pending: list[Future[Any]] = [Future(), Future()]
    compiler = core.pending._compiler()
    monkeypatch.setattr(compiler, "compile", lambda *_, **__: pending[len(core.pending)])
    pending[1].set_running_or_notify_cancel()
    for name in ("waiting", "compiling"):
        core.submit(make_request(name, "a", grammar=Grammar("regex", "a+")))
    assert core.next_step_delay == 0.5
    assert not core.busy
    assert core.step() == []
    assert core.take_refused() == []
    clock.now += 1
    assert core.step() == []
    assert [name for _, name, _ in core.take_refused()] == ["waiting"]
    assert pending[0].cancelled()
    assert core.stats().waiting == 1
    assert core.stats().idle_seconds == 0
    core.abort("compiling")
    assert core.next_step_delay is None


def test_queue_time_is_reported_once(engine: Make, clock: Clock) -> None:
    core = engine()
    core.submit(make_request("a", "", choices=2, max_tokens=3))
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
    core.submit(make_request("a", ""))
    clock.now += 1
    assert core.stats().idle_seconds == 0
    Driver(core).finish()
    clock.now += 2
    assert core.stats().idle_seconds == 2


class NeverDone:
    """A grammar compiler whose futures never complete."""

    def __init__(self) -> None:
        self.tenants: list[str] = []

    def compile(
        self, grammar: Grammar, tenant: str, cache_key: bytes, output: Sequence[int], *, background: bool
    ) -> Future[Any]:
        self.tenants.append(tenant)
        return Future()


@pytest.fixture
def pending(engine: Make, monkeypatch: pytest.MonkeyPatch) -> PendingRequests:
    found = PendingRequests(engine().loaded, 100, 4, None)
    monkeypatch.setattr(found, "_compiler", NeverDone)
    return found


def test_pending_requests_give_each_tenant_its_share(pending: PendingRequests) -> None:
    def add(name: str, tenant: str) -> str | None:
        displaced = pending.add(make_request(name, tenant, grammar=Grammar("regex", "a")), 0)
        if displaced is None:
            return None
        pending.cancel(0, displaced.request.id)
        (grammar,) = displaced.grammars
        assert grammar.cancelled()
        return displaced.request.id

    assert [add(name, "noisy") for name in "abcd"] == [None] * 4
    with pytest.raises(EngineOverloaded):
        add("e", "noisy")
    assert [add(name, "quiet") for name in "xy"] == ["d", "c"]
    with pytest.raises(EngineOverloaded):
        add("z", "quiet")
    assert pending.tenants == {"noisy", "quiet"}
    assert len(pending) == 4


def test_pending_requests_share_image_bytes_between_tenants(
    pending: PendingRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syringa.engine.scheduling.pending.MAX_IMAGE_BYTES", 100)

    def add(name: str, tenant: str, size: int) -> str | None:
        images = (Image(data=b"x" * size, digest=b""),) if size else ()
        displaced = pending.add(make_request(name, tenant, grammar=Grammar("regex", "a"), images=images), 0)
        if displaced is not None:
            pending.cancel(0, displaced.request.id)
        return displaced.request.id if displaced else None

    assert add("a", "noisy", 110) is None
    assert add("b", "quiet", 20) == "a"
    assert add("c", "noisy", 90) is None
    with pytest.raises(EngineOverloaded):
        add("d", "noisy", 1)
    assert add("e", "third", 0) == "c"


def test_pending_background_requests_take_no_capacity_from_others(
    pending: PendingRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syringa.engine.scheduling.pending.MAX_IMAGE_BYTES", 100)

    def add(name: str, size: int = 0, *, background: bool) -> PendingRequest | None:
        images = (Image(data=b"x" * size, digest=b""),) if size else ()
        request = make_request(name, "a", grammar=Grammar("regex", "a"), images=images, background=background)
        return pending.add(request, 0)

    for number in range(6):  # more than the capacity, and more bytes than the limit
        assert add(f"batch {number}", 110 if number == 5 else 0, background=True) is None
    for number in range(4):
        assert add(str(number), 25, background=False) is None
    with pytest.raises(EngineOverloaded):
        add("4", background=False)
    assert add("batch 6", background=True) is None
    assert len(pending) == 11


def test_images_of_pending_background_requests_are_bounded(
    pending: PendingRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syringa.engine.scheduling.pending.MAX_IMAGE_BYTES", 100)

    def ask(name: str) -> EngineRequest:
        images = (Image(data=b"x" * 60, digest=b""),)
        return make_request(name, "a", grammar=Grammar("regex", "a"), images=images, background=True)

    for name in "ab":
        assert pending.add(ask(name), 0) is None
    with pytest.raises(EngineOverloaded):  # the line waits
        pending.add(ask("c"), 0)
    pending.cancel(0, "a")
    assert pending.add(ask("c"), 0) is None


def test_grammars_of_background_requests_are_compiled_last(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine()
    drive(core, [make_request("warm", "", grammar=Grammar("regex", "a"), max_tokens=1)])
    compiler = core.pending._compiler()
    compile_grammar, order = compiler._compile, []
    begun, submitted = Event(), Event()

    def compile_in_turn(grammar: Grammar) -> Any:
        begun.set()
        assert submitted.wait(60)
        order.append(grammar.value)
        return compile_grammar(grammar)

    monkeypatch.setattr(compiler, "_compile", compile_in_turn)
    driver = Driver(core)
    for number in range(4):
        grammar = Grammar("regex", f"b{number}")
        driver.submit(make_request(f"batch {number}", "a", grammar=grammar, max_tokens=1, background=True))
    assert begun.wait(60)
    driver.submit(make_request("interactive", "a", grammar=Grammar("regex", "i"), max_tokens=1))
    submitted.set()
    driver.finish()
    assert order == ["b0", "i", "b1", "b2", "b3"]


def test_grammar_compilation_is_fair_between_tenants(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant with many grammars does not delay one with a single grammar, however slow each thread is."""
    core = engine()
    drive(core, [make_request("warm", "", grammar=Grammar("regex", "a"), max_tokens=1)])
    compiler = core.pending._compiler()
    compile_grammar, quiet, begun = compiler._compile, Grammar("regex", "[0-9]+"), itertools.count()
    submitted, finished = Event(), Event()

    def compile_in_turn(grammar: Grammar) -> Any:
        assert submitted.wait(60)
        if grammar != quiet and next(begun) >= 20:
            finished.wait(60)
        return compile_grammar(grammar)

    monkeypatch.setattr(compiler, "_compile", compile_in_turn)
    for number in range(60):
        core.submit(
            make_request(f"noisy {number}", "noisy", grammar=Grammar("regex", f"[a-z]{{{number + 1},300}}x{number}"))
        )
    core.submit(make_request("quiet", "quiet", grammar=quiet, max_tokens=1))
    order: list[str] = []

    def record(name: str) -> None:
        order.append(name)
        if name == "quiet":
            finished.set()

    for pending_request in core.pending._pending:
        (grammar,) = pending_request.grammars
        grammar.add_done_callback(lambda _, name=pending_request.request.id: record(name))  # type: ignore[misc]
    submitted.set()
    assert finished.wait(60)
    assert order.index("quiet") < 30
    core.abort_all(0)


def test_preemption_for_another_tenant_does_not_change_tokens(engine: Make) -> None:
    """Sequences preempted for another tenant, for slots and for blocks, are recomputed bit-equal."""

    def noisy(name: str) -> EngineRequest:
        return make_request(name, "noisy", seed=5, max_tokens=24, logprobs=2, stopping={"ignore_eos": True})

    alone = drive(engine(prefix_caching=False), [noisy("alone")])["alone", 0]
    for limits, tokens in ((SchedulerLimits(max_running=3), 4096), (SchedulerLimits(), 192)):
        core = engine(limits=limits, kv_cache_tokens=tokens, prefix_caching=False)
        driver = Driver(core)
        driver.submit(*(noisy(name) for name in "abc"))
        driver.step(5)
        for number in range(4):
            driver.submit(make_request(f"small {number}", "small", prompt=PROMPT[:20], max_tokens=2))
            driver.step()
            assert driver.answers[f"small {number}", 0].tokens, "it gets its first token at once"
            driver.step(4)
        answers = driver.finish()
        assert core.stats().preemptions > 0
        for name in "abc":
            assert (answers[name, 0].tokens, answers[name, 0].logprobs) == (alone.tokens, alone.logprobs)


def test_background_requests_give_way_without_changing_their_tokens(engine: Make) -> None:
    """They are paused by prompts, preempted for slots and for blocks, and continued bit-equal."""

    def background(name: str) -> EngineRequest:
        options: dict[str, Any] = {"logprobs": 2, "stopping": {"ignore_eos": True}, "background": True}
        return make_request(name, "batch", seed=5, max_tokens=24, **options)

    alone = drive(engine(prefix_caching=False), [background("alone")])["alone", 0]
    for limits, tokens in ((SchedulerLimits(max_running=3), 4096), (SchedulerLimits(), 192)):
        core = engine(limits=limits, kv_cache_tokens=tokens, prefix_caching=False)
        driver = Driver(core)
        driver.submit(*(background(name) for name in "abc"))
        driver.step(8)
        for number in range(3):
            driver.submit(make_request(f"chat {number}", "chat", prompt=PROMPT[:20], max_tokens=2))
            driver.step()
            assert driver.answers[f"chat {number}", 0].tokens, "it gets its first token at once"
            driver.step(3)
        answers = driver.finish()
        assert core.stats().preemptions > 0
        for name in "abc":
            assert (answers[name, 0].tokens, answers[name, 0].logprobs) == (alone.tokens, alone.logprobs)


def test_background_requests_are_not_refused_as_overdue(engine: Make, clock: Clock) -> None:
    core = engine(limits=SchedulerLimits(max_running=1, queue_seconds=5.0))
    driver = Driver(core)
    driver.submit(make_request("chat", "a", max_tokens=4), make_request("batch", "a", max_tokens=2, background=True))
    driver.step()
    clock.now += 100.0
    answers = driver.finish()
    assert core.take_refused() == []
    assert len(answers["batch", 0].tokens) == 2
