"""Detect the tool-call and reasoning formats of a model from its chat template and its vocabulary."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec

from syringa.output_formats import ModelFormats, ReasoningFormat, ToolCallFormat
from syringa.prompt.chat.template import template_variables

# A template that writes a format contains all of its markers; of a set, one is enough. The first match wins: later
# formats share markers with earlier ones.
_TOOL_CALL_MARKERS: tuple[tuple[ToolCallFormat, tuple[str | set[str], ...]], ...] = (
    ("harmony", ("<|channel|>commentary", "<|message|>")),
    ("gemma", ("<|tool_call>",)),
    ("function-gemma", ("<start_function_call>",)),
    ("deepseek-dsml", ("｜DSML｜",)),
    ("deepseek", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek-v3.1", ("<｜tool▁call▁begin｜>",)),
    ("kimi", ("<|tool_call_begin|>", "<|tool_call_argument_begin|>")),
    ("minimax", ("<minimax:tool_call>", "<invoke name=")),
    ("mistral-args", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen-coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("llama3", ('"parameters"', {"<|python_tag|>", "Environment: ipython", "<|start_header_id|>"})),
)

# Looked for in the template and among the added tokens.
_REASONING_MARKERS: tuple[tuple[ReasoningFormat, set[str]], ...] = (
    ("harmony", {"<|channel|>"}),
    ("gemma", {"<|channel>"}),
    ("mistral", {"[THINK]"}),
    ("kimi-vl", {"◁think▷"}),
    ("think", {"<think>", "</think>"}),
)


def detect_formats(template: str | None, tool_template: str | None, added_tokens: Collection[str]) -> ModelFormats:
    """Return the formats of a model with these chat templates and these tokens added to its vocabulary.

    A template that accepts tools but writes calls in an unknown format counts as one without tools: the prompt then
    describes the tools in the plain format, and calls are parsed in it.
    """
    source = _joined_source(template, tool_template)
    tool_calls = _tool_call_format(source) if accepts_tools(template, tool_template) else None
    return ModelFormats(
        tool_calls=tool_calls or "plain",
        reasoning=_reasoning_format(source, added_tokens),
        supports_tools=tool_calls is not None,
    )


def resolve_formats(
    template: str | None,
    tool_template: str | None,
    added_tokens: Collection[str],
    *,
    tool_calls: ToolCallFormat | Literal["auto"] = "auto",
    reasoning: ReasoningFormat | Literal["auto", "none"] = "auto",
) -> ModelFormats:
    """Return the detected formats, with those that are configured explicitly in place of `auto`."""
    found = detect_formats(template, tool_template, added_tokens)
    if tool_calls != "auto":
        supports_tools = tool_calls != "plain" and accepts_tools(template, tool_template)
        found = msgspec.structs.replace(found, tool_calls=tool_calls, supports_tools=supports_tools)
    if reasoning != "auto":
        found = msgspec.structs.replace(found, reasoning=None if reasoning == "none" else reasoning)
    return found


def accepts_tools(template: str | None, tool_template: str | None) -> bool:
    """Return whether one of the templates reads the variable `tools`."""
    return any("tools" in template_variables(source) for source in (template, tool_template) if source)


def _joined_source(*sources: str | None) -> str:
    # Quotation marks may be escaped inside a string of the template.
    return "\n".join(source for source in sources if source).replace("\\", "")


def _tool_call_format(source: str) -> ToolCallFormat | None:
    for format, markers in _TOOL_CALL_MARKERS:
        if all(any(each in source for each in ({marker} if isinstance(marker, str) else marker)) for marker in markers):
            return format
    return None


def _reasoning_format(source: str, added_tokens: Collection[str]) -> ReasoningFormat | None:
    # The template comes first: a vocabulary often has markers of the family's other models.
    for format, markers in _REASONING_MARKERS:
        if any(marker in source for marker in markers):
            return format
    known = frozenset(added_tokens)
    return next((format for format, markers in _REASONING_MARKERS if markers & known), None)
