"""The engine of an embedding model: requests, results, aborts and refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from syringa.engine.embedding.batch import PackedBatch
from syringa.engine.embedding.engine import EmbeddingEngine
from syringa.engine.embedding.loading import LoadedEmbedding
from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.errors import ContextLengthExceeded, EngineOverdue, EngineOverloaded, InvalidRequest
from syringa.types import EmbeddingRequest, EngineRequest, ModelInfo, SamplingParams, StopConditions

INFO = ModelInfo(
    architecture="BertModel", dtype="int8", max_model_len=16, vocab_size=100, parameters=0, kernels="none", threads=1,
    load_seconds=0.0, kind="embed", dimensions=2,
)  # fmt: skip


class SumModel:
    """The vector of an input is the sum of its tokens and their number. Memory runs out above `limit` tokens."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.limit = 10**9

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        self.batches.append(batch.lengths.tolist())
        if len(batch.tokens) > self.limit:
            raise MemoryError
        rows = [[part.sum(), len(part)] for part in np.split(batch.tokens, batch.starts[1:-1])]
        return torch.tensor(rows, dtype=torch.float32)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def made(budget: int = 32, **limits: float) -> tuple[EmbeddingEngine, SumModel, Clock]:
    model, clock = SumModel(), Clock()
    loaded = LoadedEmbedding(model, INFO, torch.device("cpu"))
    return EmbeddingEngine(loaded, SchedulerLimits(step_tokens=budget, **limits), clock=clock), model, clock  # type: ignore[arg-type]


def request(id: str, *inputs: list[int], **fields: object) -> EmbeddingRequest:
    return EmbeddingRequest(id=id, inputs=list(inputs), **fields)  # type: ignore[arg-type]


def run(engine: EmbeddingEngine) -> dict[tuple[int, str], list[list[float]]]:
    """Step until nothing is left. Return the vectors by client and request id."""
    found = {}
    while engine.next_step_delay is not None:
        engine.step()
        for client, result in engine.take_embedded():
            values = np.frombuffer(result.values, "<f4").reshape(-1, result.width)
            found[client, result.request_id] = values.tolist()
    return found


def test_vectors_come_in_the_order_of_the_inputs_over_several_steps() -> None:
    engine, model, _ = made(budget=6)
    engine.embed(request("a", [1], [2, 3], [4, 5, 6], [7, 8]), client_id=1)
    engine.embed(request("a", [9]), client_id=2)
    assert run(engine) == {(1, "a"): [[1, 1], [5, 2], [15, 3], [15, 2]], (2, "a"): [[9, 1]]}
    assert [sum(batch) <= 6 for batch in model.batches] == [True, True]
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.started, stats.steps, stats.waiting, stats.running) == (9, 2, 2, 0, 0)


def test_background_requests_keep_the_engine_busy_and_are_no_reason_for_replicas() -> None:
    engine, _, _ = made()
    engine.embed(request("b", [1], background=True, tenant="batch"))
    engine.embed(request("i", [1], tenant="interactive"))
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.queue_tenants, stats.idle_seconds) == (1, 1, 1, 0.0)


def test_queue_time_is_reported_with_the_result() -> None:
    engine, _, clock = made()
    engine.embed(request("a", [1]))
    clock.now += 0.25
    engine.step()
    ((_, result),) = engine.take_embedded()
    assert result.queued_ms == 250


def test_aborted_request_is_not_computed_and_gets_no_result() -> None:
    engine, model, _ = made(budget=2)
    engine.embed(request("a", [1, 2], [3, 4], [5, 6]))
    engine.embed(request("b", [7]), client_id=3)
    engine.step()
    engine.abort("a")
    engine.abort("unknown")
    engine.abort_all(3)
    assert run(engine) == {}
    assert model.batches == [[2]]


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (request("a"), InvalidRequest, "no input"),
        (request("a", [1], []), InvalidRequest, "no tokens"),
        (request("a", [1] * 17), ContextLengthExceeded, "maximum context length is 16 tokens"),
        (request("a", [100]), InvalidRequest, "outside the vocabulary"),
        (request("a", [-1]), InvalidRequest, "outside the vocabulary"),
        (request("a", [1], [2], second=[0]), InvalidRequest, "pairs"),
        (request("a", [1], second=[2]), InvalidRequest, "pairs"),
    ],
)
def test_request_that_cannot_be_run_is_refused(
    wrong: EmbeddingRequest, error: type[InvalidRequest], message: str
) -> None:
    engine, _, _ = made()
    with pytest.raises(error, match=message):
        engine.embed(wrong)
    assert engine.next_step_delay is None


def test_generation_is_refused() -> None:
    engine, _, _ = made()
    with pytest.raises(InvalidRequest, match="generates no text"):
        engine.submit(
            EngineRequest(id="a", prompt=[1], sampling=SamplingParams(seed=0), stopping=StopConditions(max_tokens=1))
        )


def test_full_queue_refuses_requests() -> None:
    engine, _, _ = made(max_queue=1)
    engine.embed(request("a", [1]))
    with pytest.raises(EngineOverloaded):
        engine.embed(request("b", [1]))
    assert run(engine) == {(0, "a"): [[1, 1]]}
    assert engine.stats().refused == 1


def test_request_that_waits_too_long_is_refused_unless_it_has_begun() -> None:
    engine, _, clock = made(budget=2, queue_seconds=5.0)
    engine.embed(request("begun", [1, 2], [3, 4]))
    engine.step()
    engine.embed(request("late", [5, 6], priority=1))
    clock.now += 6.0
    assert run(engine) == {(0, "begun"): [[3, 2], [7, 2]]}
    ((_, name, error),) = engine.take_refused()
    assert name == "late"
    assert isinstance(error, EngineOverdue)


def test_time_at_other_workers_counts_in_the_queue() -> None:
    engine, _, _ = made(budget=2, queue_seconds=5.0)
    engine.embed(request("moved", [1, 2], waited=6.0))
    assert run(engine) == {}
    ((_, name, error),) = engine.take_refused()
    assert (name, isinstance(error, EngineOverdue)) == ("moved", True)


def test_step_that_runs_out_of_memory_is_split_and_one_input_alone_fails_its_request() -> None:
    engine, model, _ = made(budget=12)
    model.limit = 4
    engine.embed(request("a", [1, 2, 3], [4, 5, 6], [7, 8, 9]))
    assert run(engine) == {(0, "a"): [[6, 3], [15, 3], [24, 3]]}
    engine.embed(request("large", [1] * 6))
    engine.embed(request("small", [2]))
    assert run(engine) == {(0, "small"): [[2, 1]]}
    ((_, name, error),) = engine.take_refused()
    assert (name, isinstance(error, EngineOverloaded)) == ("large", True)


def test_fingerprints_of_a_step_are_recorded_before_it() -> None:
    engine, model, _ = made()
    recorded: list[tuple[list[bytes], int]] = []
    engine.attach(lambda: None, lambda prints: recorded.append((list(prints), len(model.batches))))
    engine.embed(request("a", [1], [2], fingerprint=b"a"))
    engine.embed(request("b", [1], fingerprint=b"b"))
    run(engine)
    assert recorded == [([b"a", b"b"], 0)]
