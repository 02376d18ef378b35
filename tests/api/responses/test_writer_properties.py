"""Property tests of the response writer."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from syringa.events import Event, Finished, ReasoningDelta, ScoredToken, TextDelta, ToolCallDelta, ToolCallStart, Usage
from syringa.output.collect import collect
from syringa.types import TokenLogprobs
from tests.api.responses.helpers import context, prepare, rebuild_output, to_json, write_events
from tests.api.responses.test_writer import ADD, SQL
from tests.chat_models import tool_model
from tests.schemas import validate_open_responses, validate_openai
from tests.tiers import examples


def _scored(text: str) -> TextDelta:
    return TextDelta(0, text, [ScoredToken(TokenLogprobs(97, -1.0, []), 0)])


@st.composite
def generations(draw: st.DrawFn) -> list[Event]:
    """Generate reasoning, text and calls in any order, split anywhere."""
    words = st.text('ab\n"é😀\\', min_size=1, max_size=6)
    generated: list[Event] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["think", "text", "scored", "add", "sql"]), max_size=6)):
        if kind == "think":
            generated += [ReasoningDelta(0, each) for each in draw(st.lists(words, min_size=1, max_size=3))]
        elif kind in ("text", "scored"):
            made = _scored if kind == "scored" else lambda text: TextDelta(0, text)
            generated += [made(each) for each in draw(st.lists(words, min_size=1, max_size=3))]
        else:
            generated.append(ToolCallStart(0, calls, f"call_{calls}", kind))
            arguments = msgspec.json.encode({"input": draw(words)}).decode()
            cut = draw(st.integers(0, len(arguments)))
            generated += [ToolCallDelta(0, calls, each) for each in (arguments[:cut], arguments[cut:]) if each]
            calls += 1
    if draw(st.booleans()):
        generated.append(_scored(""))
    return [*generated, Finished(0, draw(st.sampled_from(["stop", "length", "tool_calls"]))), Usage(3, 4, 1, 2)]


@settings(deadline=None, max_examples=examples(150))
@given(generations(), st.booleans(), st.sampled_from([None, 1, 2]), st.booleans())
async def test_writer_stream_equals_body(
    generated: list[Event], sealed: bool, most: int | None, open_mode: bool
) -> None:
    body = {
        "tools": [ADD, ADD | {"name": "sql"} if open_mode else SQL],
        "include": ["reasoning.encrypted_content"] if sealed else [],
        "max_tool_calls": most,
        "top_logprobs": 0,
    }
    request_context = context(open_mode=open_mode)
    streamed, whole = [await prepare(body, model=tool_model(), request_context=request_context) for _ in range(2)]
    events = write_events(streamed, generated)
    for event in events:
        if open_mode:
            validate_open_responses(event, "StreamingEvent")
            validate_openai(event.get("response", events[0]["response"]), "Response")
        else:
            validate_openai(event, "ResponseStreamEvent")
    final = events[-1]["response"]
    assert rebuild_output(events) == final["output"]
    assert final == to_json(streamed.writer.response)
    assert _anonymous(final) == _anonymous(to_json(whole.writer.render(collect(generated))))
    validate_openai(final, "Response")
    calls = [each for each in final["output"] if "call_id" in each]
    assert len(calls) == min(sum(isinstance(each, ToolCallStart) for each in generated), most or 99)


def _anonymous(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response without ids and times."""
    changing = ("id", "created_at", "completed_at")
    output = [{name: value for name, value in each.items() if name != "id"} for each in response["output"]]
    return {name: value for name, value in response.items() if name not in changing} | {"output": output}
