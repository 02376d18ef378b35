"""`/v1/messages` with system messages after others, for models whose chat templates refuse them there."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from syringa.api.models.served_model import ServedModel
from syringa.output_formats import ModelFormats
from syringa.prompt.chat.template import ChatTemplate
from tests.chat_models import PLAIN, TOOLS, plain_model
from tests.fake_engine import FakeEngine, fake_model
from tests.http.anthropic_client import ASKED, CALLED, TOOL, anthropic_client

# As the templates of Qwen3.5 and others.
FIRST_ONLY = """\
{%- for m in messages %}{% if m.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"""
# As those of Mistral's and Gemma's models.
ALTERNATING = """\
{%- set others = messages[1:] if messages[0].role == 'system' else messages %}
{%- for m in others %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% endfor %}"""
DROPPING = "{%- set messages = messages[:1] + messages[1:] | rejectattr('role', 'equalto', 'system') | list %}" + PLAIN

LATE = {"role": "system", "content": "Be brief."}
SHOWN = "<system_message>\nBe brief.\n</system_message>"
ANSWERED = {"role": "assistant", "content": "yes"}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"}]}


def strict_tool_model() -> ServedModel:
    formats = ModelFormats(tool_calls="hermes", supports_tools=True)
    return fake_model(template=ChatTemplate(FIRST_ONLY + TOOLS), formats=formats)


@pytest.mark.parametrize("source", [FIRST_ONLY + PLAIN, ALTERNATING + PLAIN, DROPPING])
@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([*ASKED, LATE], f"[u]hi\n{SHOWN}[a]"),
        ([*ASKED, LATE, *ASKED], f"[u]hi\n{SHOWN}\nhi[a]"),
        ([*ASKED, LATE, ANSWERED, *ASKED], f"[u]hi\n{SHOWN}[a]yes[u]hi[a]"),
        ([*ASKED, ANSWERED, LATE, *ASKED], f"[u]hi[a]yes[u]{SHOWN}\nhi[a]"),
        ([*ASKED, ANSWERED, LATE], f"[u]hi[a]yes[u]{SHOWN}[a]"),
        ([*ASKED, LATE, LATE, ANSWERED], f"[u]hi\n{SHOWN}\n{SHOWN}[a]yes"),
        # Before the first turn, it belongs to the system prompt.
        ([LATE, *ASKED], "[s]S\nBe brief.[u]hi[a]"),
    ],
)
async def test_refused_system_message_becomes_marked_text_of_a_turn(
    source: str, messages: list[Any], prompt: str
) -> None:
    async with anthropic_client(model=plain_model(source)) as http:
        assert await http.ignored(system="S", messages=messages) == [""]
        assert http.prompt() == (prompt if prompt.startswith("[s]") else "[s]S" + prompt)
        assert await http.count(system="S", messages=messages) == len(http.engine.requests[0].prompt)


async def test_refused_system_message_after_a_tool_result_is_in_the_result() -> None:
    """A user turn there would make templates leave out the reasoning before it, or is refused as well."""
    called = {"role": "assistant", "content": [CALLED]}
    async with anthropic_client(model=strict_tool_model()) as http:
        await http.create(messages=[*ASKED, called, RESULT, LATE], tools=[TOOL])
        assert http.prompt().endswith(f"[tool:get_weather]sunny\n{SHOWN}#toolu_1[assistant]")
    async with anthropic_client(model=plain_model(ALTERNATING + PLAIN)) as http:
        await http.create(messages=[*ASKED, called, RESULT, LATE, ANSWERED, *ASKED], tools=[TOOL])
        assert f"[u]<tool_response>\nsunny\n{SHOWN}\n</tool_response>[a]yes[u]hi[a]" in http.prompt()


async def test_prompt_of_a_longer_conversation_begins_with_that_of_a_shorter_one() -> None:
    called = {"role": "assistant", "content": [CALLED]}
    messages = [*ASKED, LATE, called, RESULT, LATE, ANSWERED, *ASKED, LATE, ANSWERED, *ASKED]
    async with anthropic_client(model=strict_tool_model()) as http:
        for end in (2, 5, 8, 10):
            await http.create(system="S", messages=messages[:end], tools=[TOOL])
        prompts = [http.prompt(index).removesuffix("[assistant]") for index in range(4)]
    for shorter, longer in itertools.pairwise(prompts):
        assert longer.startswith(shorter)


async def test_cache_control_of_a_refused_system_message_marks_its_end() -> None:
    text = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    async with anthropic_client(FakeEngine("hello"), model=plain_model(FIRST_ONLY + PLAIN)) as http:
        for messages, end in (
            ([*ASKED, {"role": "system", "content": [text]}, ANSWERED, *ASKED], f"[u]hi\n{SHOWN}"),
            ([{"role": "system", "content": [text]}, *ASKED], "[s]Be brief.[u]"),
        ):
            usage = (await http.create(messages=messages))["usage"]
            assert usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"] == len(end)
