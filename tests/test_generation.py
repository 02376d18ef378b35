from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from syringa.errors import EngineError, EngineOverloaded, EngineUnavailable, InvalidRequest, SyringaError
from syringa.events import Event, Finished, GenerationRequest, GenerationStats, PromptScored, TextDelta, Usage
from syringa.generation import cache_key, run_generation, stream_events
from syringa.output.collect import CollectedGeneration, collect
from syringa.types import EngineDelta, EngineRequest, ErrorKind, SamplingParams, StopConditions
from tests.client import eventually
from tests.fake_engine import END, ByteTokenizer, FakeEngine, score


def request(prompts: int = 1, max_tokens: int = 50, **kwargs: object) -> GenerationRequest:
    given: dict = {"sampling": SamplingParams(seed=1), "stopping": StopConditions(max_tokens=max_tokens)}
    given |= {"id": "r", "prompts": [[104, 105]] * prompts} | kwargs
    given.setdefault("candidates", given.get("choices", 1))
    return GenerationRequest(**given)


async def collect_events(events: AsyncGenerator[Event]) -> list[Event]:
    return [event async for event in events]


async def run(engine: FakeEngine, asked: GenerationRequest) -> CollectedGeneration:
    return collect(await collect_events(stream_events(engine, ByteTokenizer(), asked)))


def test_cache_key_is_unambiguous() -> None:
    owners: list[tuple[str | None, str | None]] = [
        *[("a", "bc"), ("ab", "c"), ("abc", None), ("abc", ""), ("", "abc"), (None, "abc"), ("null", "abc")],
        *[(None, None), ("", None), (None, ""), ("", ""), ('a","b', "c"), ("a", 'b","c'), ("a\0b", None), ("a", "\0b")],
    ]
    keys = [cache_key(*each) for each in owners]
    assert len(set(keys)) == len(keys)
    assert keys == [cache_key(*each) for each in owners]
    assert {len(key) for key in keys} == {16}  # at most 64: it is the key of a keyed hash


@pytest.mark.parametrize("share", [False, True])
async def test_generation_sends_cache_key_of_tenant_and_salt(share: bool) -> None:
    engine = FakeEngine("x")
    asked = request(prompts=3, tenant="a", cache_salt="b")
    await run_generation(engine, ByteTokenizer(), asked, lambda _: None, GenerationStats(), share_cache=share)
    assert {each.cache_key for each in engine.requests} == {cache_key(None if share else "a", "b")}
    assert {each.tenant for each in engine.requests} == {"a"}  # fairness does not depend on sharing


async def test_end_token_is_counted_but_not_shown() -> None:
    whole = await run(FakeEngine("hello"), request())
    assert [(choice.text, choice.reason) for choice in whole.choices] == [("hello", "stop")]
    assert whole.usage == Usage(prompt_tokens=2, completion_tokens=6, cached_tokens=1)


async def test_generation_ends_at_max_tokens() -> None:
    whole = await run(FakeEngine("hello"), request(max_tokens=3))
    assert (whole.choices[0].text, whole.choices[0].reason) == ("hel", "length")
    assert whole.usage.completion_tokens == 3


@pytest.mark.parametrize("at_once", [1, 2, 5, 20])
async def test_tokens_after_a_stop_string_are_neither_shown_nor_counted(at_once: int) -> None:
    engine = FakeEngine("hello, world and more", at_once=at_once)
    whole = await run(engine, request(stop=("wor", "more"), logprobs=0))
    assert whole.choices[0].text == "hello, "
    assert "".join(chr(token.scores.token) for token in whole.choices[0].tokens) == "hello, "
    assert whole.usage.completion_tokens == len("hello, wor")
    assert not engine.running


@pytest.mark.parametrize("at_once", [1, 3, 20])
async def test_stop_strings_are_ignored_before_min_tokens(at_once: int) -> None:
    engine = FakeEngine("a.b.é.c.d", at_once=at_once)
    whole = await run(engine, request(stop=(".",), stopping=StopConditions(max_tokens=50, min_tokens=5), logprobs=0))
    assert whole.choices[0].text == "a.b.é"
    assert whole.usage.completion_tokens == len("a.b.é.".encode())


async def test_stop_string_aborts_only_its_choice() -> None:
    engine = FakeEngine()
    engine.output_tokens = lambda request, choice: [*(b"aXb" if choice else b"abcdefgh"), END]  # type: ignore[method-assign]
    whole = await run(engine, request(choices=3, stop=("X",)))
    assert [choice.text for choice in whole.choices] == ["abcdefgh", "a", "a"]
    assert engine.aborted == [("r", 1), ("r", 2)]
    assert whole.usage.completion_tokens == 9 + 2 + 2


async def test_incomplete_characters_are_not_emitted() -> None:
    seen = await collect_events(stream_events(FakeEngine("é😀"), ByteTokenizer(), request(logprobs=1)))
    texts = [(event.text, [token.offset for token in event.tokens]) for event in seen if isinstance(event, TextDelta)]
    assert texts == [("é", [0, 0]), ("😀", [1, 1, 1, 1]), ("", [2])]


async def test_character_truncated_by_max_tokens() -> None:
    whole = await run(FakeEngine("a😀"), request(max_tokens=3))
    assert whole.choices[0].text == "a\ufffd"


