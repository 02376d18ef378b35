"""Overlapped execution samples the same tokens as synchronous execution."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from syringa.engine.execution.batch import build_step_tensors
from syringa.engine.execution.overlap import StepInput
from syringa.engine.sampling.sampler import SampledTokens
from syringa.engine.sampling.sampler_input import SamplingRow
from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.engine.scheduling.sequence import Sequence
from syringa.engine.vision.step_images import locate_images
from syringa.engine.worker.core import EngineCore
from syringa.types import EngineRequest, Grammar, TokenLogprobs
from tests.engine.conftest import Answers, Driver, request
from tests.tiers import slow

pytestmark = pytest.mark.model
Make = Callable[..., EngineCore]
WRONG = 7  # the device's token for a row that needs the host's state


@dataclass
class DeviceStep:
    logits: torch.Tensor
    sample_rows: list[int]
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    copied: list[int] = field(default_factory=list)


class SlowDevice:
    """A device whose tokens the host does not know until they are copied."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.sampled: list[int] = []
        self.max_pending = 0  # largest number of rows in a step whose token only the device knew
        self.live: set[Sequence] = set()

    def start(self, step_input: StepInput) -> DeviceStep:
        step = build_step_tensors(step_input.scheduled, step_input.logit_rows)
        step.images = locate_images(step_input.scheduled, step)
        for row, source in zip(step.row_starts.tolist(), step_input.token_sources.tolist(), strict=False):
            if source >= 0:
                assert step.tokens[row] == -1
                # A row without a sampled token is computed like any other and discarded later, as on a GPU.
                step.tokens[row] = max(self.sampled[source], 0)
        self.max_pending = max(self.max_pending, int((step_input.token_sources >= 0).sum()))
        assert step.tokens.min() >= 0
        self.live |= set(step_input.sampled) | {item.sequence for item in step_input.scheduled}
        logits = self.core.loaded.model.forward(step, self.core.cache)  # type: ignore[arg-type]
        tokens = [WRONG] * len(step_input.sampled)
        device_rows = [(i, s) for i, s in enumerate(step_input.sampled) if not s.needs_host]
        if device_rows:
            at = torch.tensor([step_input.sample_rows[i] for i, _ in device_rows])
            sampled = self.core.sampler.sample(logits[at], [s.sampling_row() for _, s in device_rows])
            for (i, _), token in zip(device_rows, sampled.tokens, strict=True):
                tokens[i] = token
        self.sampled = tokens
        return DeviceStep(logits, step_input.sample_rows, tokens, [None] * len(tokens))

    def resample(self, handle: DeviceStep, at: list[int], rows: list[SamplingRow], masks: torch.Tensor | None) -> None:
        logits = handle.logits[torch.tensor([handle.sample_rows[i] for i in at])]
        sampled = self.core.sampler.sample(logits, rows, masks)
        for i, token, score in zip(at, sampled.tokens, sampled.logprobs, strict=True):
            handle.tokens[i], handle.logprobs[i] = token, score

    def copy_tokens_to_host(self, handle: DeviceStep) -> None:
        handle.copied = list(handle.tokens)

    def read_tokens(self, handle: DeviceStep) -> SampledTokens:
        assert handle.copied
        return SampledTokens(handle.copied, handle.logprobs)

    def forget(self, sequence: Sequence) -> None:
        self.live.discard(sequence)


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_p": 0.8, "top_k": 30},
    {"min_p": 0.1, "temperature": 1.5},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7, "presence_penalty": 0.2},
    {"logit_bias": {11: 4.0, 28: -100.0}},
    {"dry_multiplier": 0.8},
    {"logprobs": 3},
    {"grammar": Grammar("regex", "[a-z]{3}( [a-z]{2,5}){2,4}")},
    {"grammar": Grammar("json_schema", '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}')},
    {"opening": (198, 198)},
    {"prompt_logprobs": 1},
]


def workload(seed: int, texts: list[list[int]], grammars: bool) -> list[tuple[int, EngineRequest | str]]:
    """Return (step, event) pairs: a request to submit, or the id of one to abort."""
    rng = random.Random(seed)
    events: list[tuple[int, EngineRequest | str]] = []
    for i in range(14):
        prompt = rng.choice(texts)[: rng.randint(1, 90)]
        kind = rng.choice([kind for kind in KINDS if grammars or "grammar" not in kind])
        stopping: dict[str, Any] = {"ignore_eos": True}
        if rng.random() < 0.5:
            stopping["stop_tokens"] = frozenset(rng.sample(range(250, 2500), 700))
        if rng.random() < 0.2:
            stopping["min_tokens"] = rng.randint(1, 6)
        at = rng.choice([0, 0, rng.randint(0, 30)])
        events.append(
            (
                at,
                request(
                    str(i),
                    prompt,
                    seed=seed + i,
                    max_tokens=rng.choice([0, 1, 2, *[rng.randint(3, 70)] * 5]),
                    choices=1 if "grammar" in kind else rng.choice([1, 1, 1, 3]),
                    stopping=stopping,
                    tenant=rng.choice("ab"),
                    **kind,
                ),
            )
        )
        if rng.random() < 0.15:
            events.append((at + rng.randint(1, 8), str(i)))
    return sorted(events, key=lambda event: event[0])


def play(core: EngineCore, events: list[tuple[int, EngineRequest | str]]) -> Answers:
    driver = Driver(core)
    for step in range(60):
        for at, event in events:
            if at == step and isinstance(event, EngineRequest):
                core.submit(event)
            elif at == step:
                core.abort(str(event))
        driver.step()
    return driver.finish()


