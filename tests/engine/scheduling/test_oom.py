"""Back-off after out-of-memory errors: steps are rolled back and shrink, tokens do not change, no block is lost."""

from __future__ import annotations

import dataclasses
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from syringa.engine.execution.overlap import StepInput
from syringa.engine.loading.loaded_model import LoadOptions
from syringa.engine.loading.loader import load_model
from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.engine.scheduling.oom import GOOD_STEPS, MAX_FAILURES, OUT_OF_MEMORY, OOMBackoff, OOMGuard, is_oom
from syringa.engine.scheduling.scheduler_output import ScheduledSequence
from syringa.engine.scheduling.sequence import Sequence as Choice
from syringa.engine.worker.core import EngineCore
from syringa.types import EngineRequest
from tests.engine.conftest import Answers, Driver, request
from tests.engine.gpu.tiny_models import load_tiny_gpu_model
from tests.engine.models.tiny_models import SIZES, save
from tests.engine.scheduling.model_free_engine import sequence
from tests.tiers import slow

GPU = "CUDA out of memory. Tried to allocate 2.00 GiB."
CPU = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."
LIMITS = SchedulerLimits(step_tokens=40, max_running=11)
CACHE = 320  # small, so that sequences are preempted too

Fails = Callable[[str, Sequence[Choice]], bool]
"""Whether a part of a step (`copy`, `start`, `started`, `sample`, `read`) of these sequences fails."""


def items(*counts: int) -> list[ScheduledSequence]:
    return [ScheduledSequence(sequence([1] * count), 0, count) for count in counts]


