"""Agents of `pydantic-ai`, on chat completions and on responses. It runs in the environment of that package.

python pydantic_ai_client.py URL KEY MODEL
"""

from __future__ import annotations

import sys
from typing import Annotated

from client_checks import expect_error, run_checks
from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelHTTPError, ModelSettings, NativeOutput, Tool, ToolOutput
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, KEY, MODEL = sys.argv[1:]
ASKED = "What is the capital of France?"
MODELS = (OpenAIChatModel, OpenAIResponsesModel)
City = Annotated[str, Field(max_length=20)]


# Limited, because a small model may not end a text.
class Language(BaseModel):
    """A programming language."""

    name: Annotated[str, Field(max_length=20)]
    year: Annotated[int, Field(ge=1950, le=2025)]


def agent(kind, **fields):
    settings = {"temperature": 0, "max_tokens": 100, "parallel_tool_calls": False} | fields.pop("settings", {})
    model = kind(fields.pop("model", MODEL), provider=OpenAIProvider(base_url=URL + "/v1", api_key=KEY))
    return Agent(model, model_settings=settings, retries=0, **fields)


def check_run() -> None:
    for kind in MODELS:
        result = agent(kind, instructions="Answer in one sentence.").run_sync(ASKED)
        assert "Paris" in result.output, kind
        assert result.usage.input_tokens > 0
        assert result.usage.output_tokens > 0


def check_stream() -> None:
    for kind in MODELS:
        whole = agent(kind).run_sync(ASKED).output
        result = agent(kind).run_stream_sync(ASKED)
        parts = list(result.stream_text(delta=True, debounce_by=None))
        assert len(parts) > 3
        assert "".join(parts) == whole


def check_history() -> None:
    for kind in MODELS:
        first = agent(kind).run_sync("My name is Ann.")
        second = agent(kind).run_sync("What is my name?", message_history=first.all_messages())
        assert second.output
        assert second.usage.input_tokens > first.usage.input_tokens


def check_native_output() -> None:
    for kind in MODELS:
        result = agent(kind, output_type=NativeOutput(Language)).run_sync("Name a programming language.")
        assert isinstance(result.output, Language)


def check_tool_output() -> None:
    for kind in MODELS:
        result = agent(kind, output_type=ToolOutput(Language)).run_sync("Name a programming language.")
        assert isinstance(result.output, Language)


class CallFirst(AbstractCapability[None]):
    """Require a call in the first step, and a text in the next."""

    def get_model_settings(self):
        return lambda context: ModelSettings(tool_choice=["get_weather"] if context.run_step == 1 else "none")


def check_tools() -> None:
    for kind in MODELS:
        places = []

        def get_weather(city: City) -> str:
            """The weather of a city."""
            places.append(city)  # noqa: B023
            return "Sunny, 21 °C"

        result = agent(kind, tools=[Tool(get_weather)], capabilities=[CallFirst()]).run_sync("The weather in Paris?")
        assert len(places) == 1
        assert result.output
        assert result.usage.requests == 2


def check_errors() -> None:
    error = expect_error(ModelHTTPError, agent(OpenAIChatModel, model="none").run_sync, ASKED)
    assert error.status_code == 404
    error = expect_error(ModelHTTPError, agent(OpenAIResponsesModel, settings={"temperature": 3}).run_sync, ASKED)
    assert (error.status_code, error.body["param"]) == (400, "temperature")


if __name__ == "__main__":
    run_checks(globals())
