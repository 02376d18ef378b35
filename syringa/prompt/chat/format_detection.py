"""Finds out what a model was trained to write: its family's marks are in its chat template and in its vocabulary."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec

from syringa.output_formats import CallFormat, Dialect, ThoughtFormat
from syringa.prompt.chat.template import variables

# All of a format's marks are in a template that writes it. The first format that fits is it: those further down share
# marks with those above them. Marks that differ within a family stand in sets, of which one is enough.
_CALLS: tuple[tuple[CallFormat, tuple[str | set[str], ...]], ...] = (
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

# In a template, or as tokens of their own.
_THOUGHTS: tuple[tuple[ThoughtFormat, set[str]], ...] = (
    ("harmony", {"<|channel|>"}),
    ("gemma", {"<|channel>"}),
    ("mistral", {"[THINK]"}),
    ("kimi-vl", {"◁think▷"}),
    ("think", {"<think>", "</think>"}),
)


def detect(template: str | None, tool_template: str | None, tokens: Collection[str]) -> Dialect:
    """The dialect of a model with these chat templates and these tokens added to its vocabulary.

    A template that takes tools and tells of them in a format that we cannot read is as good as one that does not:
    then the prompt gets our own words, and the calls come in our own format.
    """
    source = _text(template, tool_template)
    calls = _calls(source) if takes_tools(template, tool_template) else None
    return Dialect(calls=calls or "plain", thought=_thought(source, tokens), knows_tools=calls is not None)


def choose(
    template: str | None,
    tool_template: str | None,
    tokens: Collection[str],
    *,
    calls: CallFormat | Literal["auto"] = "auto",
    thought: ThoughtFormat | Literal["auto", "none"] = "auto",
) -> Dialect:
    """The same, where an administrator may know better."""
    found = detect(template, tool_template, tokens)
    if calls != "auto":
        knows = calls != "plain" and takes_tools(template, tool_template)
        found = msgspec.structs.replace(found, calls=calls, knows_tools=knows)
    if thought != "auto":
        found = msgspec.structs.replace(found, thought=None if thought == "none" else thought)
    return found


def takes_tools(template: str | None, tool_template: str | None) -> bool:
    """Whether one of the templates reads `tools`."""
    return any("tools" in variables(source) for source in (template, tool_template) if source)


def _text(*sources: str | None) -> str:
    # Inside a string of the template a quotation mark may be escaped.
    return "\n".join(source for source in sources if source).replace("\\", "")


def _calls(source: str) -> CallFormat | None:
    for format, marks in _CALLS:
        if all(any(each in source for each in ({mark} if isinstance(mark, str) else mark)) for mark in marks):
            return format
    return None


def _thought(source: str, tokens: Collection[str]) -> ThoughtFormat | None:
    # The template comes first: a vocabulary often has marks of the family's other models.
    for format, marks in _THOUGHTS:
        if any(mark in source for mark in marks):
            return format
    known = frozenset(tokens)
    return next((format for format, marks in _THOUGHTS if marks & known), None)
