"""Resumed requests in the engine: validation, queueing, isolation, counters and failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from syringa.engine.scheduling import pending
from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.engine.worker.core import EngineCore
from syringa.errors import EngineOverloaded, InvalidRequest
from syringa.types import EngineRequest, Grammar, ResumedChoice
from tests.engine.conftest import Answers, Driver, drive, request
from tests.engine.worker.resuming import choices_of, cut_answer, join_answers, outcome, resume
from tests.engine.worker.tiny_llama import VOCABULARY, tiny_tokenizer

Make = Callable[..., EngineCore]
PROMPT = [3 + i % 50 for i in range(40)]
GRAMMAR = Grammar("regex", "[a-z]{30}")


def resumed(id_: str, tokens: list[int], *, max_tokens: int = 8, **options: Any) -> EngineRequest:
    return request(id_, PROMPT, max_tokens=max_tokens, resumed=(ResumedChoice(tokens),), **options)


def begin_order(driver: Driver) -> list[str]:
    """Return the ids of the requests in the order of their first deltas."""
    order: list[str] = []
    while driver.core.busy or driver.core.stats().waiting:
        driver.step()
        order += [name for name, _ in driver.answers if name not in order]
    return order


def cut_and_resume(each: EngineRequest, answers: Answers, cuts: list[int]) -> tuple[EngineRequest, dict[int, Any]]:
    parts = {choice: cut_answer(answers[each.id, choice], cut) for choice, cut in enumerate(cuts)}
    return resume(each, parts), parts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resumed": (ResumedChoice([1]),)}, "resumes 1 choices and has 2"),
        ({"resumed": (ResumedChoice([1]),) * 3}, "resumes 3 choices and has 2"),
        ({"resumed": (ResumedChoice([1], True), ResumedChoice([], True))}, "All choices .* are finished"),
        ({"resumed": (ResumedChoice([1]), ResumedChoice([1, VOCABULARY]))}, "Choice 1 .* outside the vocabulary"),
        ({"resumed": (ResumedChoice([-1]), ResumedChoice())}, "Choice 0 .* outside the vocabulary"),
        ({"resumed": (ResumedChoice([1] * 8), ResumedChoice())}, "Choice 0 is resumed with 8 tokens; it has 8 at most"),
        (
            {"resumed": (ResumedChoice(), ResumedChoice([1] * 7)), "prompt": [5] * 90},
            "90 tokens and its output 7 .* 96",
        ),
    ],
)
def test_submit_rejects_invalid_resumed_choices(tiny_engine: Make, changes: dict[str, Any], message: str) -> None:
    core = tiny_engine(kv_cache_tokens=96)
    with pytest.raises(InvalidRequest, match=message):
        core.submit(msgspec.structs.replace(request("a", PROMPT, choices=2), **changes))
    assert not core.busy


def test_tokens_of_finished_choices_are_not_validated(tiny_engine: Make) -> None:
    """A finished choice may have any number of tokens: it is not run."""
    choices = (ResumedChoice([1] * 500, True), ResumedChoice([4]))
    answers = drive(tiny_engine(kv_cache_tokens=96), [request("a", PROMPT, choices=2, resumed=choices)])
    assert list(answers) == [("a", 1)]
    assert len(answers["a", 1].tokens) == 7


def test_resumed_tokens_are_computed_but_not_counted(tiny_engine: Make) -> None:
    whole = request("a", PROMPT, choices=3, max_tokens=20, stopping={"ignore_eos": True})
    expected = drive(tiny_engine(), [whole])
    core = tiny_engine()
    again, parts = cut_and_resume(whole, expected, [12, 20, 1])
    answers = drive(core, [again])
    assert {choice for _, choice in answers} == {0, 2}
    for choice in (0, 2):
        assert outcome(join_answers(parts[choice], answers["a", choice])) == outcome(expected["a", choice])
    stats = core.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.output_tokens) == (0, 0, 8 + 19)
    assert (stats.started, stats.queue_seconds) == (0, 0.0)
    assert stats.step_tokens.sum == 2 * len(PROMPT) + 12 + 1 + 7 + 18


def test_resumed_choices_find_the_prompt_in_the_prefix_cache(tiny_engine: Make) -> None:
    whole = request("a", PROMPT, choices=2, max_tokens=20, stopping={"ignore_eos": True})
    core = tiny_engine()
    expected = drive(core, [whole])
    before = core.stats().step_tokens.sum
    again, _ = cut_and_resume(whole, expected, [9, 10])
    answers = drive(core, [again])
    computed = [len(PROMPT) + 9 - 48, len(PROMPT) + 10 - 48]  # of 49 and 50 tokens, three blocks are cached
    assert core.stats().step_tokens.sum - before == sum(computed) + 10 + 9
    assert all(delta.cached_tokens == 0 for answer in answers.values() for delta in answer.deltas)


def test_resumed_request_is_accepted_by_a_full_queue(tiny_engine: Make) -> None:
    core = tiny_engine(SchedulerLimits(max_queue=2, max_running=1))
    driver = Driver(core)
    driver.submit(*(request(name, PROMPT) for name in "ab"))
    driver.submit(resumed("moved", [4, 5]))
    assert core.stats().waiting == 3
    with pytest.raises(EngineOverloaded):
        core.submit(request("c", PROMPT))
    assert begin_order(driver) == ["moved", "a", "b"]


def test_resumed_requests_start_before_waiting_ones_of_their_tenant_in_order(tiny_engine: Make) -> None:
    driver = Driver(tiny_engine(SchedulerLimits(max_running=1)))
    driver.submit(request("running", PROMPT, max_tokens=2), request("urgent", PROMPT, max_tokens=1, priority=-5))
    driver.submit(*(resumed(name, [4], max_tokens=2, priority=9) for name in ("first", "second")))
    driver.submit(request("more urgent", PROMPT, max_tokens=1, priority=-9))
    assert begin_order(driver) == ["first", "second", "more urgent", "urgent", "running"]


def test_resumed_request_does_not_displace_and_is_not_displaced(tiny_engine: Make) -> None:
    core = tiny_engine(SchedulerLimits(max_queue=2, max_running=1))
    driver = Driver(core)
    driver.submit(*(resumed(name, [4], tenant="a") for name in ("m1", "m2", "m3")))
    with pytest.raises(EngineOverloaded):  # tenant "b" has nothing, but only resumed requests could give way
        core.submit(request("b", PROMPT, tenant="b"))
    assert core.take_refused() == []
    assert set(begin_order(driver)) == {"m1", "m2", "m3"}


@pytest.mark.parametrize("options", [{}, {"isolation": "start"}, {"grammar": GRAMMAR}])
def test_resumed_request_is_not_refused_for_waiting_long(
    tiny_engine: Make, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending.PendingRequest, "not_started", True)  # as if all threads were busy
    core = tiny_engine(SchedulerLimits(queue_seconds=1e-9))
    driver = Driver(core)
    tokens = list(tiny_tokenizer().encode("ab").ids) if "grammar" in options else [4]
    driver.submit(resumed("moved", tokens, **options), request("new", PROMPT, **options))
    answers = driver.finish()
    assert [id_ for _, id_, _ in core.take_refused()] == ["new"]
    assert len(answers["moved", 0].tokens) == 8 - len(tokens)


def test_resumed_request_is_prepared_beyond_the_capacity(tiny_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    core = tiny_engine(SchedulerLimits(max_queue=1))
    monkeypatch.setattr(pending.PendingRequest, "done", False)
    core.submit(request("a", PROMPT, grammar=GRAMMAR, tenant="a"))
    for name in ("m1", "m2"):
        core.submit(resumed(name, [4], grammar=GRAMMAR, tenant="a"))
    with pytest.raises(EngineOverloaded):
        core.submit(request("b", PROMPT, grammar=GRAMMAR, tenant="a"))
    core.submit(request("c", PROMPT, grammar=GRAMMAR, tenant="c"))  # displaces the newest that is not resumed
    assert [id_ for _, id_, _ in core.take_refused()] == ["a"]
    with pytest.raises(EngineOverloaded):
        core.submit(request("d", PROMPT, grammar=GRAMMAR, tenant="d"))
    assert core.stats().waiting == 3


def test_output_that_a_grammar_does_not_allow_fails_its_choice(tiny_engine: Make) -> None:
    allowed, wrong = ([*tiny_tokenizer().encode(text).ids] for text in ("xyz", "x9"))
    choices = (ResumedChoice(allowed), ResumedChoice(wrong))
    answers = drive(tiny_engine(), [request("a", PROMPT, choices=2, grammar=GRAMMAR, resumed=choices)])
    assert answers["a", 0].finish == "length"
    (delta,) = answers["a", 1].deltas
    assert (delta.finish, delta.error_kind, delta.tokens) == ("error", "grammar", [])
    assert "grammar cannot go on" in (delta.error or "")


def test_grammar_that_does_not_compile_fails_open_choices_only(tiny_engine: Make) -> None:
    choices = (ResumedChoice([4], True), ResumedChoice([4]), ResumedChoice())
    broken = request("a", PROMPT, choices=3, grammar=Grammar("regex", "(open"), resumed=choices)
    answers = drive(tiny_engine(), [broken])
    assert {key: answer.finish for key, answer in answers.items()} == {("a", 1): "error", ("a", 2): "error"}


def test_abort_of_resumed_choices(tiny_engine: Make) -> None:
    core = tiny_engine()
    driver = Driver(core)
    driver.submit(
        request("a", PROMPT, choices=3, max_tokens=30, resumed=tuple(ResumedChoice([4 + i]) for i in range(3)))
    )
    driver.step(2)
    core.abort("a", 1)
    driver.step(2)
    assert {choice: len(answer.tokens) for (_, choice), answer in driver.answers.items()} == {0: 4, 1: 2, 2: 4}
    core.abort("a")
    stats = core.stats()
    assert not core.busy
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total


@pytest.mark.parametrize("isolation", ["start", "full"])
def test_resumed_suspect_is_computed_alone_choice_by_choice(tiny_engine: Make, isolation: Any) -> None:
    whole = request("moved", PROMPT, choices=2, max_tokens=12, fingerprint=b"moved", stopping={"ignore_eos": True})
    expected = drive(tiny_engine(), [whole])
    again, parts = cut_and_resume(whole, expected, [5, 8])
    core = tiny_engine()
    running: list[list[bytes]] = []
    core.record_running = lambda fingerprints: running.append(sorted(set(fingerprints)))
    driver = Driver(core)
    driver.submit(request("other", PROMPT, max_tokens=40, fingerprint=b"other", stopping={"ignore_eos": True}))
    driver.step(2)
    driver.submit(msgspec.structs.replace(again, isolation=isolation))
    driver.step(2)
    assert running[2:] == [[b"moved"], [b"moved"]]
    assert not choices_of(again, driver.answers)  # their deltas are held until all were alone
    answers = driver.finish()
    for choice, part in parts.items():
        assert outcome(join_answers(part, answers["moved", choice])) == outcome(expected["moved", choice])
    alone = [step for step in running[2:] if step == [b"moved"]]
    together = [step for step in running if step == [b"moved", b"other"]]
    assert (len(alone), bool(together)) == ((2, True) if isolation == "start" else (7 + 4, False))


def test_prompt_logprobs_come_with_the_first_open_choice(tiny_engine: Make) -> None:
    whole = request("a", PROMPT, choices=2, max_tokens=5, prompt_logprobs=2, stopping={"ignore_eos": True})
    expected = drive(tiny_engine(), [whole])["a", 0].deltas[0].prompt_logprobs
    choices = (ResumedChoice([], finished=True), ResumedChoice([4, 5]))
    answers = drive(tiny_engine(), [msgspec.structs.replace(whole, resumed=choices)])
    assert [delta.prompt_logprobs for delta in answers["a", 1].deltas] == [expected, None, None]


def test_resumed_request_ends_at_the_context_length(tiny_engine: Make) -> None:
    core = tiny_engine(kv_cache_tokens=48)
    (answer,) = drive(core, [resumed("a", [4] * 5, max_tokens=1000, stopping={"ignore_eos": True})]).values()
    assert (len(answer.tokens), answer.finish) == (48 - 40 - 5, "length")