@pytest.mark.parametrize(
    ("error", "expected_oom"),
    [
        (torch.OutOfMemoryError(GPU), True),
        (RuntimeError(CPU), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_is_oom_and_oom_guard(error: Exception, expected_oom: bool) -> None:
    assert is_oom(error) == expected_oom
    if expected_oom:
        with OOMGuard() as guard:
            raise error
        assert guard.out_of_memory
    else:
        with pytest.raises(type(error)), OOMGuard():
            raise error


def test_oom_guard_releases_what_was_computed() -> None:
    class Large:
        alive = 0

        def __init__(self) -> None:
            Large.alive += 1

        def __del__(self) -> None:
            Large.alive -= 1

    def compute() -> None:
        held = Large()
        raise torch.OutOfMemoryError(GPU + str(held))

    gc.disable()  # the release must not depend on a garbage collection
    try:
        with OOMGuard():
            compute()
        assert Large.alive == 0
    finally:
        gc.enable()


def fail(backoff: OOMBackoff, output: list[ScheduledSequence]) -> list[Sequence]:
    return backoff.record_failure(output, tokens=sum(item.count for item in output), alone=len(output) == 1)


def test_backoff_retries_remaining_sequence_alone() -> None:
    backoff = OOMBackoff(64)
    left, gone = items(1, 5)
    assert backoff.record_failure([left], tokens=6, alone=False) == []
    assert backoff.group == [left.sequence]
    assert backoff.limit == 3
    assert fail(backoff, [left]) == [left.sequence]
    assert backoff.record_failure([], tokens=40, alone=False) == []
    assert backoff.limit == 20
    assert backoff.token_limit(gone.sequence) == 64


def test_backoff_token_limits_grow_again() -> None:
    backoff = OOMBackoff(64)
    (large,) = items(40)
    for _ in range(3):
        fail(backoff, [large])
        large = ScheduledSequence(large.sequence, 0, backoff.token_limit(large.sequence))
    assert backoff.token_limit(large.sequence) == 5
    token_limits = []
    for _ in range(6 * GOOD_STEPS):
        backoff.record_success()
        token_limits.append(backoff.token_limit(large.sequence))
    assert sorted(set(token_limits)) == [5, 10, 20, 40, 64]


def test_backoff_splits_step_until_one_fails_alone() -> None:
    backoff = OOMBackoff(64)
    small, large, middle = items(1, 40, 9)
    assert fail(backoff, [small, large, middle]) == []
    assert backoff.limit == 25
    assert backoff.group == [small.sequence]
    backoff.record_success()
    assert backoff.group == [middle.sequence, large.sequence]
    assert fail(backoff, [middle, large]) == []
    assert backoff.group == [middle.sequence]
    backoff.record_success()
    counts = []
    while not (failed := fail(backoff, [large])):
        assert backoff.group == [large.sequence]
        large = ScheduledSequence(large.sequence, 0, min(40, backoff.token_limit(large.sequence)))
        counts.append(large.count)
    assert failed == [large.sequence]
    assert counts == [20, 10, 5, 2, 1]
    assert backoff.group is None
    assert backoff.limit == 25  # one that failed alone does not limit the others
    assert (backoff.token_limit(small.sequence), backoff.token_limit(middle.sequence)) == (64, 64)
    backoff.forget(large.sequence)
    assert backoff.token_limit(large.sequence) == 64


def test_backoff_fails_sequence_that_cannot_shrink() -> None:
    backoff = OOMBackoff(64)
    (image,) = items(40)
    assert fail(backoff, [image]) == []
    assert fail(backoff, [image]) == [image.sequence]  # its tokens have to be computed together


def test_backoff_limit_grows_again() -> None:
    backoff = OOMBackoff(64)
    fail(backoff, items(20, 20))
    for _ in range(2):
        backoff.record_success()
    limits = []
    for _ in range(3 * GOOD_STEPS):
        backoff.record_success()
        limits.append(backoff.limit)
    assert limits[:: GOOD_STEPS - 1][:3] == [20, 40, 40]
    assert limits[-1] == 64
    fail(backoff, items(1))
    assert backoff.limit == 1


def test_backoff_ends_after_max_failures() -> None:
    """For failures that halving does not resolve."""
    backoff = OOMBackoff(64)
    one = items(1, 2)
    for _ in range(MAX_FAILURES):
        assert fail(backoff, one) == []
    assert fail(backoff, one) == [item.sequence for item in one]


# The engine


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: for matrices this small, more would wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    save(folder, AutoConfig.for_model("qwen3", **(SIZES | {"head_dim": 32})))
    return folder


class FaultyRunner:
    """A device that runs out of memory when `fails` says so, before or within a step."""

    def __init__(self, runner: Any, fails: Fails) -> None:
        self._runner, self._fails = runner, fails

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def _check(self, part: str, choices: Sequence[Choice]) -> None:
        if self._fails(part, choices):
            raise torch.OutOfMemoryError(GPU)

    def start(self, step: StepInput) -> Any:
        own = [item.sequence for item in step.scheduled]
        self._check("start", own)
        handle = self._runner.start(step)
        self._check("started", own)
        handle.choices = step.sampled
        return handle

    def resample(self, handle: Any, at: list[int], rows: Any, masks: Any) -> None:
        self._check("sample", [handle.choices[i] for i in at])
        self._runner.resample(handle, at, rows, masks)

    def copy_tokens_to_host(self, handle: Any) -> None:
        self._check("read", handle.choices)
        self._runner.copy_tokens_to_host(handle)


class FaultyModel:
    def __init__(self, model: Any, fails: Fails) -> None:
        self._model, self._fails = model, fails
        self.choices: list[Choice] = []

    def forward(self, step: Any, cache: Any) -> Any:
        if self._fails("start", self.choices):
            raise RuntimeError(CPU)
        logits = self._model.forward(step, cache)
        if self._fails("started", self.choices):
            raise MemoryError
        return logits


def overlap_engine(folder: Path, fails: Fails, **options: Any) -> EngineCore:
    """Return an engine with overlapped execution, as on a GPU, on the reference kernels."""
    core = EngineCore(load_tiny_gpu_model(folder), options.pop("limits", LIMITS), kv_cache_tokens=CACHE, **options)
    assert core.runner
    core.use_runner(FaultyRunner(core.runner, fails))
    _fail_copies(core, fails)
    return core


def sync_engine(folder: Path, fails: Fails, **options: Any) -> EngineCore:
    """Return an engine with synchronous execution, as on a CPU."""
    loaded = load_model(LoadOptions(model=str(folder), dtype="fp32", threads=1, device="cpu"))
    model = FaultyModel(loaded.model, fails)
    limits = options.pop("limits", LIMITS)
    core = EngineCore(dataclasses.replace(loaded, model=model), limits, kv_cache_tokens=CACHE, **options)
    _fail_copies(core, fails)
    schedule, sample = core.scheduler.schedule, core.sampler.sample

    def recording_schedule(**options: Any) -> Any:
        output = schedule(**options)
        model.choices = [item.sequence for item in output.scheduled]
        return output

    def failing_sample(*args: Any) -> Any:
        if fails("sample", model.choices):
            raise RuntimeError(CPU)
        return sample(*args)

    core.scheduler.schedule = recording_schedule  # type: ignore[method-assign]
    core.sampler.sample = failing_sample  # type: ignore[method-assign]
    return core


def _fail_copies(core: EngineCore, fails: Fails) -> None:
    copy = core.cache.copy_blocks

    def copy_blocks(pairs: list[tuple[int, int]]) -> None:
        if pairs and fails("copy", []):
            raise torch.OutOfMemoryError(GPU)
        copy(pairs)

    core.cache.copy_blocks = copy_blocks


Make = Callable[..., EngineCore]
both = pytest.mark.parametrize("make", [overlap_engine, sync_engine])

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_p": 0.8, "top_k": 30},
    {"repetition_penalty": 1.3, "logprobs": 2},
    {"logit_bias": {11: 4.0, 28: -100.0}},
    {"prompt_logprobs": 1},
]


def requests(seed: int) -> list[EngineRequest]:
    rng = random.Random(seed)
    return [
        request(
            str(i),
            [rng.randrange(3, 160) for _ in range(rng.randint(1, 60))],
            seed=i,
            max_tokens=rng.randint(0, 40),
            choices=rng.choice([1, 1, 3]),
            stopping={"ignore_eos": True},
            tenant=rng.choice("ab"),
            use_cache=rng.random() < 0.7,
            **rng.choice(KINDS),
        )
        for i in range(16)
    ]


def play(core: EngineCore, sent: Sequence[EngineRequest]) -> Answers:
    driver = Driver(core)
    driver.submit(*sent)
    answers = driver.finish(60)
    stats = core.stats()
    assert stats.running == stats.waiting == 0
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    assert not core._sequences
    assert not core.scheduler.oom_backoff._token_limits
    if core.runner:
        assert not len(core.runner.input_batch)  # type: ignore[attr-defined]
    core.close()
    return answers


def same(answers: Answers, expected: Answers, but: str = "") -> None:
    assert answers.keys() == expected.keys()
    for key, answer in answers.items():
        if key[0] != but:
            assert (answer.tokens, answer.finish) == (expected[key].tokens, expected[key].finish), key
            scores, others = (each.deltas[0].prompt_logprobs for each in (answer, expected[key]))
            assert (scores is None) == (others is None)
            for ours, theirs in zip(scores or [], others or [], strict=True):
                assert (ours is None) == (theirs is None)
                if ours and theirs:
                    assert (ours.token, ours.logprob) == (theirs.token, pytest.approx(theirs.logprob, abs=1e-3))


def never(part: str, choices: Sequence[Choice]) -> bool:
    return False


@both
@pytest.mark.parametrize("caching", [True, *slow(False)])
@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3)])
def test_random_ooms_do_not_change_tokens(
    folder: Path, make: Make, seed: int, caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise most steps would have the minimum size.
    monkeypatch.setattr("syringa.engine.scheduling.oom.GOOD_STEPS", 4)
    rng = random.Random(seed)
    parts: set[str] = set()

    def fails(part: str, choices: Sequence[Choice]) -> bool:
        # Never for a single sequence, or requests would fail by chance.
        failed = len(choices) != 1 and rng.random() < (0.5 if part == "copy" else 0.06)
        if failed:
            parts.add(part)
        return failed

    sent = requests(seed)
    expected = play(make(folder, never, prefix_caching=caching), sent)
    answers = play(make(folder, fails, prefix_caching=caching), sent)
    assert {"start", "started", "sample"} <= parts
    same(answers, expected)


@both
def test_blocks_of_failed_copies_are_recomputed(folder: Path, make: Make) -> None:
    failures = 0

    def fails(part: str, choices: Sequence[Choice]) -> bool:
        nonlocal failures
        failures += part == "copy"
        return part == "copy" and failures % 2 == 1

    sent = [request(str(i), [7 + i] * 19, seed=i, max_tokens=25, choices=4) for i in range(6)]
    answers = play(make(folder, fails), sent)
    assert failures > 1
    same(answers, play(make(folder, never), sent))


@both
@pytest.mark.parametrize("max_sequences", [3, *slow(1, 12)])
def test_steps_shrink_to_what_fits(folder: Path, make: Make, max_sequences: int) -> None:
    """A step has memory for `max_sequences` sequences at all times."""

    def fails(part: str, choices: Sequence[Choice]) -> bool:
        return part == "start" and len(choices) > max_sequences

    sent = requests(7)
    core = make(folder, fails)
    same(play(core, sent), play(make(folder, never), sent))


@both
def test_long_prompt_is_computed_in_smaller_chunks(folder: Path, make: Make) -> None:
    """A step has memory for six rows at all times."""
    largest: list[int] = []

    def fails(part: str, choices: Sequence[Choice]) -> bool:
        if part != "start":
            return False
        rows = sum(item.count for item in outputs[-1].scheduled)
        if rows <= 6:
            largest.append(rows)
        return rows > 6

    core = make(folder, fails)
    outputs: list[Any] = []
    schedule = core.scheduler.schedule

    def recording_schedule(**options: Any) -> Any:
        outputs.append(schedule(**options))
        return outputs[-1]

    core.scheduler.schedule = recording_schedule  # type: ignore[method-assign]
    sent = requests(5)
    answers = play(core, sent)
    assert max(largest) == 6
    same(answers, play(make(folder, never), sent))


@both
@pytest.mark.parametrize("where", ["started", *slow("start", "sample")])
@pytest.mark.parametrize("choices", [3, *slow(1)])
def test_request_that_never_fits_fails_alone(folder: Path, make: Make, where: str, choices: int) -> None:
    def fails(part: str, choices: Sequence[Choice]) -> bool:
        return part == where and any(choice.request.id == "large" for choice in choices)

    sent = requests(3)
    prompt = [5 + i % 100 for i in range(150)]
    large = request("large", prompt, max_tokens=9, choices=choices, logprobs=1, stopping={"ignore_eos": True})
    sent.insert(4, large)
    expected = play(make(folder, never), sent)
    core = make(folder, fails)
    steps = core.stats().steps
    answers = play(core, sent)
    same(answers, expected, but="large")
    for choice in range(choices):
        (delta,) = answers["large", choice].deltas
        assert (delta.finish, delta.error, delta.error_kind) == ("error", OUT_OF_MEMORY, "out_of_memory")
    assert core.stats().steps - steps < 600


@both
def test_all_requests_fail_without_any_memory(folder: Path, make: Make) -> None:
    answers = play(make(folder, lambda part, choices: part == "start"), requests(1))
    assert {answer.finish for answer in answers.values()} == {"error"}
    assert len(answers) == sum(each.choices for each in requests(1))


@both
def test_step_limit_recovers_when_memory_is_free_again(folder: Path, make: Make) -> None:
    left = 12

    def fails(part: str, choices: Sequence[Choice]) -> bool:
        nonlocal left
        left -= part == "start"
        return part == "start" and left > 0 and len(choices) > 1

    core = make(folder, fails)
    core_limit = core.scheduler.budget
    sent = [request(str(i), [9, i + 3, 4], seed=i, max_tokens=200, stopping={"ignore_eos": True}) for i in range(6)]
    driver = Driver(core)
    driver.submit(*sent)
    driver.step(12)
    assert core.scheduler.oom_backoff.limit < core_limit
    driver.finish()
    assert core.scheduler.oom_backoff.limit == core_limit
    assert all(len(answer.tokens) == 200 for answer in driver.answers.values())
    core.close()


@both
def test_other_errors_are_raised(folder: Path, make: Make) -> None:
    core = make(folder, never)
    core.submit(request("a", [1, 2, 3]))

    def broken(*args: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    if core.runner:
        core.runner.start = broken  # type: ignore[method-assign]
    else:
        core.loaded.model.forward = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        core.step()
    core.close()
