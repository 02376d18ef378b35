"""The grammar of everything a model may write: the reasoning section, up to its budget, followed by the answer."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from syringa.errors import InvalidRequest
from syringa.output_formats import REASONING_MARKERS, ReasoningFormat, ReasoningMarkers, ToolCallFormat
from syringa.prompt.chat.tools import ToolUse
from syringa.prompt.grammar.lark import (
    ANY_TEXT,
    LarkVocabulary,
    escape_regex,
    escape_slashes,
    not_starting_with,
)
from syringa.prompt.grammar.tools.formats import tool_call_rules
from syringa.types import Grammar

_JSON_OPTIONS = {"whitespace_flexible": False}


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a reasoning model may reason in one request."""

    format: ReasoningFormat
    opened: bool = False  # the prompt has opened the section, so it only has to be closed
    allowed: bool = True  # otherwise the answer begins at once
    forbid_marker: bool = False  # reasoning is not allowed, and only the grammar can prevent it, not the template
    budget: int | None = None  # in tokens, after which the section is closed


def build_output_grammar(
    vocabulary: LarkVocabulary,
    *,
    reasoning: ReasoningOptions | None = None,
    constraint: Grammar | None = None,
    tools: ToolUse | None = None,
    tool_call_format: ToolCallFormat = "plain",
) -> Grammar | None:
    """Return a grammar for the whole output, or None if nothing constrains it.

    The answer follows `constraint` and `tools`. Reasoning is part of the grammar, because the grammar sees every token:
    no other component has to know where it ends.
    """
    answer_only = reasoning is None or not (reasoning.opened or reasoning.allowed)
    unmarked = reasoning is None or not (reasoning.forbid_marker or reasoning.format == "harmony")
    if answer_only and unmarked and tools is None:
        return constraint
    bounded = reasoning is not None and (reasoning.budget is not None or not reasoning.allowed)
    if tools is None and constraint is None and not bounded:
        return None
    lines, nested = _constraint_rules(constraint)
    if constraint is None and answer_only and reasoning is not None:
        without_marker = not_starting_with(escape_regex(REASONING_MARKERS[reasoning.format].begin))
        lines = [f"ANSWER: {without_marker}", "constrained: ANSWER"]
    answer = "constrained"
    if tools is not None:
        # Under `required` the output is calls only; where text is allowed, the constraint applies to the text.
        text_constrained = constraint is not None and tools.mode == "auto"
        lines, nested = (lines, nested) if text_constrained else ([], [])
        lines += tool_call_rules(tools, tool_call_format, vocabulary, "constrained" if text_constrained else None)
        answer = "answer"
    elif reasoning is not None and (marker := REASONING_MARKERS[reasoning.format].answer_begin):
        lines.append(f"answer: {vocabulary.literal(marker)} constrained")
        answer = "answer"
    lines += _start_rules(None if answer_only else reasoning, vocabulary, answer)
    text = "\n".join(lines)
    if nested:
        return Grammar("llguidance", json.dumps({"grammars": [{"lark_grammar": text}, *nested]}))
    return Grammar("lark", text)


def _start_rules(reasoning: ReasoningOptions | None, vocabulary: LarkVocabulary, answer: str) -> list[str]:
    if reasoning is None or not (reasoning.opened or reasoning.allowed):
        return [f"start: {answer}"]
    markers = REASONING_MARKERS[reasoning.format]
    # Models put line breaks between the reasoning and the answer.
    lines = [*_reasoning_rules(markers, reasoning.budget, vocabulary), r"GAP: /[ \n]{0,4}/"]
    if reasoning.opened:
        return [*lines, f"start: reasoning GAP {answer}"]
    return [*lines, f"start: ({vocabulary.literal(markers.begin)} reasoning GAP)? {answer}"]


def _reasoning_rules(markers: ReasoningMarkers, budget: int | None, vocabulary: LarkVocabulary) -> list[str]:
    """Return the rule `reasoning`: the rest of an opened section, with its end marker."""
    end = vocabulary.literal(markers.end)
    if budget == 0:
        return [f"reasoning: {end}"]
    if not vocabulary.starts_with_special(markers.end):
        if budget is not None:
            raise InvalidRequest(
                "The end marker of this model's reasoning is not a special token: no token budget can be enforced.",
                param="thinking_token_budget",
            )
        return [f"REASONING: {ANY_TEXT}", f"reasoning[lazy]: REASONING {end}"]
    # A special token ends free text by itself.
    limit = "" if budget is None else f"[max_tokens={budget}]"
    return [f"REASONING: {ANY_TEXT}", f"free{limit}: REASONING", f"reasoning: free {end}"]


def _constraint_rules(constraint: Grammar | None) -> tuple[list[str], list[dict[str, Any]]]:
    """Return rules that define `constrained`, and the nested grammars that they refer to."""
    if constraint is None:
        return [f"ANSWER: {ANY_TEXT}", "constrained: ANSWER"], []
    if constraint.kind == "json_schema":
        schema = json.loads(constraint.value)
        schema = {"x-guidance": _JSON_OPTIONS, **schema} if isinstance(schema, dict) else schema
        return [f"constrained: %json {json.dumps(schema)}"], []
    if constraint.kind == "regex":
        return ["constrained: @constraint"], [{"name": "constraint", "lark_grammar": _regex_grammar(constraint.value)}]
    if constraint.kind == "lark":
        return ["constrained: @constraint"], [{"name": "constraint", "lark_grammar": constraint.value}]
    grammars = json.loads(constraint.value).get("grammars", [])
    return ["constrained: @constraint"], [{**grammars[0], "name": "constraint"}, *grammars[1:]] if grammars else []


def _regex_grammar(pattern: str) -> str:
    return f"start: ANSWER\nANSWER: /{escape_slashes(pattern)}/"
