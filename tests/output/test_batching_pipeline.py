"""A pipeline that joins the events of several tokens: the same output in fewer events."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from syringa.events import Event, Finished, OutputFormat
from syringa.output.batching_pipeline import BatchingPipeline
from syringa.output.collect import collect
from syringa.output.pipeline import Pipeline
from syringa.types import EngineDelta, TokenLogprobs
from tests.fake_engine import ByteTokenizer

BOTH = OutputFormat(reasoning="think", tool_calls="hermes")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 12345}}\n</tool_call>'
TEXTS = ["hello wörld", f"<think>long thought</think>Well.{CALL}{CALL}", "ab STOP cd", ""]


def run(pipeline: Pipeline, text: str) -> list[list[Event]]:
    """Feed a text byte by byte; return the events of each delta."""
    tokens = list(text.encode())
    batches: list[list[Event]] = []
    for index, token in enumerate(tokens or [32]):
        finish: Any = "stop" if index >= len(tokens) - 1 else None
        batches.append([*pipeline.feed(EngineDelta("r", 0, [token], [TokenLogprobs(token, -1.0)], finish))])
        if pipeline.done:
            break
    return batches


@given(
    text=st.sampled_from(TEXTS) | st.text(max_size=20),
    interval=st.integers(1, 40),
    show=st.booleans(),
    report=st.booleans(),
    output=st.sampled_from([OutputFormat(), BOTH]),
)
def test_joined_events_have_the_same_output(
    text: str, interval: int, show: bool, report: bool, output: OutputFormat
) -> None:
    options: dict[str, Any] = {"stop": ["STOP"], "show_tokens": show, "report_tokens": report, "output": output}
    plain, batching = (
        Pipeline(ByteTokenizer(), 0, **options),
        BatchingPipeline(ByteTokenizer(), 0, interval=interval, **options),
    )
    expected, found = run(plain, text), run(batching, text)
    first, second = (
        collect([event for batch in batches for event in batch]).choices[0] for batches in (expected, found)
    )
    first.events, second.events = [], []
    for choice in (first, second):
        for call in choice.calls:
            call.id = ""
    assert first == second
    assert isinstance(found[-1][-1], Finished)
    assert (plain.tokens, plain.reasoning_tokens) == (batching.tokens, batching.reasoning_tokens)
    assert len(expected) == len(found)  # a stop string ends the choice at the same token


def test_events_are_held_until_the_interval_is_reached() -> None:
    batches = run(BatchingPipeline(ByteTokenizer(), 0, interval=4), "abcdefghij")
    assert [bool(batch) for batch in batches] == [True, *[False] * 3, True, *[False] * 3, True, True]
    assert [getattr(event, "text", "") for batch in batches for event in batch] == ["a", "bcde", "fghi", "j", ""]