async def test_choices_are_numbered_prompt_major_and_differ() -> None:
    whole = await run(FakeEngine(), request(prompts=3, choices=2))
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert whole.choices[0].text == whole.choices[2].text != whole.choices[1].text
    assert whole.usage.prompt_tokens == 6


async def test_prompt_logprobs_precede_text() -> None:
    seen = await collect_events(stream_events(FakeEngine("x"), ByteTokenizer(), request(choices=2, prompt_logprobs=1)))
    assert seen[0] == PromptScored(0, [None, score(105, 1)])
    assert sum(isinstance(event, PromptScored) for event in seen) == 1


async def test_late_prompt_logprobs_hold_back_text() -> None:
    engine = FakeEngine()

    async def deltas(asked: object):
        yield EngineDelta("r", 1, [97], finish="length")
        yield EngineDelta("r", 0, [98], finish="length", prompt_logprobs=[None])

    engine.deltas = deltas  # type: ignore[method-assign]
    seen = await collect_events(stream_events(engine, ByteTokenizer(), request(choices=2, prompt_logprobs=0)))
    assert [type(event) for event in seen[:2]] == [PromptScored, TextDelta]
    assert [event.choice for event in seen if isinstance(event, Finished)] == [1, 0]


async def test_best_of_returns_the_likeliest_candidates() -> None:
    engine = FakeEngine()
    texts = [b"zz", b"bb", b"cc"]  # the fake log-probability is -token / 64
    engine.output_tokens = lambda request, choice: list(texts[choice])  # type: ignore[method-assign]
    whole = await run(engine, request(prompts=2, choices=2, candidates=3))
    assert [choice.text for choice in whole.choices] == ["bb", "cc"] * 2
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.usage.completion_tokens == 12
    assert not whole.choices[0].tokens


async def test_closing_the_stream_aborts_the_request() -> None:
    engine = FakeEngine("hello", delay=0.001)
    async with contextlib.aclosing(stream_events(engine, ByteTokenizer(), request())) as events:
        await anext(events)
    assert engine.aborted == [("r", None)]
    assert not engine.running


async def test_cancellation_aborts_every_prompt() -> None:
    engine = FakeEngine("hello")
    engine.pause()
    task = asyncio.create_task(run(engine, request(prompts=3, choices=2)))
    assert await eventually(lambda: len(engine.running) == 6)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not engine.running
    assert {name for name, _ in engine.aborted} == {"r-0", "r-1", "r-2"}


@pytest.mark.parametrize("prompts", [1, 3])
@pytest.mark.parametrize("error_kind", [EngineOverloaded("full"), EngineUnavailable("died")])
async def test_engine_errors_are_raised(error_kind: Exception, prompts: int) -> None:
    engine = FakeEngine("hello")
    engine.fail = error_kind
    with pytest.raises(type(error_kind)):
        await run(engine, request(prompts=prompts))
    assert not engine.running


@pytest.mark.parametrize(
    ("error_kind", "kind"),
    [
        ("engine", EngineError),
        ("grammar", InvalidRequest),
        ("overload", EngineOverloaded),
        ("unavailable", EngineUnavailable),
    ],
)
async def test_failed_choice_fails_the_request(error_kind: ErrorKind, kind: type[SyringaError]) -> None:
    engine = FakeEngine()

    async def deltas(asked: object):
        yield EngineDelta("r", 0, [97])
        yield EngineDelta("r", 0, finish="error", error="it broke", error_kind=error_kind)

    engine.deltas = deltas  # type: ignore[method-assign]
    with pytest.raises(kind, match="it broke"):
        await run(engine, request())


async def test_engine_that_ends_early_is_an_error() -> None:
    engine = FakeEngine()

    async def deltas(asked: object):
        yield EngineDelta("r", 0, [97])

    engine.deltas = deltas  # type: ignore[method-assign]
    with pytest.raises(EngineUnavailable):
        await run(engine, request())


async def test_concurrent_prompts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syringa.generation.MAX_CONCURRENT_PROMPTS", 4)
    engine = FakeEngine("hello", delay=0.001)
    most = 0
    deltas = engine.deltas

    async def counted(asked: EngineRequest) -> AsyncGenerator[EngineDelta]:
        nonlocal most
        async with contextlib.aclosing(deltas(asked)) as inner:
            async for delta in inner:
                most = max(most, len(engine.running))
                yield delta

    engine.deltas = counted  # type: ignore[method-assign]
    whole = await run(engine, request(prompts=30))
    assert [choice.text for choice in whole.choices] == ["hello"] * 30
    assert whole.usage.completion_tokens == 30 * 6
    assert most == 4
    engine.fail = EngineUnavailable("it died")
    with pytest.raises(EngineUnavailable):
        await run(engine, request(prompts=30))
    assert not engine.running


@pytest.mark.parametrize(("tokens", "cut"), [(3, True), (6, False)])
@pytest.mark.parametrize("choices", [1, 2])
async def test_stats_report_truncation(tokens: int, cut: bool, choices: int) -> None:
    stats = GenerationStats()
    asked = request(max_tokens=tokens, choices=choices)
    await run_generation(FakeEngine("hello"), ByteTokenizer(), asked, lambda events: None, stats)
    assert stats.truncated is cut
