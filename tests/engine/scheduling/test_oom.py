"""Steps that find too little memory are undone and made smaller: nobody's tokens change, and no block is lost."""

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

from syringa.engine.execution.overlap import Layout
from syringa.engine.loading.loader import LoadOptions, load_model
from syringa.engine.scheduling.oom import GOOD_STEPS, MOST_FAILURES, TOO_LARGE, Attempt, Relief, is_shortage
from syringa.engine.scheduling.scheduler import Limits
from syringa.engine.scheduling.scheduler_output import Scheduled
from syringa.engine.scheduling.sequence import Sequence as Choice
from syringa.engine.worker.core import EngineCore
from syringa.types import EngineRequest
from tests.engine.conftest import Answers, Driver, request
from tests.engine.gpu.small_gpu import load_small
from tests.engine.models.small import SIZES, save
from tests.engine.scheduling.builders import sequence

GPU = "CUDA out of memory. Tried to allocate 2.00 GiB."
CPU = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."
LIMITS = Limits(step_tokens=40, max_running=11)
CACHE = 320  # tight, so that sequences are sent back for want of blocks, too

Fails = Callable[[str, Sequence[Choice]], bool]
"""Whether this part of a step (`copy`, `start`, `started`, `draw`, `send`) fails, which is done for those."""


def items(*counts: int) -> list[Scheduled]:
    return [Scheduled(sequence([1] * count), 0, count) for count in counts]


