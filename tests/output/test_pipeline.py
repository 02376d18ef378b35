"""The whole pipeline: reasoning, tool calls, stop strings, log-probabilities and token counts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syringa.events import Finished, OutputFormat, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from syringa.output.collect import CollectedChoice, collect
from syringa.output.pipeline import Pipeline
from syringa.types import EngineDelta, TokenLogprobs
from tests.fake_engine import END, START, ByteTokenizer

BOTH = OutputFormat(reasoning="think", tool_calls="hermes")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "END"}}\n</tool_call>'
WHOLE = f"<think>\nEND it?\n</think>\n\nWell.\n{CALL}"


def run(text: str, finish: Any = "stop", *, at_once: int = 1, **kwargs: Any) -> tuple[CollectedChoice, Pipeline, list]:
    pipeline = Pipeline(ByteTokenizer(), 0, **kwargs)
    tokens = list(text.encode())
    events: list[Any] = []
    for at in range(0, len(tokens), at_once):
        some = tokens[at : at + at_once]
        scores = [TokenLogprobs(token, -1.0) for token in some] if kwargs.get("show_tokens") else []
        last = at + at_once >= len(tokens)
        events += pipeline.feed(EngineDelta("r", 0, some, scores, finish if last else None))
        if pipeline.done:
            break
    return collect(events).choices[0], pipeline, events


def calls(choice: CollectedChoice) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in choice.calls]


@pytest.mark.parametrize("at_once", [1, 7, 1000])
def test_pipeline_emits_reasoning_text_and_calls(at_once: int) -> None:
    choice, pipeline, events = run(WHOLE, output=BOTH, at_once=at_once)
    assert (choice.reasoning, choice.text.rstrip()) == ("END it?", "Well.")
    assert calls(choice) == [("f", '{"a": "END"}')]
    assert choice.reason == "tool_calls"
    assert pipeline.tokens == len(WHOLE)
    assert pipeline.reasoning_tokens == len("<think>\nEND it?\n</think>")
    kinds = [type(event) for event in events]
    assert (
        kinds.index(ReasoningDelta) < kinds.index(TextDelta) < kinds.index(ToolCallStart) < kinds.index(ToolCallDelta)
    )
    assert kinds[-1] is Finished


def test_stop_string_applies_to_the_answer_only() -> None:
    choice, _, _ = run(WHOLE, output=BOTH, stop=("END",))
    assert choice.reasoning == "END it?"
    assert calls(choice) == [("f", '{"a": "END"}')]
    assert (choice.text, choice.reason) == ("Well.\n", "tool_calls")
    thought = "<think>\nEND it?\n</think>"
    choice, pipeline, _ = run(f"{thought}Now END here", output=BOTH, stop=("END",))
    assert (choice.reasoning, choice.text, choice.reason) == ("END it?", "Now ", "stop")
    assert pipeline.tokens == len(f"{thought}Now END")
    assert pipeline.reasoning_tokens == len(thought)


@pytest.mark.parametrize("at_once", [1, 7, 1000])
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_pipeline_ends_a_choice_where_text_follows_calls(at_once: int, finish: Any) -> None:
    text = f"{WHOLE}\n{CALL}\n Ünd so on {CALL}"
    choice, pipeline, events = run(
        text, finish, output=BOTH, at_once=at_once, show_tokens=True, report_tokens=True, stop=("so",)
    )
    assert (choice.text, len(choice.calls), choice.reason, choice.stop) == ("Well.\n", 2, "tool_calls", None)
    assert bytes(choice.token_ids).decode() == f"{WHOLE}\n{CALL}"
    assert pipeline.tokens == len(choice.token_ids)
    assert len(choice.tokens) == pipeline.tokens - pipeline.reasoning_tokens
    assert isinstance(events[-1], Finished)


def test_pipeline_counts_no_end_token_after_text_that_follows_calls() -> None:
    pipeline = Pipeline(ByteTokenizer(), 0, output=BOTH)
    events = pipeline.feed(EngineDelta("r", 0, [*f"{CALL} So.".encode(), END], [], "stop", END))
    assert pipeline.tokens == len(CALL)
    assert events[-1] == Finished(0, "tool_calls")


def test_partial_stop_string_before_a_call_is_text() -> None:
    choice, _, _ = run(f"The EN{CALL}", output=BOTH, stop=("END",))
    assert choice.text == "The EN"
    assert len(choice.calls) == 1


def test_truncated_reasoning() -> None:
    choice, pipeline, _ = run("<think>Let me", "length", output=BOTH)
    assert (choice.reasoning, choice.text, choice.reason) == ("Let me", "", "length")
    assert pipeline.reasoning_tokens == pipeline.tokens == 13


def test_reasoning_opened_by_the_prompt() -> None:
    choice, _, _ = run("hm</think>yes", output=OutputFormat(reasoning="think", reasoning_open=True))
    assert (choice.reasoning, choice.text) == ("hm", "yes")


def test_logprobs_cover_the_answer_only() -> None:
    choice, pipeline, _ = run("<think>hm</think>yes", output=BOTH, show_tokens=True)
    assert bytes(token.scores.token for token in choice.tokens) == b"yes"
    assert [token.offset for token in choice.tokens] == [0, 1, 2]
    assert pipeline.tokens == 20


def test_stop_strings_are_ignored_before_min_tokens() -> None:
    choice, _, _ = run("aXbXc", stop=("X",), min_tokens=3)
    assert choice.text == "aXb"


def test_harmony_output_through_the_pipeline() -> None:
    text = "<|channel|>analysis<|message|>END?<|end|><|start|>assistant<|channel|>final<|message|>So END it"
    choice, _, _ = run(text, output=OutputFormat(reasoning="harmony", tool_calls="harmony"), stop=("END",))
    assert (choice.reasoning, choice.text, choice.reason) == ("END?", "So ", "stop")


@given(st.text('<think>/ {}EN"abc\n', max_size=40), st.integers(1, 9), st.booleans())
def test_pipeline_is_independent_of_splits(text: str, at_once: int, scored: bool) -> None:
    one, first, _ = run(text + "x", output=BOTH, stop=("EN",), show_tokens=scored)
    many, second, _ = run(text + "x", output=BOTH, stop=("EN",), show_tokens=scored, at_once=at_once)
    assert (one.reasoning, one.text, calls(one), one.tokens) == (many.reasoning, many.text, calls(many), many.tokens)
    assert (first.tokens, first.reasoning_tokens) == (second.tokens, second.reasoning_tokens)


def test_truncated_marker_is_dropped_under_tool_calls_only() -> None:
    output = OutputFormat(tool_calls="hermes", tool_calls_only=True)
    for cut in ("<", "<tool_c", "<tool_call>", CALL[:20]):
        choice, _, _ = run(cut, "length", output=output)
        assert choice.text == ""
    assert calls(run(CALL, output=output)[0]) == [("f", '{"a": "END"}')]


def feed(deltas: list[EngineDelta], **kwargs: Any) -> tuple[CollectedChoice, Pipeline]:
    pipeline = Pipeline(ByteTokenizer(), 0, **kwargs)
    events = [event for delta in deltas for event in pipeline.feed(delta)]
    return collect(events).choices[0], pipeline


def ended_by(token: int) -> list[EngineDelta]:
    return [EngineDelta("r", 0, [*b"ab", START]), EngineDelta("r", 0, [token], finish="stop", stop_token=token)]


@pytest.mark.parametrize(
    ("token", "options", "text", "stop"),
    [
        (END, {}, "ab", None),
        (END, {"include_stop": True}, "ab", None),
        (END, {"show_special": True}, "ab<start>", None),
        (END, {"show_special": True, "include_stop": True}, "ab<start><end>", None),
        (END, {"show_special": True, "include_stop": True, "space_special": True}, "ab<start> <end>", None),
        (99, {"stop_tokens": {99}}, "ab", 99),
        (99, {"stop_tokens": {99}, "include_stop": True}, "abc", 99),
    ],
)
def test_pipeline_ends_at_a_token(token: int, options: dict[str, Any], text: str, stop: int | None) -> None:
    choice, pipeline = feed(ended_by(token), report_tokens=True, **options)
    assert (choice.text, choice.reason, choice.stop) == (text, "stop", stop)
    assert choice.token_ids == [*b"ab", START, token]
    assert pipeline.tokens == 4


@pytest.mark.parametrize("at_once", [1, 3, 100])
@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one END")])
def test_pipeline_includes_the_stop_string_if_asked(include: bool, text: str, at_once: int) -> None:
    choice, pipeline, _ = run(
        "one ENDless", at_once=at_once, stop=("END",), include_stop=include, report_tokens=True, show_tokens=True
    )
    assert (choice.text, choice.reason, choice.stop) == (text, "stop", "END")
    assert choice.token_ids == [*b"one END"]
    assert pipeline.tokens == len(choice.token_ids)
    assert bytes(each.scores.token for each in choice.tokens).decode() == text


@pytest.mark.parametrize("include", [False, True])
def test_pipeline_matches_stop_strings_in_shown_special_tokens(include: bool) -> None:
    deltas = [EngineDelta("r", 0, [token]) for token in (*b"a", START, *b"b")]
    choice, _ = feed(deltas, stop=("art>b",), show_special=True, include_stop=include)
    assert (choice.text, choice.stop) == ("a<start>b" if include else "a<st", "art>b")
    choice, _ = feed(deltas, stop=("<start>",), include_stop=include)
    assert (choice.text, choice.stop) == ("a<start>" if include else "a", "<start>")


@given(st.text("ab<END tol_calx>{}", max_size=40), st.integers(1, 5), st.booleans(), st.booleans())
def test_pipeline_reports_the_ids_of_all_counted_tokens(text: str, at_once: int, include: bool, special: bool) -> None:
    choice, pipeline, _ = run(
        f"{text}x", at_once=at_once, stop=("<", "END"), include_stop=include, show_special=special,
        report_tokens=True, output=BOTH,
    )  # fmt: skip
    assert choice.token_ids == [*f"{text}x".encode()[: pipeline.tokens]]
