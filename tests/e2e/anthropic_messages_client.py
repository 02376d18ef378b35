"""Messages with Anthropic's official package, whose types validate bodies and events. It runs in its environment.

python anthropic_messages_client.py URL KEY MODEL
"""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from typing import Literal

import anthropic
import pydantic
from anthropic import Anthropic, AsyncAnthropic, types
from client_checks import expect_error, run_checks

URL, KEY, MODEL = sys.argv[1:]
ASKED = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {
    "name": "get_weather",
    "description": "Return the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CACHED = {"type": "ephemeral"}
client = Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=300)
messages = client.messages


def body(**fields):
    """The package no longer has an argument for the temperature."""
    return {"model": MODEL, "messages": ASKED, "max_tokens": 30, "extra_body": {"temperature": 0}, **fields}


def ask(**fields):
    return messages.create(**body(**fields))


def post(**fields):
    """Return the text of a response, without the package."""
    headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01", "content-type": "application/json"}
    sent = body(**fields)
    data = json.dumps(sent | sent.pop("extra_body")).encode()
    request = urllib.request.Request(URL + "/v1/messages", data, headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return answer.read().decode()


def assert_no_extra(model, path=""):
    """Check that the package knows all fields of a value, recursively."""
    if isinstance(model, list):
        for each in model:
            assert_no_extra(each, path + "[]")
    if isinstance(model, pydantic.BaseModel):
        assert not model.model_extra, (path, model.model_extra)
        for name in type(model).model_fields:
            assert_no_extra(getattr(model, name), f"{path}.{name}")


def check_a_message() -> None:
    message = ask(system="Answer in one sentence.", metadata={"user_id": "u"})
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    (block,) = message.content
    assert block.type == "text"
    assert "Paris" in block.text
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens > 1
    assert message._request_id


def check_bodies_and_events_are_valid_for_the_types() -> None:
    tools = {"tools": [TOOL], "tool_choice": {"type": "any"}}
    for fields in ({}, tools, {"stop_sequences": ["Paris"]}, {"cache_control": CACHED}):
        assert_no_extra(types.Message.model_validate_json(post(**fields)))
        adapter = pydantic.TypeAdapter(types.RawMessageStreamEvent)
        lines = post(**fields, stream=True).splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        validated = [adapter.validate_python(event) for event in events if event["type"] != "ping"]
        assert_no_extra(validated)
        assert [validated[0].type, validated[-1].type] == ["message_start", "message_stop"]


def check_a_stream_is_the_same() -> None:
    whole = ask()
    with messages.stream(**body()) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(texts) > 4
    assert "".join(texts) == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    kinds = [event.type for event in ask(stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def check_counts_are_those_of_the_request() -> None:
    fields = {"system": "Be brief.", "tools": [TOOL], "messages": ASKED, "model": MODEL}
    counted = messages.count_tokens(**fields).input_tokens
    usage = ask(**fields).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def check_cache_counts() -> None:
    text = "The lilac is a shrub. " * 40
    fields = {"system": [{"type": "text", "text": text, "cache_control": CACHED}], "max_tokens": 1}
    first, second = ask(**fields).usage, ask(**fields).usage
    assert second.cache_read_input_tokens > 100
    total = second.input_tokens + second.cache_read_input_tokens + second.cache_creation_input_tokens
    assert total == first.input_tokens + first.cache_read_input_tokens + first.cache_creation_input_tokens
    assert ask(max_tokens=1).usage.cache_creation_input_tokens == 0


def check_a_stop_sequence() -> None:
    message = ask(stop_sequences=["Paris"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Paris")
    assert "Paris" not in message.content[0].text
    assert ask(max_tokens=2).stop_reason == "max_tokens"


def check_a_long_max_tokens_is_clamped() -> None:
    assert ask(max_tokens=100_000, stop_sequences=["."]).stop_reason in ("stop_sequence", "end_turn")


def check_the_last_assistant_message_is_continued() -> None:
    start = "The capital of France is"
    message = ask(messages=[*ASKED, {"role": "assistant", "content": start}])
    assert "Paris" in message.content[0].text
    assert not message.content[0].text.startswith(start)


def check_a_tool_round_trip() -> None:
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    called = ask(messages=asked, tools=[TOOL], tool_choice={"type": "tool", "name": "get_weather"}, max_tokens=60)
    (call,) = called.content
    assert (called.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "get_weather")
    assert isinstance(call.input["city"], str)
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": [{"type": "text", "text": "Sunny, 21 degrees."}],
    }
    turns = [*asked, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    answer = ask(messages=turns, tools=[TOOL], tool_choice={"type": "none"})
    assert answer.content[0].type == "text"


def check_a_tool_call_in_a_stream() -> None:
    with messages.stream(**body(tools=[TOOL], tool_choice={"type": "any"}, max_tokens=60)) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert "".join(parts)
    assert [block.type for block in final.content][:1] == ["tool_use"]
    assert json.loads("".join(parts).split("}")[0] + "}") == final.content[0].input


def check_structured_output() -> None:
    class City(pydantic.BaseModel):
        name: Literal["Paris", "Lyon"]

    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}},
        "required": ["name"],
        "additionalProperties": False,
    }
    message = ask(output_config={"format": {"type": "json_schema", "schema": schema}}, max_tokens=60)
    assert set(json.loads(message.content[0].text)) == {"name"}
    parsed = messages.parse(**body(max_tokens=60), output_format=City)
    assert parsed.parsed_output.name in ("Paris", "Lyon")


def check_beta_messages() -> None:
    message = client.beta.messages.create(**body(), betas=["context-1m-2025-08-07"])
    assert "Paris" in message.content[0].text
    raw = client.beta.messages.with_raw_response.create(**body(speed="fast", extra_body={"new_field": 1}))
    assert raw.headers["x-syringa-ignored"] == "new_field, speed"


def check_models() -> None:
    page = client.models.list()
    assert MODEL in [model.id for model in page]
    assert_no_extra(page.data)
    assert client.models.retrieve(MODEL).max_input_tokens == 1280


def check_errors() -> None:
    error = expect_error(anthropic.NotFoundError, ask, model="none")
    assert error.body["error"]["type"] == "not_found_error"
    assert error.request_id == error.body["request_id"]
    error = expect_error(anthropic.BadRequestError, ask, extra_body={"temperature": 3})
    assert error.message.count("temperature")
    other = client.with_options(api_key="wrong")
    assert expect_error(anthropic.AuthenticationError, other.messages.create, **body()).status_code == 401
    long = [{"role": "user", "content": "lilac " * 3000}]
    assert "prompt is too long" in str(expect_error(anthropic.BadRequestError, ask, messages=long))
    assert "prompt is too long" in str(expect_error(anthropic.BadRequestError, ask, messages=long, stream=True))


def check_the_asynchronous_client() -> None:
    async def both():
        other = AsyncAnthropic(base_url=URL, auth_token=KEY, max_retries=0)
        async with other, other.messages.stream(**body()) as stream:
            return (await other.messages.create(**body())).content, (await stream.get_final_message()).content

    whole, streamed = asyncio.run(both())
    assert whole[0].text == streamed[0].text


if __name__ == "__main__":
    run_checks(globals())
