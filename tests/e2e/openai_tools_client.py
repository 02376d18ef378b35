"""Tools and formats with the official package. It runs in the environment of that package.

python openai_tools_client.py URL KEY MODEL
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Literal

import openai
from client_checks import expect_error, run_checks
from openai import OpenAI
from pydantic import BaseModel, Field

URL, KEY, MODEL = sys.argv[1:]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
LANGUAGE = [{"role": "user", "content": "Name a programming language and its year."}]
client = OpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0, timeout=300)
chat = client.chat.completions

# Limited, because a small model may not end a text.
Short = Annotated[str, Field(max_length=20)]


def function(name, strict=True, **properties):
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": name, "strict": strict, "parameters": schema}}


TOOL = function("get_weather", location={"type": "string", "maxLength": 20})
MAIL = function("send_mail", to={"type": "string", "maxLength": 20}, urgent={"type": "boolean"})


class Language(BaseModel):
    name: Short
    year: Annotated[int, Field(ge=1950, le=2025)]


class Report(BaseModel):
    """A nested model: the package moves shared schemas to `$defs`."""

    best: Language
    others: Annotated[list[Language], Field(max_length=2)]
    kind: Literal["compiled", "interpreted"]
    remark: Short | None


class GetWeather(BaseModel):
    """The weather of a place."""

    city: Short
    unit: Literal["celsius", "fahrenheit"]


def body(**fields):
    return {"model": MODEL, "messages": WEATHER, "max_completion_tokens": 200, "temperature": 0, **fields}


def call(**fields):
    """Return the only choice of a response, whose calls must parse."""
    (choice,) = chat.create(**body(parallel_tool_calls=False, **fields)).choices
    for each in choice.message.tool_calls:
        json.loads(each.function.arguments)
    return choice


def named(name):
    return {"type": "function", "function": {"name": name}}


def check_required() -> None:
    choice = call(tools=[TOOL, MAIL], tool_choice="required")
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (made,) = choice.message.tool_calls
    assert made.type == "function"
    assert made.id
    assert made.function.name in ("get_weather", "send_mail")


def check_several_at_once() -> None:
    (choice,) = chat.create(**body(tools=[TOOL, MAIL], tool_choice="required", temperature=1, seed=1)).choices
    assert len({each.id for each in choice.message.tool_calls}) == len(choice.message.tool_calls) >= 1


def check_a_named_function() -> None:
    choice = call(tools=[TOOL, MAIL], tool_choice=named("send_mail"))
    (made,) = choice.message.tool_calls
    assert json.loads(made.function.arguments).keys() == {"to", "urgent"}
    assert choice.finish_reason == "stop"


def check_allowed_tools() -> None:
    for mode in ("required", "auto"):
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named("send_mail")]}}
        choice = call(tools=[TOOL, MAIL], tool_choice=allowed, max_completion_tokens=60)
        assert {each.function.name for each in choice.message.tool_calls} <= {"send_mail"}
        assert choice.message.tool_calls or mode == "auto"


def check_none() -> None:
    choice = call(tools=[TOOL], tool_choice="none", max_completion_tokens=20)
    assert choice.message.content
    assert choice.message.tool_calls == []


def check_auto() -> None:
    choice = call(tools=[TOOL], max_completion_tokens=40)
    assert choice.message.content or choice.message.tool_calls


def check_an_agents_round() -> None:
    messages = [*WEATHER]
    first = call(messages=messages, tools=[TOOL], tool_choice="required").message
    (made,) = first.tool_calls
    messages += [first, {"role": "tool", "tool_call_id": made.id, "content": "Sunny, 21 °C"}]
    second = call(messages=messages, tools=[TOOL], tool_choice="none", max_completion_tokens=40)
    assert second.message.content
    messages[-1] = {"role": "tool", "tool_call_id": "another", "content": "Sunny"}
    error = expect_error(openai.BadRequestError, call, messages=messages, tools=[TOOL])
    assert error.param == "messages[2].tool_call_id"


def check_a_stream_of_calls() -> None:
    whole = call(tools=[TOOL], tool_choice="required").message.tool_calls[0].function
    fields = body(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, stream=True)
    chunks = [chunk.choices[0] for chunk in chat.create(**fields)]
    parts = [part for chunk in chunks for part in chunk.delta.tool_calls or ()]
    assert (parts[0].index, parts[0].type, parts[0].function.name) == (0, "function", "get_weather")
    assert [part.id for part in parts if part.id] == [parts[0].id]
    assert len(parts) > 3
    assert "".join(part.function.arguments or "" for part in parts) == whole.arguments
    assert chunks[-1].finish_reason == "tool_calls"


def check_the_stream_helper_with_calls() -> None:
    tool = openai.pydantic_function_tool(GetWeather)
    with chat.stream(**body(tools=[tool], tool_choice=named("GetWeather"))) as stream:
        seen = list(stream)
        (choice,) = stream.get_final_completion().choices
    deltas = [event for event in seen if event.type == "tool_calls.function.arguments.delta"]
    (done,) = [event for event in seen if event.type == "tool_calls.function.arguments.done"]
    assert "".join(event.arguments_delta for event in deltas) == done.arguments == deltas[-1].arguments
    assert isinstance(done.parsed_arguments, GetWeather)
    (made,) = choice.message.tool_calls
    assert made.function.parsed_arguments == done.parsed_arguments


def check_parsed_calls() -> None:
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    answer = chat.parse(**body(tools=[tool], tool_choice="required", parallel_tool_calls=False))
    (made,) = answer.choices[0].message.tool_calls
    assert isinstance(made.function.parsed_arguments, GetWeather)


def check_a_parsed_format() -> None:
    for kind in (Language, Report):
        answer = chat.parse(**body(messages=LANGUAGE, response_format=kind, temperature=1, seed=1))
        assert answer.choices[0].finish_reason == "stop"
        assert isinstance(answer.choices[0].message.parsed, kind)


def check_the_stream_helper_with_a_format() -> None:
    with chat.stream(**body(messages=LANGUAGE, response_format=Report, seed=1)) as stream:
        seen = list(stream)
        message = stream.get_final_completion().choices[0].message
    assert any(event.parsed for event in seen if event.type == "content.delta")
    (done,) = [event for event in seen if event.type == "content.done"]
    assert isinstance(done.parsed, Report)
    assert message.parsed == done.parsed


def check_a_cut_format_is_said_to_be_cut() -> None:
    fields = body(messages=LANGUAGE, response_format=Report, max_completion_tokens=5)
    assert expect_error(openai.LengthFinishReasonError, chat.parse, **fields).completion.usage.completion_tokens == 5


def check_any_object() -> None:
    fields = body(messages=LANGUAGE, response_format={"type": "json_object"}, max_completion_tokens=300)
    (choice,) = chat.create(**fields).choices
    assert choice.message.content.startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


def check_what_cannot_be_enforced() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "propertyNames": {"maxLength": 3}}
    named = "response_format.json_schema.schema.propertyNames"
    shape = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    assert expect_error(openai.BadRequestError, chat.create, **body(response_format=shape)).param == named
    shape["json_schema"]["strict"] = False
    answer = chat.with_raw_response.create(**body(response_format=shape, max_completion_tokens=5))
    assert named in answer.headers["x-syringa-ignored"]


def check_bad_tools() -> None:
    for fields, param in [
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": named("fly")}, "tool_choice.function.name"),
        ({"functions": [TOOL["function"]]}, "functions"),
    ]:
        assert expect_error(openai.BadRequestError, chat.create, **body(**fields)).param == param


if __name__ == "__main__":
    run_checks(globals())