@pytest.mark.parametrize(
    ("error", "short"),
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
def test_what_a_shortage_is(error: Exception, short: bool) -> None:
    assert is_shortage(error) == short
    if short:
        with Attempt() as attempt:
            raise error
        assert attempt.short
    else:
        with pytest.raises(type(error)), Attempt():
            raise error


def test_what_was_computed_is_let_go() -> None:
    class Large:
        alive = 0

        def __init__(self) -> None:
            Large.alive += 1

        def __del__(self) -> None:
            Large.alive -= 1

    def compute() -> None:
        held = Large()
        raise torch.OutOfMemoryError(GPU + str(held))

    gc.disable()  # nothing may depend on a collection
    try:
        with Attempt():
            compute()
        assert Large.alive == 0
    finally:
        gc.enable()


def fail(relief: Relief, plan: list[Scheduled]) -> list[Sequence]:
    return relief.failed(plan, tokens=sum(item.count for item in plan), alone=len(plan) == 1)


def test_who_is_left_of_a_step_has_not_failed_alone() -> None:
    relief = Relief(64)
    left, gone = items(1, 5)
    assert relief.failed([left], tokens=6, alone=False) == []
    assert relief.group == [left.sequence]
    assert relief.limit == 3
    assert fail(relief, [left]) == [left.sequence]
    assert relief.failed([], tokens=40, alone=False) == []
    assert relief.limit == 20
    assert relief.share(gone.sequence) == 64


def test_shares_grow_again() -> None:
    relief = Relief(64)
    (large,) = items(40)
    for _ in range(3):
        fail(relief, [large])
        large = Scheduled(large.sequence, 0, relief.share(large.sequence))
    assert relief.share(large.sequence) == 5
    shares = []
    for _ in range(6 * GOOD_STEPS):
        relief.went_well()
        shares.append(relief.share(large.sequence))
    assert sorted(set(shares)) == [5, 10, 20, 40, 64]


def test_a_step_is_taken_apart_until_one_fails_alone() -> None:
    relief = Relief(64)
    small, large, middle = items(1, 40, 9)
    assert fail(relief, [small, large, middle]) == []
    assert relief.limit == 25
    assert relief.group == [small.sequence]
    relief.went_well()
    assert relief.group == [middle.sequence, large.sequence]
    assert fail(relief, [middle, large]) == []
    assert relief.group == [middle.sequence]
    relief.went_well()
    counts = []
    while not (given_up := fail(relief, [large])):
        assert relief.group == [large.sequence]
        large = Scheduled(large.sequence, 0, min(40, relief.share(large.sequence)))
        counts.append(large.count)
    assert given_up == [large.sequence]
    assert counts == [20, 10, 5, 2, 1]
    assert relief.group is None
    assert relief.limit == 25  # what one did alone says nothing of the others
    assert (relief.share(small.sequence), relief.share(middle.sequence)) == (64, 64)
    relief.forget(large.sequence)
    assert relief.share(large.sequence) == 64


def test_what_cannot_be_made_smaller_is_given_up() -> None:
    relief = Relief(64)
    (image,) = items(40)
    assert fail(relief, [image]) == []
    assert fail(relief, [image]) == [image.sequence]  # as many tokens again: they belong together


def test_steps_grow_again() -> None:
    relief = Relief(64)
    fail(relief, items(20, 20))
    for _ in range(2):
        relief.went_well()
    limits = []
    for _ in range(3 * GOOD_STEPS):
        relief.went_well()
        limits.append(relief.limit)
    assert limits[:: GOOD_STEPS - 1][:3] == [20, 40, 40]
    assert limits[-1] == 64
    fail(relief, items(1))
    assert relief.limit == 1


def test_failures_come_to_an_end() -> None:
    """Whatever it is that does not get better by halving."""
    relief = Relief(64)
    one = items(1, 2)
    for _ in range(MOST_FAILURES):
        assert fail(relief, one) == []
    assert fail(relief, one) == [item.sequence for item in one]


# The engine


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More of them would wait for one another, for matrices this small."""
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
    """A device that has too little memory when `fails` says so: before a step, or in the midst of it."""

    def __init__(self, runner: Any, fails: Fails) -> None:
        self._runner, self._fails = runner, fails

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def _check(self, part: str, choices: Sequence[Choice]) -> None:
        if self._fails(part, choices):
            raise torch.OutOfMemoryError(GPU)

    def start(self, layout: Layout) -> Any:
        own = [item.sequence for item in layout.items]
        self._check("start", own)
        running = self._runner.start(layout)
        self._check("started", own)
        running.choices = layout.draws
        return running

    def draw(self, running: Any, at: list[int], rows: Any, masks: Any) -> None:
        self._check("draw", [running.choices[i] for i in at])
        self._runner.draw(running, at, rows, masks)

    def send(self, running: Any) -> None:
        self._check("send", running.choices)
        self._runner.send(running)


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


def ahead(folder: Path, fails: Fails, **options: Any) -> EngineCore:
    """The engine of a GPU, on the kernels' references."""
    core = EngineCore(load_small(folder), options.pop("limits", LIMITS), kv_cache_tokens=CACHE, **options)
    assert core.ahead
    core.look_ahead(FaultyRunner(core.ahead.runner, fails))
    _fail_copies(core, fails)
    return core


def stepwise(folder: Path, fails: Fails, **options: Any) -> EngineCore:
    """That of a CPU."""
    loaded = load_model(LoadOptions(model=str(folder), dtype="fp32", threads=1, device="cpu"))
    model = FaultyModel(loaded.model, fails)
    limits = options.pop("limits", LIMITS)
    core = EngineCore(dataclasses.replace(loaded, model=model), limits, kv_cache_tokens=CACHE, **options)
    _fail_copies(core, fails)
    schedule, sample = core.scheduler.schedule, core.sampler.sample

    def observed() -> Any:
        plan = schedule()
        model.choices = [item.sequence for item in plan.items]
        return plan

    def draw(*args: Any) -> Any:
        if fails("draw", model.choices):
            raise RuntimeError(CPU)
        return sample(*args)

    core.scheduler.schedule = observed  # type: ignore[method-assign]
    core.sampler.sample = draw  # type: ignore[method-assign]
    return core


def _fail_copies(core: EngineCore, fails: Fails) -> None:
    copy = core.cache.copy_blocks

    def attempt(pairs: list[tuple[int, int]]) -> None:
        if pairs and fails("copy", []):
            raise torch.OutOfMemoryError(GPU)
        copy(pairs)

    core.cache.copy_blocks = attempt


Make = Callable[..., EngineCore]
both = pytest.mark.parametrize("make", [ahead, stepwise])

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
    assert not core.scheduler.relief._shares
    if core.ahead:
        assert not len(core.ahead.runner.lanes)  # type: ignore[attr-defined]
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
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_shortages_at_random_change_nobodys_tokens(
    folder: Path, make: Make, seed: int, caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syringa.engine.scheduling.oom.GOOD_STEPS", 4)  # or most steps would be as small as can be
    rng = random.Random(seed)
    parts: set[str] = set()

    def fails(part: str, choices: Sequence[Choice]) -> bool:
        # Never for one alone, or some would be given up by bad luck.
        failed = len(choices) != 1 and rng.random() < (0.5 if part == "copy" else 0.06)
        if failed:
            parts.add(part)
        return failed

    sent = requests(seed)
    expected = play(make(folder, never, prefix_caching=caching), sent)
    answers = play(make(folder, fails, prefix_caching=caching), sent)
    assert {"start", "started", "draw"} <= parts
    same(answers, expected)


@both
def test_blocks_that_could_not_be_copied_are_computed_again(folder: Path, make: Make) -> None:
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
@pytest.mark.parametrize("most", [1, 3, 12])
def test_steps_shrink_to_what_there_is_room_for(folder: Path, make: Make, most: int) -> None:
    """Memory for so many sequences in a step, and no more, for as long as it takes."""

    def fails(part: str, choices: Sequence[Choice]) -> bool:
        return part == "start" and len(choices) > most

    sent = requests(7)
    core = make(folder, fails)
    same(play(core, sent), play(make(folder, never), sent))


@both
def test_memory_for_few_rows(folder: Path, make: Make) -> None:
    """A prompt that is too long for a step is computed in shorter ones."""
    largest: list[int] = []

    def fails(part: str, choices: Sequence[Choice]) -> bool:
        if part != "start":
            return False
        rows = sum(item.count for item in plans[-1].items)
        if rows <= 6:
            largest.append(rows)
        return rows > 6

    core = make(folder, fails)
    plans: list[Any] = []
    schedule = core.scheduler.schedule

    def observed() -> Any:
        plans.append(schedule())
        return plans[-1]

    core.scheduler.schedule = observed  # type: ignore[method-assign]
    sent = requests(5)
    answers = play(core, sent)
    assert max(largest) == 6
    same(answers, play(make(folder, never), sent))


@both
@pytest.mark.parametrize("where", ["start", "started", "draw"])
@pytest.mark.parametrize("choices", [1, 3])
def test_a_request_that_never_fits_fails_alone(folder: Path, make: Make, where: str, choices: int) -> None:
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
        assert (delta.finish, delta.error, delta.fault) == ("error", TOO_LARGE, "overload")
    assert core.stats().steps - steps < 600


@both
def test_without_any_memory_everybody_is_told(folder: Path, make: Make) -> None:
    answers = play(make(folder, lambda part, choices: part == "start"), requests(1))
    assert {answer.finish for answer in answers.values()} == {"error"}
    assert len(answers) == sum(each.choices for each in requests(1))


@both
def test_memory_comes_back(folder: Path, make: Make) -> None:
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
    assert core.scheduler.relief.limit < core_limit
    driver.finish()
    assert core.scheduler.relief.limit == core_limit
    assert all(len(answer.tokens) == 200 for answer in driver.answers.values())
    core.close()


@both
def test_other_errors_are_not_hidden(folder: Path, make: Make) -> None:
    core = make(folder, never)
    core.submit(request("a", [1, 2, 3]))

    def broken(*args: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    if core.ahead:
        core.ahead.runner.start = broken  # type: ignore[method-assign]
    else:
        core.loaded.model.forward = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        core.step()
    core.close()
