"""Beam search: the algorithm against brute force, and its steps in an engine."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syringa.beam_search import Beam, BeamSearch
from syringa.engine.interface import DeltaHandler
from syringa.errors import EngineOverloaded
from syringa.events import GenerationRequest, GenerationStats
from syringa.generation import run_generation
from syringa.types import EngineDelta, EngineRequest, SamplingParams, StopConditions, TokenLogprobs
from tests.api.chat.helpers import HI
from tests.chat_models import plain_model
from tests.client import client, events
from tests.fake_engine import END, ByteTokenizer, FakeEngine
from tests.tiers import examples

STOP = 0  # the end token of the tiny vocabulary


class TinyModel:
    """A model of a few tokens whose probabilities depend on the whole output."""

    def __init__(self, seed: int, vocab: int) -> None:
        self.seed, self.vocab = seed, vocab

    def logprobs(self, output: tuple[int, ...]) -> list[float]:
        draw = random.Random(f"{self.seed} {output}")
        weights = [draw.random() + 0.01 for _ in range(self.vocab)]
        return [math.log(weight / sum(weights)) for weight in weights]

    def scores(self, output: tuple[int, ...], top: int) -> TokenLogprobs:
        best = sorted(enumerate(self.logprobs(output)), key=lambda pair: (-pair[1], pair[0]))
        return TokenLogprobs(*best[0], best[:top])

    def outputs(self, stopping: StopConditions) -> Iterator[tuple[tuple[int, ...], float]]:
        """Yield all outputs that the stop conditions allow, with their log-probabilities."""
        for length in range(1, stopping.max_tokens + 1):
            for output in itertools.product(range(self.vocab), repeat=length):
                ended = output[-1] == STOP and not stopping.ignore_eos
                if STOP in output[:-1] and not stopping.ignore_eos:
                    continue
                if length < (stopping.min_tokens if ended else stopping.max_tokens):
                    continue
                total = sum(self.logprobs(output[:at])[token] for at, token in enumerate(output))
                yield output, total


def search(model: TinyModel, width: int, length_penalty: float, stopping: StopConditions) -> tuple[list[Beam], int]:
    beams = BeamSearch(width, length_penalty, stopping)
    steps = 0
    while not beams.done:
        beams.expand([model.scores(beam.tokens, beams.alternatives) for beam in beams.beams])
        steps += 1
    return beams.best(), steps


penalties = st.sampled_from([0.0, 1.0, 2.0, -1.0])


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.integers(2, 4),
    max_tokens=st.integers(1, 4),
    min_tokens=st.integers(0, 2),
    length_penalty=penalties,
    ignore_eos=st.booleans(),
)
def test_wide_beam_search_finds_the_best_outputs_of_all(
    seed: int, vocab: int, max_tokens: int, min_tokens: int, length_penalty: float, ignore_eos: bool
) -> None:
    stopping = StopConditions(
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        ignore_eos=ignore_eos,
        end_tokens=frozenset({STOP}),
    )
    model = TinyModel(seed, vocab)
    width = vocab**max_tokens
    found, _ = search(model, width, length_penalty, stopping)
    everything = {output: total / len(output) ** length_penalty for output, total in model.outputs(stopping)}
    assert {beam.tokens for beam in found} == everything.keys()
    ranked = [everything[beam.tokens] for beam in found]
    assert ranked == pytest.approx(sorted(everything.values(), reverse=True))


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 10_000), width=st.integers(1, 3), length_penalty=penalties)
def test_beam_search_that_ends_early_finds_what_one_to_the_end_finds(
    seed: int, width: int, length_penalty: float
) -> None:
    class ToTheEnd(BeamSearch):
        @property
        def done(self) -> bool:
            return len(self.beams[0].tokens) >= 6

    stopping = StopConditions(max_tokens=6, end_tokens=frozenset({STOP}))
    model = TinyModel(seed, 3)
    whole = ToTheEnd(width, length_penalty, stopping)
    while not whole.done:
        whole.expand([model.scores(beam.tokens, whole.alternatives) for beam in whole.beams])
    found, _ = search(model, width, length_penalty, stopping)
    assert [beam.tokens for beam in found] == [beam.tokens for beam in whole.best()]


def test_one_beam_without_end_tokens_is_greedy() -> None:
    model, output = TinyModel(7, 4), ()
    for _ in range(5):
        output += (model.scores(output, 1).token,)
    ((beam,), steps) = search(model, 1, 1.0, StopConditions(max_tokens=5))
    assert (beam.tokens, beam.finish, steps) == (output, "length", 5)


class BeamEngine(FakeEngine):
    """Prefers "ab" and its end; "b" is next, and everything after it is unlikely."""

    def __init__(self) -> None:
        super().__init__()
        self.failing = ""

    async def submit(self, request: EngineRequest, on_delta: DeltaHandler) -> None:
        self.requests.append(request)
        if self.failing and len(self.requests) > 2:
            on_delta(EngineDelta(request.id, 0, finish="error", error=self.failing, error_kind="overload"))
            return
        last = request.prompt[-1]
        likely = {ord("a"): [98, 99], ord("b"): [END, 100]}.get(last, [97, 98])
        top = [(likely[0], -0.1), (likely[1], -2.5), *((token, -9.0) for token in range(1, 200))]
        scores = TokenLogprobs(likely[0], -0.1, top[: request.logprobs])
        prompt = [None] + [TokenLogprobs(each, -1.0) for each in request.prompt[1:]]
        on_delta(
            EngineDelta(
                request.id, 0, [likely[0]], [scores], "length", None, 1,
                prompt if request.prompt_logprobs is not None else None,
            )
        )  # fmt: skip


BODY = {"use_beam_search": True, "n": 2, "max_tokens": 4, "length_penalty": 0}


async def post(body: dict[str, Any], engine: FakeEngine, path: str = "/v1/completions") -> Any:
    async with client(engine, model=plain_model()) as http:
        return await http.post(path, json={"prompt": "hi", "messages": HI} | BODY | body)


async def test_completion_returns_beams_best_first() -> None:
    engine = BeamEngine()
    body = {"return_token_ids": True, "logprobs": 1, "prompt_logprobs": 0, "messages": None}
    whole = (await post(body, engine)).json()
    first, second = whole["choices"]
    assert (first["text"], first["finish_reason"], first["token_ids"]) == ("ab", "stop", [97, 98, END])
    assert (second["text"], second["finish_reason"]) == ("b", "stop")
    assert first["logprobs"]["token_logprobs"] == [-0.1, -0.1, -0.1]
    assert all(len(top) == 1 for top in first["logprobs"]["top_logprobs"])
    assert len(first["prompt_logprobs"]) == 2
    assert whole["usage"]["completion_tokens"] == 5
    assert whole["usage"]["prompt_tokens"] == 2
    assert {request.stopping.max_tokens for request in engine.requests} == {1}
    assert sum(request.prompt_logprobs is not None for request in engine.requests) == 1
    assert len({request.id for request in engine.requests}) == len(engine.requests)


async def test_streamed_beams_equal_the_body() -> None:
    whole = (await post({}, BeamEngine(), "/v1/chat/completions")).json()
    streamed = events((await post({"stream": True}, BeamEngine(), "/v1/chat/completions")).text)[:-1]
    texts = ["", ""]
    for part in (choice for chunk in streamed for choice in chunk["choices"]):
        texts[part["index"]] += part["delta"].get("content", "")
    assert texts == [choice["message"]["content"] for choice in whole["choices"]] == ["ab", "b"]


async def test_beam_search_reports_failures_of_its_steps() -> None:
    engine = BeamEngine()
    engine.failing = "The queue is full."
    assert (await post({}, engine)).status_code == 503


async def test_beam_search_that_fails_counts_the_tokens_of_its_beams() -> None:
    engine, stats = BeamEngine(), GenerationStats()
    engine.failing = "The queue is full."
    request = GenerationRequest(
        id="r",
        prompts=[[1, 2]],
        sampling=SamplingParams(seed=0),
        stopping=StopConditions(max_tokens=4),
        choices=2,
        candidates=2,
        beam_length_penalty=1.0,
    )
    with pytest.raises(EngineOverloaded):
        await run_generation(engine, ByteTokenizer(), request, lambda batch: None, stats)
    assert (stats.prompt_tokens, stats.completion_tokens) == (2, 2)  # the second step failed


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"stop": "x"}, "stop"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"grammar": {"type": "regex", "value": "a"}}, "grammar"),
        ({"best_of": 3}, "best_of"),
    ],
)
async def test_beam_search_refuses_what_it_cannot_honor(body: dict[str, Any], name: str) -> None:
    answer = await post(body, BeamEngine())
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "use_beam_search")
    assert name in answer.json()["error"]["message"]


async def test_beam_search_reports_sampling_fields_as_ignored() -> None:
    answer = await post({"temperature": 0.5, "seed": 1, "messages": None}, BeamEngine())
    assert answer.headers["x-syringa-ignored"] == "temperature, seed"
    answer = await post({"use_beam_search": False, "length_penalty": 1, "messages": None}, FakeEngine("x"))
    assert answer.headers["x-syringa-ignored"] == "length_penalty"
    answer = await post({"repetition_penalty": 1, "frequency_penalty": 0, "messages": None}, BeamEngine())
    assert "x-syringa-ignored" not in answer.headers
