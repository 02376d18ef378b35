"""The engine on vLLM with a script in the place of `AsyncLLM`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from syringa.engine.vllm.engine import VllmEngine, VllmLimits
from syringa.engine.vllm.requests import ChoiceRequest
from syringa.engine.vllm.stats import VllmCounters
from syringa.errors import EngineOverloaded, InvalidRequest
from syringa.types import EngineDelta, ResumedChoice
from tests.engine.vllm.test_requests import SCHEMA, request
from tests.engine.vllm.vllm_outputs import output

HANG_SECONDS = 60.0  # limit of every wait: a test that reaches it has failed
LIMITS = VllmLimits(vocab_size=100, max_length=50, max_running=2, max_queue=1, blocks=10, block_size=16)


class EngineHarness:
    """An engine, and what arrives at its `AsyncLLM`. `send` is what vLLM answers."""

    def __init__(self, limits: VllmLimits = LIMITS) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.started: dict[str, tuple[ChoiceRequest, int]] = {}
        self.canceled: list[str] = []
        self.running: list[list[bytes]] = []
        self.counters, self.now = VllmCounters(), 0.0
        self._queues: dict[str, asyncio.Queue[Any]] = {}
        self._woken = threading.Event()
        self.engine = VllmEngine(
            self.loop,
            self._generate,
            limits,
            special_tokens={},
            counters=self.counters,
            to_error=lambda error: InvalidRequest(str(error)) if isinstance(error, ValueError) else None,
            clock=lambda: self.now,
        )
        self.engine.attach(self._woken.set, lambda fingerprints: self.running.append(list(fingerprints)))

    async def _generate(self, choice: ChoiceRequest, id: str, priority: int) -> AsyncGenerator[Any]:
        self.started[id] = choice, priority
        queue = self._queues[id] = asyncio.Queue()
        try:
            while True:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                yield item
        except asyncio.CancelledError:
            self.canceled.append(id)
            raise

    def settle(self) -> None:
        """Let the event loop run all that is ready."""

        async def pause() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(pause(), self.loop).result(HANG_SECONDS)

    def submit(self, id: str = "r", client_id: int = 1, **fields: Any) -> None:
        self.engine.submit(request(id=id, fingerprint=id.encode(), **fields), client_id)
        self.settle()

    def send(self, id: str, *items: Any) -> list[tuple[int, EngineDelta]]:
        """Let vLLM answer, and return the deltas of the next step."""
        self.settle()
        self._woken.clear()
        for item in items:
            self.loop.call_soon_threadsafe(self._queues[id].put_nowait, item)
        assert self._woken.wait(HANG_SECONDS)
        self.settle()
        return self.engine.step()

    def close(self) -> None:
        async def cancel_all() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel_all(), self.loop).result(HANG_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(HANG_SECONDS)
        self.loop.close()


@pytest.fixture
def harness() -> Iterator[EngineHarness]:
    made = EngineHarness()
    yield made
    made.close()


def test_outputs_become_deltas_of_their_client(harness: EngineHarness) -> None:
    harness.submit(priority=3)
    assert harness.started["1-r-0"][1] == 3
    assert harness.running[-1] == [b"r"]
    assert harness.send("1-r-0", output(5)) == [(1, EngineDelta("r", 0, [5]))]
    assert harness.send("1-r-0", output(6, finish="length")) == [(1, EngineDelta("r", 0, [6], finish="length"))]
    assert not harness.engine.active
    assert harness.running[-1] == []
    stats = harness.engine.stats()
    assert (stats.running, stats.output_tokens, stats.prompt_tokens, stats.started) == (0, 2, 3, 1)


def test_priority_does_not_put_a_request_before_those_of_other_tenants(harness: EngineHarness) -> None:
    harness.submit(priority=-5)
    assert harness.started["1-r-0"][1] == 0


def test_background_requests_come_after_all_others(harness: EngineHarness) -> None:
    harness.submit(priority=2**31, id="urgent")
    harness.submit(background=True, id="batch")
    assert harness.started["1-batch-0"][1] > harness.started["1-urgent-0"][1]


def test_outputs_of_one_step_wake_the_server_once(harness: EngineHarness) -> None:
    wakes: list[None] = []
    harness.submit(choices=2)
    harness.engine.attach(lambda: wakes.append(None), lambda fingerprints: None)

    def answer() -> None:
        for choice in (0, 1):
            harness._queues[f"1-r-{choice}"].put_nowait(output(5))

    harness.loop.call_soon_threadsafe(answer)
    harness.settle()
    assert len(wakes) == 1
    assert [delta.choice for _, delta in harness.engine.step()] == [0, 1]


def test_abort_of_a_choice_leaves_the_others(harness: EngineHarness) -> None:
    harness.submit(choices=2)
    harness.engine.abort("r", 0, client_id=1)
    harness.settle()
    assert harness.canceled == ["1-r-0"]
    assert harness.send("1-r-1", output(5)) == [(1, EngineDelta("r", 1, [5]))]
    harness.engine.abort("r", client_id=1)
    harness.settle()
    assert harness.canceled == ["1-r-0", "1-r-1"]
    assert not harness.engine.active


def test_aborted_request_gets_no_delta_that_was_on_its_way(harness: EngineHarness) -> None:
    harness.submit()
    harness._woken.clear()
    harness.loop.call_soon_threadsafe(harness._queues["1-r-0"].put_nowait, output(5))
    assert harness._woken.wait(HANG_SECONDS)
    harness.engine.abort("r", client_id=1)
    assert harness.engine.step() == []


def test_requests_of_a_lost_client_are_aborted(harness: EngineHarness) -> None:
    harness.submit("a", 1)
    harness.submit("a", 2)
    harness.engine.abort_all(1)
    harness.settle()
    assert harness.canceled == ["1-a-0"]


def test_refusal_of_vllm_is_the_clients_fault_and_ends_the_request(harness: EngineHarness) -> None:
    harness.submit(choices=2)
    assert harness.send("1-r-0", ValueError("too long")) == []
    ((client_id, request_id, error),) = harness.engine.take_refused()
    assert (client_id, request_id, str(error)) == (1, "r", "too long")
    harness.settle()
    assert harness.canceled == ["1-r-1"]
    assert not harness.engine.active


def test_refusal_of_a_grammar_is_told_as_such(harness: EngineHarness) -> None:
    """The layer above knows the field that the grammar comes from."""
    harness.submit(choices=2, sampling={"grammar": SCHEMA})
    deltas = harness.send("1-r-0", ValueError("the schema is nested too deeply"))
    assert [(delta.choice, delta.error, delta.error_kind) for _, delta in deltas] == [
        (choice, "the schema is nested too deeply", "grammar") for choice in (0, 1)
    ]
    assert harness.engine.take_refused() == []
    assert not harness.engine.active


def test_failure_of_vllm_ends_the_choice(harness: EngineHarness) -> None:
    harness.submit()
    ((_, delta),) = harness.send("1-r-0", RuntimeError("secret"))
    assert (delta.finish, delta.error_kind) == ("error", "engine")
    assert "secret" not in (delta.error or "")


def test_unreadable_output_ends_the_choice(harness: EngineHarness) -> None:
    harness.submit()
    ((_, delta),) = harness.send("1-r-0", SimpleNamespace(outputs=[]))
    assert delta.finish == "error"
    harness.settle()
    assert harness.canceled == ["1-r-0"]


def test_invalid_and_unsupported_requests_are_refused(harness: EngineHarness) -> None:
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        harness.submit(prompt=[100])
    with pytest.raises(InvalidRequest, match="dry_multiplier"):
        harness.submit(sampling={"dry_multiplier": 1.0})
    assert harness.started == {}


def test_request_that_cannot_be_continued_ends_with_an_error(harness: EngineHarness) -> None:
    harness.submit(sampling={"seeded": True}, resumed=(ResumedChoice([5]),))
    assert harness.engine.next_step_delay == 0.0
    ((_, delta),) = harness.engine.step()
    assert (delta.finish, delta.error_kind) == ("error", "unavailable")
    assert harness.started == {}


def test_choice_that_fails_here_is_aborted_in_vllm(harness: EngineHarness) -> None:
    harness.submit(sampling={"allowed_tokens": frozenset({5})})
    ((_, delta),) = harness.send("1-r-0", output(0))
    assert (delta.finish, delta.error_kind) == ("error", "no_token")
    harness.settle()
    assert harness.canceled == ["1-r-0"]
    assert harness.engine.stats().running == 0


def test_queue_is_limited(harness: EngineHarness) -> None:
    harness.submit("a", choices=2)
    harness.submit("b")  # waits: two may run
    assert (harness.engine.stats().running, harness.engine.stats().waiting) == (2, 1)
    with pytest.raises(EngineOverloaded):
        harness.submit("c")
    harness.submit("d", resumed=(ResumedChoice([5]),))  # was accepted before
    assert harness.engine.stats().refused == 1


def test_background_requests_wait_behind_the_others_in_a_queue_of_their_own(harness: EngineHarness) -> None:
    harness.submit("batch", choices=3, background=True)  # one waits: two may run
    assert (harness.engine.stats().running, harness.engine.stats().waiting) == (2, 0)
    harness.submit("batch 2", background=True)  # is not refused
    harness.submit("a", choices=3)  # vLLM runs two of these instead
    assert (harness.engine.stats().running, harness.engine.stats().waiting) == (2, 1)
    assert harness.engine.stats().queue_tenants == 1
    with pytest.raises(EngineOverloaded):
        harness.submit("b")


def test_queue_length_is_what_vllm_reports() -> None:
    harness = EngineHarness(LIMITS._replace(max_running=8, queue_seconds=5.0))
    try:
        harness.submit("a")
        harness.submit("b")
        harness.counters.waiting = 1  # for lack of memory
        harness.now = 4.9
        assert harness.engine.step() == []
        assert harness.engine.take_refused() == []
        assert harness.engine.next_step_delay is not None
        harness.now = 5.0
        harness.engine.step()
        ((_, request_id, error),) = harness.engine.take_refused()
        assert request_id == "b"
        assert "waited 5.0 s" in str(error)
    finally:
        harness.close()


def test_progress_is_that_of_vllm(harness: EngineHarness) -> None:
    assert not harness.engine.take_progress()
    harness.submit()
    assert harness.engine.take_progress()  # it has got something to do
    assert not harness.engine.take_progress()
    harness.counters.record_step(None, step_stats())
    assert harness.engine.take_progress()


def step_stats() -> Any:
    return SimpleNamespace(
        num_preempted_reqs=1,
        num_generation_tokens=2,
        prompt_token_stats=SimpleNamespace(computed=30),
        inter_token_latencies_iter=[0.02, 0.03],
    )


def test_statistics_are_those_of_vllm(harness: EngineHarness) -> None:
    harness.submit()
    scheduler = SimpleNamespace(num_waiting_reqs=0, num_skipped_waiting_reqs=0, kv_cache_usage=0.5)
    harness.counters.record_step(scheduler, step_stats())
    stats = harness.engine.stats()
    assert (stats.blocks_total, stats.blocks_free, stats.block_size) == (10, 5, 16)
    assert (stats.steps, stats.preemptions, stats.step_tokens.sum) == (1, 1, 32)
    assert sum(stats.token_gaps.counts) == 2
    assert (stats.running, stats.idle_seconds) == (1, 0.0)


def test_request_with_several_choices_is_counted_once(harness: EngineHarness) -> None:
    harness.engine._limits = LIMITS._replace(max_queue=8)
    harness.submit(choices=3)
    metrics = SimpleNamespace(queued_ts=1.0, scheduled_ts=1.25)
    for choice in range(3):
        harness.send(f"1-r-{choice}", output(5, finish="stop", num_cached_tokens=2, metrics=metrics))
    stats = harness.engine.stats()
    assert (stats.started, stats.queue_seconds) == (1, 0.25)
    assert (stats.prompt_tokens, stats.cached_tokens, stats.output_tokens) == (3, 2, 3)


def test_requests_after_a_crash_are_computed_alone(harness: EngineHarness) -> None:
    harness.engine._limits = LIMITS._replace(max_queue=8)
    harness.submit("a", isolation="start")
    harness.submit("b", isolation="start")
    harness.submit("c")
    harness.engine.step()
    harness.settle()
    assert list(harness.started) == ["1-a-0"]
    assert harness.running[-1] == [b"a"]  # only these would be suspects
    assert harness.send("1-a-0", output(5)) == []  # held until the others have proved harmless
    harness.settle()
    assert list(harness.started) == ["1-a-0", "1-b-0"]
    assert harness.send("1-b-0", output(6)) == [(1, EngineDelta("a", 0, [5])), (1, EngineDelta("b", 0, [6]))]
    harness.settle()
    assert list(harness.started) == ["1-a-0", "1-b-0", "1-c-0"]


def test_streams_go_on_while_a_request_waits_to_be_computed_alone(harness: EngineHarness) -> None:
    harness.engine._limits = LIMITS._replace(max_queue=8)
    harness.submit("a")
    harness.submit("b", isolation="start")
    assert harness.send("1-a-0", output(5)) == [(1, EngineDelta("a", 0, [5]))]
    assert list(harness.started) == ["1-a-0"]
