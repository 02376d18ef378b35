"""Responses with the official package, in whose environment it runs: texts, formats, tools, streams and errors.

python openai_responses_client.py URL KEY MODEL
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai
from client_checks import expect_error, run_checks
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

URL, KEY, MODEL = sys.argv[1:]
client = OpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0, timeout=300)
# A call returns one of many types, and the checks assert which.
responses: Any = client.responses

WEATHER = "What is the weather in Paris?"
# Limited, because a small model may not end a text.
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Get current weather for a location",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "maxLength": 20}},
        "required": ["location"],
        "additionalProperties": False,
    },
}


class Language(BaseModel):
    name: str = Field(max_length=20)
    year: int = Field(ge=1950, le=2025)


class Place(BaseModel):
    """Where the weather is."""

    city: str = Field(max_length=20)


def body(**fields: Any) -> dict[str, Any]:
    asked = "What is the capital of France?"
    return {"model": MODEL, "input": asked, "max_output_tokens": 60, "temperature": 0, **fields}


def ask(**fields: Any) -> Any:
    return responses.create(**body(**fields))


def calls(response: Any) -> list[Any]:
    return [item for item in response.output if item.type == "function_call"]


def check_an_answer() -> None:
    answer = ask(metadata={"a": "b"})
    assert answer.id.startswith("resp_")
    assert (answer.object, answer.model, answer.status) == ("response", MODEL, "completed")
    assert (answer.error, answer.incomplete_details, answer.metadata) == (None, None, {"a": "b"})
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert [part.type for part in message.content] == ["output_text"]
    assert "Paris" in answer.output_text
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.output_tokens_details.reasoning_tokens == 0


def check_instructions_and_items() -> None:
    plain = ask()
    instructed = ask(instructions="You are a poet.")
    assert instructed.instructions == "You are a poet."
    items = [{"role": "developer", "content": "You are a poet."}, {"role": "user", "content": body()["input"]}]
    assert ask(input=items).usage.input_tokens == instructed.usage.input_tokens != plain.usage.input_tokens
    parts = [{"role": "user", "content": [{"type": "input_text", "text": body()["input"]}]}]
    assert ask(input=parts).output_text == plain.output_text


def check_a_length() -> None:
    cut = ask(max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (cut.output[0].status, cut.usage.output_tokens) == ("incomplete", 3)
    *_, last = ask(max_output_tokens=3, stream=True)
    assert (last.type, last.response.output_text) == ("response.incomplete", cut.output_text)


def check_log_probabilities() -> None:
    answer = ask(include=["message.output_text.logprobs"], top_logprobs=2)
    (part,) = answer.output[0].content
    assert bytes(byte for token in part.logprobs for byte in token.bytes).decode() == answer.output_text
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)


def check_a_stream() -> None:
    whole = ask()
    events = list(ask(stream=True))
    kinds = [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    head = ["created", "in_progress", "output_item.added", "content_part.added"]
    tail = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds[:4] == [f"response.{name}" for name in head]
    assert kinds[-4:] == [f"response.{name}" for name in tail]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == events[-4].text == whole.output_text
    final = events[-1].response
    assert (final.output_text, final.usage.output_tokens) == (whole.output_text, whole.usage.output_tokens)
    assert len({event.item_id for event in events[3:-2]} | {final.output[0].id}) == 1


def check_the_stream_helper() -> None:
    with responses.stream(**body()) as stream:
        seen = list(stream)
        final = stream.get_final_response()
    deltas = [event for event in seen if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == deltas[-1].snapshot == final.output_text == ask().output_text
    assert seen[-1].type == "response.completed"


def check_a_stream_that_is_left_early() -> None:
    with ask(max_output_tokens=1000, stream=True) as stream:
        assert next(iter(stream)).type == "response.created"


def check_a_schema() -> None:
    schema = Language.model_json_schema() | {"additionalProperties": False}
    chosen = {"format": {"type": "json_schema", "name": "language", "schema": schema, "strict": True}}
    answer = ask(input="Name a programming language.", text=chosen)
    assert answer.text.format.name == "language"
    Language.model_validate_json(answer.output_text)
    first = ask(input="Give me a JSON object.", text={"format": {"type": "json_object"}}, max_output_tokens=20)
    assert first.output_text.lstrip().startswith("{")


def check_parse() -> None:
    fields = body(input="Name a programming language and its year.", text_format=Language)
    answer = responses.parse(**fields)
    assert answer.output_parsed == Language.model_validate_json(answer.output_text)
    with responses.stream(**fields) as stream:
        done = [event for event in stream if event.type == "response.output_text.done"]
        assert stream.get_final_response().output_parsed == answer.output_parsed
    assert [event.parsed for event in done] == [answer.output_parsed]


def check_a_round_with_a_tool() -> None:
    asked: list[Any] = [{"role": "user", "content": WEATHER}]
    first = ask(input=asked, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    (call,) = calls(first)
    assert (call.name, call.status) == ("get_weather", "completed")
    assert json.loads(call.arguments).keys() == {"location"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 21 °C"}
    second = ask(input=[*asked, *first.output, result], tools=[TOOL], tool_choice="none")
    assert second.output_text
    chained = ask(input=[result], previous_response_id=first.id, tools=[TOOL], tool_choice="none")
    assert (chained.output_text, chained.usage.input_tokens) == (second.output_text, second.usage.input_tokens)
    lost = expect_error(openai.BadRequestError, ask, input=[result | {"call_id": "call_none"}])
    assert lost.param == "input[0].call_id"


def check_a_named_tool_in_a_stream() -> None:
    tool: Any = openai.pydantic_function_tool(Place, name="get_weather")["function"]
    fields = body(input=WEATHER, tools=[{"type": "function", **tool}], parallel_tool_calls=False)
    with responses.stream(**fields, tool_choice={"type": "function", "name": "get_weather"}) as stream:
        seen = list(stream)
        (call,) = calls(stream.get_final_response())
    deltas = [event for event in seen if event.type == "response.function_call_arguments.delta"]
    (done,) = [event for event in seen if event.type == "response.function_call_arguments.done"]
    assert "".join(event.delta for event in deltas) == deltas[-1].snapshot == done.arguments == call.arguments
    assert done.name == "get_weather"
    Place.model_validate_json(call.arguments)


def check_a_custom_tool() -> None:
    date = {"type": "grammar", "syntax": "regex", "definition": r"20[0-9]{2}-[01][0-9]"}
    tool = {"type": "custom", "name": "pick_month", "description": "Picks a month.", "format": date}
    first = ask(input="Pick May 2024.", tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = first.output
    assert (call.type, call.name, len(call.input)) == ("custom_tool_call", "pick_month", 7)
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "picked"}
    assert ask(input=[result], previous_response_id=first.id, tools=[tool], tool_choice="none").output_text


def check_namespaces() -> None:
    tools = [
        {"type": "namespace", "name": name, "description": f"The {name}.", "tools": [TOOL]}
        for name in ("north", "south")
    ]
    chosen = {"type": "function", "name": "get_weather", "namespace": "south"}
    with responses.stream(**body(input=WEATHER, tools=tools, tool_choice=chosen)) as stream:
        added = [event.item for event in stream if event.type == "response.output_item.added"]
        first = stream.get_final_response()
    (call,) = calls(first)
    assert [(item.namespace, item.name) for item in (*added, call)] == [("south", "get_weather")] * 2
    assert json.loads(call.arguments).keys() == {"location"}
    assert calls(responses.retrieve(first.id))[0].namespace == "south"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 21 °C"}
    fields = {"tools": tools, "tool_choice": "none"}
    sent = ask(input=[{"role": "user", "content": WEATHER}, *first.output, result], **fields)
    chained = ask(input=[result], previous_response_id=first.id, **fields)
    assert (chained.output_text, chained.usage.input_tokens) == (sent.output_text, sent.usage.input_tokens)


def check_a_tool_search() -> None:
    query = {"type": "object", "properties": {"query": {"type": "string", "maxLength": 20}}, "required": ["query"]}
    search = {
        "type": "tool_search",
        "execution": "client",
        "description": "Finds tools.",
        "parameters": query | {"additionalProperties": False},
    }
    first = ask(input=WEATHER, tools=[search], tool_choice="required", parallel_tool_calls=False)
    (found,) = first.output
    assert (found.type, found.execution, found.status) == ("tool_search_call", "client", "completed")
    assert isinstance(found.arguments["query"], str)
    group = {"type": "namespace", "name": "sky", "description": "The sky.", "tools": [TOOL | {"defer_loading": True}]}
    output = {"type": "tool_search_output", "call_id": found.call_id, "execution": "client", "tools": [group]}
    chosen = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "sky"}]}
    second = ask(
        input=[output], previous_response_id=first.id, tools=[search], tool_choice=chosen, parallel_tool_calls=False
    )
    (call,) = calls(second)
    assert (call.namespace, call.name) == ("sky", "get_weather")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"}
    third = ask(input=[result], previous_response_id=second.id, tools=[search], tool_choice=chosen)
    assert {each.namespace for each in calls(third)} == {"sky"}


def check_hosted_tools() -> None:
    raw = client.responses.with_raw_response.create(**body(tools=[{"type": "web_search"}]))
    assert "tools[0] (web_search)" in raw.headers["x-syringa-ignored"]
    answer: Any = raw.parse()
    assert [tool.type for tool in answer.tools] == ["web_search"]
    assert answer.output_text == ask().output_text


def check_the_async_client() -> None:
    async def all_at_once() -> None:
        async with AsyncOpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0, timeout=300) as aclient:
            answers = await asyncio.gather(*(aclient.responses.create(**body()) for _ in range(3)))
            async with aclient.responses.stream(**body()) as stream:
                final = await stream.get_final_response()
        assert {answer.output_text for answer in answers} == {final.output_text}

    asyncio.run(all_at_once())


def check_bad_requests() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"temperature": 3}, "temperature"),
        ({"input": [{"type": "no_such_item"}]}, "input[0].type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"include": ["no_such_thing"]}, "include[0]"),
        ({"background": True, "store": False}, "background"),
    ]
    for fields, param in wrong:
        error = expect_error(openai.BadRequestError, ask, **fields)
        assert (error.status_code, error.type) == (400, "invalid_request_error")
        assert (error.param or "").startswith(param), (error.param, fields)
        assert error.request_id
    long = expect_error(openai.BadRequestError, ask, input="word " * 3000)
    assert long.code == "context_length_exceeded"
    assert expect_error(openai.BadRequestError, ask, stream=True, temperature=3).param == "temperature"


def check_other_refusals() -> None:
    missing = expect_error(openai.NotFoundError, ask, model="no-such-model")
    assert (missing.code, missing.param) == ("model_not_found", "model")
    stranger: Any = client.with_options(api_key="wrong").responses
    assert expect_error(openai.AuthenticationError, stranger.create, **body()).status_code == 401


if __name__ == "__main__":
    run_checks(globals())
