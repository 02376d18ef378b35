"""What a chat template makes of messages, found out by rendering a few. Its source says it in too many ways to read."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from syringa.errors import InvalidRequest
from syringa.prompt.chat.template import ChatTemplate, Message

_MARK = "lilac7f3a"
# What a message that only calls may have for content, and whether its arguments are text: the first that works is it.
_FORMS: tuple[tuple[str | None, bool], ...] = ((None, False), ("", False), (None, True), ("", True))
_USER: Message = {"role": "user", "content": "Hi"}


class TemplateCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a template does with what a message may have."""

    takes_system: bool  # otherwise it refuses instructions, or leaves them out
    knows_developer: bool  # otherwise the role is unknown to it, or one that it merely writes down
    reads_names: bool  # who wrote a message
    empty: str | None  # the content of a message that only calls: templates want None, or cannot take it
    arguments_as_text: bool  # JSON text for a call's arguments; otherwise the object


@functools.lru_cache(maxsize=64)
def probe_template(template: ChatTemplate) -> TemplateCapabilities:
    """What a template does; it is tried once."""
    developer = _instructed(template, "developer")
    empty, as_text = next((form for form in _FORMS if _shows_call(template, *form)), ("", False))
    return TemplateCapabilities(
        takes_system=_MARK in _instructed(template, "system"),
        # A template that writes down any role does the same with one that nobody was ever trained on.
        knows_developer=_MARK in developer
        and developer.replace("developer", "florist") != _instructed(template, "florist"),
        reads_names=_MARK in _render(template, {**_USER, "name": _MARK}),
        empty=empty,
        arguments_as_text=as_text,
    )


def _instructed(template: ChatTemplate, role: str) -> str:
    return _render(template, {"role": role, "content": _MARK}, _USER)


def _shows_call(template: ChatTemplate, content: str | None, as_text: bool) -> bool:
    """Whether a call comes out as it should: with its name, and nothing written as Python writes it."""
    arguments = '{"city": "Rome"}' if as_text else {"city": "Rome"}
    # An id of a form that every template accepts: some want nine letters and digits.
    call = {"id": "abcdefgh0", "type": "function", "function": {"name": _MARK, "arguments": arguments}}
    asked: Message = {"role": "assistant", "content": content, "tool_calls": [call]}
    answered: Message = {"role": "tool", "content": "1", "tool_call_id": call["id"], "name": "f"}
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    before = _render(template, _USER, tools=tools)
    shown = _render(template, _USER, asked, answered, tools=tools)
    return _MARK in shown and all(shown.count(odd) <= before.count(odd) for odd in ("None", "{'city'"))


def _render(template: ChatTemplate, *messages: Message, tools: list[dict[str, Any]] | None = None) -> str:
    """The prompt; empty where the template refuses."""
    try:
        return template.render(messages, tools=tools)
    except InvalidRequest:
        return ""
