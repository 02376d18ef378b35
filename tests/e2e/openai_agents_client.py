"""Agents of the official framework, on Responses. It runs in the environment of that package.

python openai_agents_client.py URL KEY MODEL

A small model may not call a tool, or never stop: each turn requires a certain tool, and the last forbids tools.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from agents import (
    Agent,
    AgentHooks,
    ModelSettings,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    StopAtTools,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from client_checks import run_checks
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

URL, KEY, MODEL = sys.argv[1:]
ASKED = "What is the weather in Paris, and what time is it there?"
TURN = ["tool_call_item", "tool_call_output_item"]
called: list[str] = []


# Limited, because a small model may not end a text.
@function_tool
def get_weather(city: Annotated[str, Field(max_length=20)]) -> str:
    """Get the weather of a city."""
    assert len(city) <= 20
    called.append("get_weather")
    return "Sunny, 21 °C"


@function_tool
def get_time(zone: Annotated[int, Field(ge=-12, le=14)]) -> str:
    """Get the time in a time zone, by its hours from UTC."""
    assert -12 <= zone <= 14
    called.append("get_time")
    return "12:30"


class Language(BaseModel):
    name: str = Field(max_length=20)
    year: int = Field(ge=1950, le=2025)


class OneAfterTheOther(AgentHooks[Any]):
    """Require the weather tool, then the time tool, then a text."""

    async def on_tool_end(self, context: Any, agent: Any, tool: Any, result: object) -> None:
        following = {"get_weather": "get_time", "get_time": "none"}[tool.name]
        agent.model_settings = dataclasses.replace(agent.model_settings, tool_choice=following)


def settings(choice: str | None = None) -> ModelSettings:
    single = None if choice is None else False
    return ModelSettings(temperature=0, max_tokens=300, tool_choice=choice, parallel_tool_calls=single)


def plain(**fields: Any) -> Agent[Any]:
    chosen: dict[str, Any] = {
        "name": "Guide",
        "model": MODEL,
        "instructions": "Be brief.",
        "model_settings": settings(),
    }
    return Agent(**(chosen | fields))


def guide(**fields: Any) -> Agent[Any]:
    """Return an agent that uses both tools, and then responds."""
    chosen: dict[str, Any] = {"tools": [get_weather, get_time], "hooks": OneAfterTheOther(), "reset_tool_choice": False}
    return plain(**(chosen | {"model_settings": settings("get_weather")} | fields))


def within(work: Callable[[AsyncOpenAI], Awaitable[Any]]) -> Any:
    """Run `work` in a new event loop with a client of its own."""

    async def whole() -> Any:
        async with AsyncOpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0, timeout=300) as client:
            set_default_openai_client(client, use_for_tracing=False)
            return await work(client)

    called.clear()
    return asyncio.run(whole())


def kinds(result: Any) -> list[str]:
    return [item.type for item in result.new_items]


def has_used_both_tools(result: Any) -> None:
    assert called == ["get_weather", "get_time"]
    assert kinds(result) == [*TURN, *TURN, "message_output_item"]
    outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    assert outputs == ["Sunny, 21 °C", "12:30"]
    assert isinstance(result.final_output, str)
    assert result.final_output
    usage = result.context_wrapper.usage
    assert (usage.requests, usage.total_tokens) == (3, usage.input_tokens + usage.output_tokens)


def check_a_run() -> None:
    has_used_both_tools(within(lambda _: Runner.run(guide(), ASKED, max_turns=4)))


def check_a_model_with_a_client() -> None:
    async def work(client: AsyncOpenAI) -> Any:
        set_default_openai_client(AsyncOpenAI(base_url="http://127.0.0.1:9", api_key="not this one"))
        return await Runner.run(guide(model=OpenAIResponsesModel(MODEL, client)), ASKED, max_turns=4)

    has_used_both_tools(within(work))


def check_a_streamed_run() -> None:
    async def work(_: AsyncOpenAI) -> Any:
        result = Runner.run_streamed(guide(), ASKED, max_turns=4)
        return result, [event async for event in result.stream_events()]

    result, events = within(work)
    assert result.is_complete
    has_used_both_tools(result)
    raw = [event.data for event in events if event.type == "raw_response_event"]
    assert [event.type for event in raw].count("response.created") == 3
    text = "".join(event.delta for event in raw if event.type == "response.output_text.delta")
    assert text == result.final_output
    arguments = [event.arguments for event in raw if event.type == "response.function_call_arguments.done"]
    made = [item.raw_item.arguments for item in result.new_items if item.type == "tool_call_item"]
    assert arguments == made
    names = [event.name for event in events if event.type == "run_item_stream_event"]
    assert names == ["tool_called", "tool_output", "tool_called", "tool_output", "message_output_created"]


def check_what_the_server_remembers() -> None:
    """Only new items are sent: the rest follows from the id of the previous response."""
    chained = within(lambda _: Runner.run(guide(), ASKED, max_turns=4, auto_previous_response_id=True))
    has_used_both_tools(chained)
    whole = within(lambda _: Runner.run(guide(), ASKED, max_turns=4))
    assert whole.final_output == chained.final_output
    last = chained.last_response_id
    more = within(lambda _: Runner.run(plain(), "Thank you.", previous_response_id=last))
    assert more.context_wrapper.usage.input_tokens > 100


def check_a_stop_at_a_tool() -> None:
    stopping = StopAtTools(stop_at_tool_names=["get_time"])
    agent = guide(model_settings=settings("get_time"), tool_use_behavior=stopping)
    result = within(lambda _: Runner.run(agent, ASKED, max_turns=2))
    assert (called, result.final_output, kinds(result)) == (["get_time"], "12:30", TURN)


def check_a_form_for_the_answer() -> None:
    agent = plain(output_type=Language)
    result = within(lambda _: Runner.run(agent, "Name a programming language and its year.", max_turns=1))
    assert isinstance(result.final_output, Language)


def check_a_session() -> None:
    async def work(client: AsyncOpenAI) -> None:
        for session in (SQLiteSession("ann"), OpenAIConversationsSession(openai_client=client)):
            await Runner.run(guide(), "My name is Ann. " + ASKED, session=session, max_turns=4)
            two = await Runner.run(plain(), "What is my name?", session=session, max_turns=1)
            assert two.final_output
            # A question, two calls with their results, an answer; and another question with its answer.
            assert len(await session.get_items()) == 8
            assert two.context_wrapper.usage.input_tokens > 100
            await session.clear_session()

    within(work)
    assert called == ["get_weather", "get_time"] * 2


def check_a_handoff() -> None:
    helper = plain(name="Helper")
    agent = plain(handoffs=[helper], model_settings=settings("transfer_to_helper"))
    result = within(lambda _: Runner.run(agent, "Say hello.", max_turns=2))
    assert result.last_agent is helper
    assert result.final_output
    assert kinds(result) == ["handoff_call_item", "handoff_output_item", "message_output_item"]


if __name__ == "__main__":
    set_tracing_disabled(True)
    run_checks(globals())
