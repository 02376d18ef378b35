"""Probe which messages a chat template supports by rendering a few: the source expresses it in too many ways."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from syringa.errors import InvalidRequest

if TYPE_CHECKING:
    from syringa.prompt.chat.template import ChatTemplate, Message

_PROBE = "lilac7f3a"
# Content of a message with calls only, and whether its arguments are JSON text; the first form that works is used.
_CALL_FORMS: tuple[tuple[str | None, bool], ...] = ((None, False), ("", False), (None, True), ("", True))
_USER: Message = {"role": "user", "content": "Hi"}
_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
_ASSISTANT: Message = {"role": "assistant", "content": "Hello"}
_LATE: Message = {"role": "system", "content": _PROBE}
# Where clients put system messages after the first message. Some templates reject only some of these.
_LATE_SYSTEM = (
    (_USER, _LATE),
    (_USER, _LATE, _USER),
    (_USER, _LATE, _ASSISTANT, _USER),
    (_USER, _ASSISTANT, _LATE, _USER),
)


class TemplateCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The message features that a chat template supports."""

    supports_system: bool  # otherwise system messages are rejected or left out
    supports_late_system: bool  # also after other messages, with and without tools
    supports_developer: bool  # otherwise the role is unknown, or copied like any other
    renders_names: bool  # the names of message authors
    empty_content: str | None  # content of a message with calls only
    arguments_as_text: bool  # call arguments are passed as JSON text, otherwise as an object


def probe_template(template: ChatTemplate) -> TemplateCapabilities:
    """Return the capabilities of a template."""
    developer = _render_instructions(template, "developer")
    empty_content, as_text = next((form for form in _CALL_FORMS if _renders_call(template, *form)), ("", False))
    return TemplateCapabilities(
        supports_system=_PROBE in _render_instructions(template, "system"),
        supports_late_system=all(
            _PROBE in _render(template, *messages, tools=tools)
            for messages in _LATE_SYSTEM
            for tools in (None, [_TOOL])
        ),
        # A template that copies any role does the same with one that does not exist.
        supports_developer=_PROBE in developer
        and developer.replace("developer", "florist") != _render_instructions(template, "florist"),
        renders_names=_PROBE in _render(template, {**_USER, "name": _PROBE}),
        empty_content=empty_content,
        arguments_as_text=as_text,
    )


def probe_role(template: ChatTemplate, role: str) -> bool:
    """Return whether the template renders messages of a role."""
    return _PROBE in _render_instructions(template, role)


def _render_instructions(template: ChatTemplate, role: str) -> str:
    return _render(template, {"role": role, "content": _PROBE}, _USER)


def _renders_call(template: ChatTemplate, content: str | None, as_text: bool) -> bool:
    """Return whether a call is rendered with its name and without Python literals."""
    arguments = '{"city": "Rome"}' if as_text else {"city": "Rome"}
    # Every template accepts nine letters and digits; some require them.
    call = {"id": "abcdefgh0", "type": "function", "function": {"name": _PROBE, "arguments": arguments}}
    call_message: Message = {"role": "assistant", "content": content, "tool_calls": [call]}
    result_message: Message = {"role": "tool", "content": "1", "tool_call_id": call["id"], "name": "f"}
    before = _render(template, _USER, tools=[_TOOL])
    rendered = _render(template, _USER, call_message, result_message, tools=[_TOOL])
    return _PROBE in rendered and all(rendered.count(odd) <= before.count(odd) for odd in ("None", "{'city'"))


def _render(template: ChatTemplate, *messages: Message, tools: list[dict[str, Any]] | None = None) -> str:
    """Return the prompt, or an empty string if the template rejects the messages."""
    try:
        return template.render(messages, tools=tools)
    except InvalidRequest:
        return ""
