"""`litellm` with its providers for OpenAI and for vLLM. It runs in the environment of that package.

python litellm_client.py URL KEY MODEL
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # do not fetch prices

import litellm
from client_checks import expect_error, run_checks
from pydantic import BaseModel, ConfigDict, Field

URL, KEY, MODEL = sys.argv[1:]
ASKED = [{"role": "user", "content": "What is the capital of France?"}]
PROVIDERS = ("openai", "hosted_vllm")
litellm.suppress_debug_info = True  # printed to the output of the checks
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Language(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    year: int = Field(ge=1950, le=2025)


def fields(provider, **given):
    server = {"model": f"{provider}/{MODEL}", "api_base": URL + "/v1", "api_key": KEY, "num_retries": 0}
    return server | {"messages": ASKED, "temperature": 0, "max_tokens": 60} | given


def check_completion() -> None:
    for provider in PROVIDERS:
        answer = litellm.completion(**fields(provider))
        assert "Paris" in answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "stop"
        assert not answer.choices[0].message.tool_calls
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def check_stream() -> None:
    for provider in PROVIDERS:
        whole = litellm.completion(**fields(provider))
        chunks = list(litellm.completion(**fields(provider, stream=True, stream_options={"include_usage": True})))
        built = litellm.stream_chunk_builder(chunks, messages=ASKED)
        assert built.choices[0].message.content == whole.choices[0].message.content
        assert built.usage.completion_tokens == whole.usage.completion_tokens


def check_async() -> None:
    whole = litellm.completion(**fields("openai"))
    answer = asyncio.run(litellm.acompletion(**fields("openai")))
    assert answer.choices[0].message.content == whole.choices[0].message.content


def check_tools() -> None:
    for provider in PROVIDERS:
        forced = fields(provider, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
        answer = litellm.completion(**forced)
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, answer.choices[0].finish_reason) == ("get_weather", "tool_calls")
        assert json.loads(call.function.arguments).keys() == {"city"}
        built = litellm.stream_chunk_builder(list(litellm.completion(**forced, stream=True)), messages=ASKED)
        assert built.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
        result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 °C"}
        history = [*ASKED, answer.choices[0].message, result]
        second = litellm.completion(**fields(provider, messages=history, tools=[WEATHER], tool_choice="none"))
        assert second.choices[0].message.content


def check_structured_output() -> None:
    for provider in PROVIDERS:
        answer = litellm.completion(**fields(provider, response_format=Language))
        assert Language.model_validate_json(answer.choices[0].message.content)


def check_extensions() -> None:
    """Fields of vLLM pass through the provider for it."""
    answer = litellm.completion(**fields("hosted_vllm", extra_body={"structured_outputs": {"choice": ["yes", "no"]}}))
    assert answer.choices[0].message.content in ("yes", "no")


def check_text_completion() -> None:
    given = fields("openai", prompt="The capital of France is", max_tokens=5)
    del given["messages"]
    answer = litellm.text_completion(**given | {"model": f"text-completion-openai/{MODEL}"})
    assert answer.choices[0].text
    assert answer.usage.completion_tokens == 5


def check_responses() -> None:
    given = fields("openai", input="What is the capital of France?", max_output_tokens=60)
    for name in ("messages", "max_tokens"):
        del given[name]
    answer = litellm.responses(**given)
    assert answer.status == "completed"
    assert "Paris" in answer.output[0].content[0].text
    kinds = [event.type for event in litellm.responses(**given, stream=True)]
    assert kinds[-1] == "response.completed"


def check_errors() -> None:
    expect_error(litellm.AuthenticationError, litellm.completion, **fields("openai", api_key="wrong"))
    expect_error(litellm.NotFoundError, litellm.completion, **fields("openai", model="openai/none"))
    expect_error(litellm.BadRequestError, litellm.completion, **fields("openai", temperature=3))
    long = [{"role": "user", "content": "word " * 5000}]
    expect_error(litellm.ContextWindowExceededError, litellm.completion, **fields("openai", messages=long))


if __name__ == "__main__":
    run_checks(globals())