@pytest.mark.parametrize("grammars", [False, True], ids=["plain", "grammars"])
@pytest.mark.parametrize("seed", [0, 1, *slow(2, 3, 4, 5)])
def test_overlapped_steps_sample_the_same_tokens_as_sync_steps(
    engine: Make, tokenizer: Any, seed: int, grammars: bool
) -> None:
    texts = [
        list(tokenizer.encode(text * 6).ids)
        for text in ("It was the best of times, it was the worst of times. ", "1, 2, 3, 4, and then ", "def f(x):\n")
    ]
    events = workload(seed, texts, grammars)
    # A small cache, so that sequences are preempted.
    options: dict[str, Any] = {"limits": SchedulerLimits(step_tokens=48, max_running=9), "kv_cache_tokens": 176}
    plain = play(engine(**options), events)
    core = engine(**options)
    device = SlowDevice(core)
    core.use_runner(device)
    overlapped = play(core, events)
    aborted = {event for _, event in events if isinstance(event, str)}
    assert device.max_pending > 1
    assert plain.keys() - overlapped.keys() <= {key for key in plain if key[0] in aborted}
    for key, answer in overlapped.items():
        if key[0] in aborted:  # how far it got depends on when the abort was processed
            short, long = sorted((answer.tokens, plain[key].tokens), key=len)
            assert long[: len(short)] == short
            continue
        assert answer.tokens == plain[key].tokens, key
        assert answer.finish == plain[key].finish
        assert [s.token for s in answer.logprobs] == [s.token for s in plain[key].logprobs]
        assert answer.deltas[0].prompt_logprobs == plain[key].deltas[0].prompt_logprobs
    stats = core.stats()
    assert not core.busy
    assert stats.running == stats.waiting == 0
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    assert not device.live
    assert stats.preemptions or grammars  # when a grammar is compiled varies
    if not aborted:
        emitted = sum(len(answer.tokens) for answer in overlapped.values())
        assert stats.output_tokens == emitted == sum(len(answer.tokens) for answer in plain.values())


def test_blocks_are_cached_under_their_real_tokens(engine: Make, tokenizer: Any) -> None:
    """Blocks of overlapped steps are found by later requests with the same tokens."""
    prompt = list(tokenizer.encode("A long story, told slowly, about a river and a town. " * 3).ids)
    core = engine()
    core.use_runner(SlowDevice(core))
    driver = Driver(core)
    driver.submit(request("a", prompt, max_tokens=60, stopping={"ignore_eos": True}))
    first = driver.finish()["a", 0].tokens
    longer = prompt + first + [5]
    driver.submit(request("b", longer, max_tokens=6, temperature=0.0))
    again = driver.finish()["b", 0]
    # All full blocks; the last token was never computed.
    assert again.deltas[0].cached_tokens == (len(prompt) + 59) // 16 * 16
    fresh = Driver(engine(prefix_caching=False))
    fresh.submit(request("b", longer, max_tokens=6, temperature=0.0))
    assert fresh.finish()["b", 0].tokens == again.tokens


def test_choice_at_max_tokens_is_not_computed_further(engine: Make, tokenizer: Any) -> None:
    core = engine()
    device = SlowDevice(core)
    core.use_runner(device)
    driver = Driver(core)
    driver.submit(request("a", list(tokenizer.encode("Hello").ids), max_tokens=3, stopping={"ignore_eos": True}))
    driver.finish()
    assert len(driver.answers["a", 0].tokens) == 3
    assert core.stats().steps == 4  # the last one only reads


def test_abort_of_in_flight_request_emits_nothing_more(engine: Make, tokenizer: Any) -> None:
    core = engine()
    core.use_runner(SlowDevice(core))
    driver = Driver(core)
    driver.submit(request("a", list(tokenizer.encode("Hello").ids), max_tokens=30, choices=2))
    driver.step(3)
    emitted = {key: len(answer.tokens) for key, answer in driver.answers.items()}
    assert emitted == {("a", 0): 2, ("a", 1): 2}
    core.abort("a")
    assert core.busy
    driver.finish()
    assert {key: len(answer.tokens) for key, answer in driver.answers.items()} == emitted
    assert core.stats().blocks_free + core.stats().blocks_cached == core.stats().blocks_total


def test_suspects_are_alone_on_the_device(engine: Make, tokenizer: Any) -> None:
    prompts = {name: tokenizer.encode(f"{name} is the").ids for name in ("Paris", "Rome", "Oslo", "Bern")}

    def play_suspects(core: EngineCore) -> tuple[list[list[bytes]], Answers]:
        running: list[list[bytes]] = []
        core.record_running = lambda fingerprints: running.append(sorted(set(fingerprints)))
        driver = Driver(core)
        for number, (name, prompt) in enumerate(prompts.items()):
            isolation = "start" if number > 1 else "none"
            core.submit(request(name, prompt, max_tokens=9, fingerprint=name.encode(), isolation=isolation))
            driver.step(2 if number == 1 else 0)
        return running, driver.finish()

    core = engine()
    core.use_runner(SlowDevice(core))
    running, answers = play_suspects(core)
    seen = [b"".join(each) for each in running]
    others, oslo, bern, together = b"ParisRome", b"Oslo", b"Bern", b"BernOsloParisRome"
    assert seen[: seen.index(together)] == [others, others, others, oslo, oslo, oslo, bern, bern]
    expected = play_suspects(engine())[1]
    assert {key: answer.tokens for key, answer in answers.items()} == {
        key: answer.tokens for key, answer in expected.items()
    }
