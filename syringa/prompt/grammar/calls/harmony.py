"""gpt-oss: a call is a message in the commentary channel, addressed to a function, and it ends the turn."""

from __future__ import annotations

from syringa.prompt.chat.tools import ToolUse
from syringa.prompt.grammar.calls.section import callable_tools, json_arguments, one_of
from syringa.prompt.grammar.lark import ANY, Spelling

_FINAL = "<|channel|>final<|message|>"
_PREAMBLE = "<|channel|>commentary<|message|>"
_NEXT = "<|end|><|start|>assistant"


def harmony_rules(use: ToolUse, spelling: Spelling, alternative: str | None) -> list[str]:
    """As `call_rules`. Text has a header of its own here, so that no trigger is looked for in it."""
    tools = callable_tools(use)
    lines = [one_of("call", [f"call_{index}" for index in range(len(tools))])]
    for index, tool in enumerate(tools):
        head = f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>"
        lines.append(f"call_{index}: {spelling.literal(head)} arguments_{index}")
        lines.append(f"arguments_{index}: {json_arguments(tool, use)}")
    if use.mode == "required":
        return [*lines, "answer: call"]
    text = alternative or "TEXT"
    lines += [f"TEXT: {ANY}", f"preamble: {spelling.literal(_PREAMBLE)} TEXT {spelling.literal(_NEXT)}"]
    return [*lines, f"answer: preamble? (call | {spelling.literal(_FINAL)} {text})"]
