"""`ChatOpenAI` of LangChain. It runs in the environment of that package.

python langchain_client.py URL KEY MODEL
"""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import openai
from client_checks import expect_error, run_checks
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

URL, KEY, MODEL = sys.argv[1:]
ASKED = "What is the capital of France?"


def model(**fields):
    fields = {"max_tokens": 60, "temperature": 0, **fields}
    return ChatOpenAI(model=MODEL, base_url=URL + "/v1", api_key=KEY, max_retries=0, timeout=300, **fields)


class Language(BaseModel):
    """A programming language."""

    name: Annotated[str, Field(max_length=20)]
    year: Annotated[int, Field(ge=1950, le=2025)]


@tool
def get_weather(city: Annotated[str, Field(max_length=20)]) -> str:
    """The weather of a city."""
    return f"Sunny in {city}, 21 °C"


def check_invoke() -> None:
    answer = model().invoke([SystemMessage("Answer in one sentence."), HumanMessage(ASKED)])
    assert "Paris" in answer.content
    assert answer.tool_calls == answer.invalid_tool_calls == []
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["model_name"] == MODEL
    counts = answer.usage_metadata
    assert counts["total_tokens"] == counts["input_tokens"] + counts["output_tokens"] > 0


def check_stream() -> None:
    whole = model().invoke(ASKED)
    chunks = list(model(stream_usage=True).stream(ASKED))
    assert len(chunks) > 4
    joined = sum(chunks[1:], chunks[0])
    assert joined.content == whole.content
    assert joined.response_metadata["finish_reason"] == "stop"
    for name in ("input_tokens", "output_tokens"):
        assert joined.usage_metadata[name] == whole.usage_metadata[name]


def check_async_and_batch() -> None:
    async def stream():
        return "".join([chunk.content async for chunk in model().astream(ASKED)])

    answers = model().batch([ASKED, ASKED])
    assert {answer.content for answer in answers} == {asyncio.run(stream())}


def check_a_chain() -> None:
    chain = ChatPromptTemplate.from_messages([("user", "What is the capital of {country}?")]) | model()
    assert "Paris" in chain.invoke({"country": "France"}).content


def check_log_probabilities() -> None:
    answer = model(logprobs=True, top_logprobs=2).invoke(ASKED)
    tokens = answer.response_metadata["logprobs"]["content"]
    assert len(tokens) == answer.usage_metadata["output_tokens"]
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)


def check_stop_and_seed() -> None:
    assert "Paris" not in model(stop=["Paris"]).invoke(ASKED).content
    drawn = [model(temperature=1.2, seed=4).invoke(ASKED).content for _ in range(2)]
    assert drawn[0] == drawn[1]


def check_tools() -> None:
    for choice in ("any", "get_weather", True):
        answer = model().bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False).invoke("Paris?")
        (made,) = answer.tool_calls
        assert (made["name"], made["args"].keys()) == ("get_weather", {"city"})
        assert made["id"]
    assert model().bind_tools([get_weather], tool_choice="none").invoke("Paris?").tool_calls == []


def check_a_stream_of_calls() -> None:
    bound = model().bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False, strict=True)
    chunks = list(bound.stream("The weather in Paris?"))
    joined = sum(chunks[1:], chunks[0])
    assert joined.tool_calls[0]["args"] == bound.invoke("The weather in Paris?").tool_calls[0]["args"]
    assert sum(bool(chunk.tool_call_chunks) for chunk in chunks) > 2


def check_an_agents_round() -> None:
    asked = HumanMessage("What is the weather in Paris?")
    first = model().bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False).invoke([asked])
    result = get_weather.invoke(first.tool_calls[0])
    assert isinstance(result, ToolMessage)
    second = model().bind_tools([get_weather], tool_choice="none").invoke([asked, first, result])
    assert second.content


def check_structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        for strict in (True, None):
            runnable = model().with_structured_output(Language, method=method, strict=strict)
            assert isinstance(runnable.invoke("Name a programming language and its year."), Language)
    found = model().with_structured_output(Language, include_raw=True).invoke("Name a programming language.")
    assert isinstance(found["parsed"], Language)
    assert found["parsing_error"] is None
    *_, last = model().with_structured_output(Language).stream("Name a programming language.")
    assert isinstance(last, Language)


def check_a_refusal() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.com/image.jpg"}}
    message = HumanMessage([{"type": "text", "text": "Describe it."}, image])
    assert expect_error(openai.BadRequestError, model().invoke, [message]).param == "messages[0].content[1]"


if __name__ == "__main__":
    run_checks(globals())
