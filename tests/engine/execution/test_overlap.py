"""Steps that are started before the last one's tokens are known give the tokens that steps one by one give."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from syringa.engine.execution.batch import prepare
from syringa.engine.execution.overlap import Layout
from syringa.engine.sampling.sampler import SampledTokens, SamplingRow
from syringa.engine.scheduling.scheduler import Limits
from syringa.engine.scheduling.sequence import Sequence
from syringa.engine.vision.layout import place
from syringa.engine.worker.core import EngineCore
from syringa.types import EngineRequest, Grammar, TokenLogprobs
from tests.engine.conftest import Answers, Driver, request

pytestmark = pytest.mark.model
Make = Callable[..., EngineCore]
WRONG = 7  # what a device that was told too little would draw


@dataclass
class Running:
    logits: torch.Tensor
    places: list[int]
    tokens: list[int]
    scores: list[TokenLogprobs | None]
    home: list[int] = field(default_factory=list)


class SlowDevice:
    """A device whose tokens are known to it alone until they are sent."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.drawn: list[int] = []
        self.most = 0  # rows whose token only the device knew, in one step
        self.live: set[Sequence] = set()

    def start(self, layout: Layout) -> Running:
        step = prepare(layout.items, layout.wanted)
        step.pictures = place(layout.items, step)
        for row, source in zip(step.starts.tolist(), layout.sources.tolist(), strict=False):
            if source >= 0:
                assert step.tokens[row] == -1
                step.tokens[row] = self.drawn[source]
        self.most = max(self.most, int((layout.sources >= 0).sum()))
        assert step.tokens.min() >= 0
        self.live |= set(layout.draws) | {item.sequence for item in layout.items}
        logits = self.core.loaded.model.forward(step, self.core.cache)  # type: ignore[arg-type]
        tokens = [WRONG] * len(layout.draws)
        plain = [(i, s) for i, s in enumerate(layout.draws) if not s.needs_host]
        if plain:
            at = torch.tensor([layout.places[i] for i, _ in plain])
            drawn = self.core.sampler.sample(logits[at], [s.sampling_row() for _, s in plain])
            for (i, _), token in zip(plain, drawn.tokens, strict=True):
                tokens[i] = token
        self.drawn = tokens
        return Running(logits, layout.places, tokens, [None] * len(tokens))

    def draw(self, running: Running, at: list[int], rows: list[SamplingRow], masks: torch.Tensor | None) -> None:
        logits = running.logits[torch.tensor([running.places[i] for i in at])]
        drawn = self.core.sampler.sample(logits, rows, masks)
        for i, token, score in zip(at, drawn.tokens, drawn.logprobs, strict=True):
            running.tokens[i], running.scores[i] = token, score

    def send(self, running: Running) -> None:
        running.home = list(running.tokens)

    def read(self, running: Running) -> SampledTokens:
        assert running.home
        return SampledTokens(running.home, running.scores)

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
    """What happens at which step: requests come, and some are given up."""
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
@pytest.mark.parametrize("seed", range(6))
def test_tokens_are_the_same_as_one_step_at_a_time(engine: Make, tokenizer: Any, seed: int, grammars: bool) -> None:
    texts = [
        list(tokenizer.encode(text * 6).ids)
        for text in ("It was the best of times, it was the worst of times. ", "1, 2, 3, 4, and then ", "def f(x):\n")
    ]
    events = workload(seed, texts, grammars)
    # Tight, so that sequences are sent back.
    options: dict[str, Any] = {"limits": Limits(step_tokens=48, max_running=9), "kv_cache_tokens": 176}
    plain = play(engine(**options), events)
    core = engine(**options)
    device = SlowDevice(core)
    core.look_ahead(device)
    ahead = play(core, events)
    given_up = {event for _, event in events if isinstance(event, str)}
    assert device.most > 1
    assert plain.keys() - ahead.keys() <= {key for key in plain if key[0] in given_up}
    for key, answer in ahead.items():
        if key[0] in given_up:  # when it stopped depends on when that was heard
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
    assert stats.preemptions or grammars  # when a grammar is ready is not to be foreseen
    if not given_up:
        told = sum(len(answer.tokens) for answer in ahead.values())
        assert stats.output_tokens == told == sum(len(answer.tokens) for answer in plain.values())


def test_blocks_are_named_for_what_they_hold(engine: Make, tokenizer: Any) -> None:
    """What was drawn ahead of time is found by later requests, and only under its real tokens."""
    prompt = list(tokenizer.encode("A long story, told slowly, about a river and a town. " * 3).ids)
    core = engine()
    core.look_ahead(SlowDevice(core))
    driver = Driver(core)
    driver.submit(request("a", prompt, max_tokens=60, stopping={"ignore_eos": True}))
    first = driver.finish()["a", 0].tokens
    longer = prompt + first + [5]
    driver.submit(request("b", longer, max_tokens=6, temperature=0.0))
    again = driver.finish()["b", 0]
    # All but the block of the last token, which was never computed.
    assert again.deltas[0].cached_tokens == (len(prompt) + 59) // 16 * 16
    fresh = Driver(engine(prefix_caching=False))
    fresh.submit(request("b", longer, max_tokens=6, temperature=0.0))
    assert fresh.finish()["b", 0].tokens == again.tokens


def test_a_choice_that_ends_by_its_length_is_not_computed_further(engine: Make, tokenizer: Any) -> None:
    core = engine()
    device = SlowDevice(core)
    core.look_ahead(device)
    driver = Driver(core)
    driver.submit(request("a", list(tokenizer.encode("Hello").ids), max_tokens=3, stopping={"ignore_eos": True}))
    driver.finish()
    assert len(driver.answers["a", 0].tokens) == 3
    assert core.stats().steps == 4  # the last only reads


def test_an_abort_with_a_draw_under_way_says_nothing_more(engine: Make, tokenizer: Any) -> None:
    core = engine()
    core.look_ahead(SlowDevice(core))
    driver = Driver(core)
    driver.submit(request("a", list(tokenizer.encode("Hello").ids), max_tokens=30, choices=2))
    driver.step(3)
    told = {key: len(answer.tokens) for key, answer in driver.answers.items()}
    assert told == {("a", 0): 2, ("a", 1): 2}
    core.abort("a")
    assert core.busy
    driver.finish()
    assert {key: len(answer.tokens) for key, answer in driver.answers.items()} == told
    assert core.stats().blocks_free + core.stats().blocks_cached == core.stats().blocks_total
