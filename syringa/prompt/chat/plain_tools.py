"""Conversations with calls for a template that knows none: calls and their results become text.

The tools stand at the beginning of the instructions. What the model called is written as it wrote it, and the results
come back as the user's words.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from syringa.prompt.chat.template import Message
from syringa.prompt.chat.tools import TOOL_CALL_BEGIN, TOOL_CALL_END, ToolUse, tools_preamble

_INSTRUCTIONS = ("system", "developer")


def without_calls(messages: Iterable[Message]) -> list[Message]:
    """The same conversation in texts alone. Results that follow each other, and what the user says after them, become
    one message: many templates want user and assistant to take turns."""
    written: list[Message] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            message = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        elif message.get("tool_calls"):
            message = _with_calls_as_text(message)
        if after_result and message["role"] == "user":
            written[-1] = {**message, "content": _before(f"{written[-1]['content']}\n", message["content"])}
        else:
            written.append(message)
        after_result = is_result
    return written


def with_tools(messages: Sequence[Message], use: ToolUse, *, takes_system: bool) -> list[Message]:
    """Tells of the tools in the first instructions, or where the template takes none, in the first words of the user;
    and shows how they are used, in turns before the conversation: a model that was never taught to call learns from
    examples what it does not from being told."""
    told = tools_preamble(use)
    begun = next((i for i, each in enumerate(messages) if each["role"] not in _INSTRUCTIONS), len(messages))
    messages = [*messages[:begun], *_examples(use), *messages[begun:]]
    roles = _INSTRUCTIONS if takes_system else ("user",)
    at = 0 if takes_system else next(i for i, each in enumerate(messages) if each["role"] == "user")
    if messages[at]["role"] not in roles:
        return [{"role": roles[0], "content": told.rstrip()}, *messages]
    messages[at] = {**messages[at], "content": _before(told, messages[at]["content"])}
    return messages


def _examples(use: ToolUse) -> list[Message]:
    """Text where no function helps, and calls where one does. The last one is of a function that there is."""
    turns = [
        ("Who wrote Faust?", "Goethe wrote Faust."),
        ("What is 3 times 4?", _call("multiply", {"a": 3, "b": 4})),
        ("Thank you!", "You are welcome."),
    ]
    tool = use.tools[0]
    asked = (tool.description or tool.name.replace("_", " ")).partition("\n")[0].strip()
    turns.append((asked, _call(tool.name, _sample(tool.parameters or {}))))
    return [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def _sample(schema: dict[str, Any]) -> dict[str, Any]:
    """Something for each parameter that is needed, of the right type where that is plain to see."""
    properties = schema.get("properties")
    needed = schema.get("required")
    if not isinstance(properties, dict) or not isinstance(needed, list):
        return {}
    return {name: _value(properties.get(name)) for name in needed if isinstance(name, str)}


def _value(schema: Any) -> Any:
    known = schema if isinstance(schema, dict) else {}
    if isinstance(known.get("enum"), list) and known["enum"]:
        return known["enum"][0]
    kinds: dict[str, Any] = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None}
    kind = known.get("type")
    return kinds.get(kind, "example") if isinstance(kind, str) else "example"


def _call(name: str, arguments: Any) -> str:
    return TOOL_CALL_BEGIN + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) + TOOL_CALL_END


def _with_calls_as_text(message: Message) -> Message:
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [_call(each["name"], each["arguments"]) for each in functions]
    text = message["content"]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join([text, *calls] if text else calls)}


def _before(text: str, content: Any) -> Any:
    """A message's content with a text before it."""
    return [{"type": "text", "text": text}, *content] if isinstance(content, list) else text + content
