"""One grammar for all that a model may write: its thought, free but for its length, and then the answer."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from syringa.errors import InvalidRequest
from syringa.output_formats import THOUGHTS, CallFormat, ThoughtFormat, ThoughtMarks
from syringa.prompt.chat.tools import ToolUse
from syringa.prompt.grammar.calls import call_rules
from syringa.prompt.grammar.lark import ANY, Spelling, not_starting, quoted
from syringa.types import Grammar

_LAYOUT = {"whitespace_flexible": False}


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """How the thought of a model that thinks goes in one request."""

    format: ThoughtFormat
    opened: bool = False  # the prompt has opened it, and it only has to be closed
    allowed: bool = True  # otherwise the answer begins at once
    forbidden: bool = False  # and the template has not told the model so: only the grammar can
    budget: int | None = None  # tokens; then it is closed


def answer_grammar(
    spelling: Spelling,
    *,
    thinking: Thinking | None = None,
    constraint: Grammar | None = None,
    tools: ToolUse | None = None,
    format: CallFormat = "plain",
) -> Grammar | None:
    """Holds the output to `constraint` and `tools`, and the thought to its budget; None: anything goes.

    A thought is part of the grammar, because the grammar sees every token: nothing else has to know when it ends.
    """
    thoughtless = thinking is None or not (thinking.opened or thinking.allowed)
    told = thinking is None or not (thinking.forbidden or thinking.format == "harmony")
    if thoughtless and told and tools is None:
        return constraint
    bounded = thinking is not None and (thinking.budget is not None or not thinking.allowed)
    if tools is None and constraint is None and not bounded:
        return None
    lines, inner = _constraint_rules(constraint)
    if constraint is None and thoughtless and thinking is not None:
        lines = [f"ANSWER: {not_starting(quoted(THOUGHTS[thinking.format].begin))}", "constrained: ANSWER"]
    answer = "constrained"
    if tools is not None:
        # What only calls may satisfy leaves no room for the constraint; where text is allowed, it holds the text.
        bound = constraint is not None and tools.mode == "auto"
        lines, inner = (lines, inner) if bound else ([], [])
        lines += call_rules(tools, format, spelling, "constrained" if bound else None)
        answer = "answer"
    elif thinking is not None and (begun := THOUGHTS[thinking.format].answer):
        lines.append(f"answer: {spelling.literal(begun)} constrained")
        answer = "answer"
    lines += _start(None if thoughtless else thinking, spelling, answer)
    text = "\n".join(lines)
    if inner:
        return Grammar("llguidance", json.dumps({"grammars": [{"lark_grammar": text}, *inner]}))
    return Grammar("lark", text)


def _start(thinking: Thinking | None, spelling: Spelling, answer: str) -> list[str]:
    if thinking is None or not (thinking.opened or thinking.allowed):
        return [f"start: {answer}"]
    marks = THOUGHTS[thinking.format]
    # Models put line breaks between a thought and what follows.
    lines = [*_thought_rules(marks, thinking.budget, spelling), r"GAP: /[ \n]{0,4}/"]
    if thinking.opened:
        return [*lines, f"start: thought GAP {answer}"]
    return [*lines, f"start: ({spelling.literal(marks.begin)} thought GAP)? {answer}"]


def _thought_rules(marks: ThoughtMarks, budget: int | None, spelling: Spelling) -> list[str]:
    """The rule `thought`: the rest of one that has been opened, with its end."""
    end = spelling.literal(marks.end)
    if budget == 0:
        return [f"thought: {end}"]
    if not spelling.begins_special(marks.end):
        if budget is not None:
            raise InvalidRequest(
                "The end of this model's thoughts is no token of its own: they cannot be held to a budget.",
                param="thinking_token_budget",
            )
        return [f"THOUGHT: {ANY}", f"thought[lazy]: THOUGHT {end}"]
    # A special token ends free text by itself.
    limit = "" if budget is None else f"[max_tokens={budget}]"
    return [f"THOUGHT: {ANY}", f"free{limit}: THOUGHT", f"thought: free {end}"]


def _constraint_rules(constraint: Grammar | None) -> tuple[list[str], list[dict[str, Any]]]:
    """Rules with `constrained`, and the grammars that they refer to."""
    if constraint is None:
        return [f"ANSWER: {ANY}", "constrained: ANSWER"], []
    if constraint.kind == "json_schema":
        schema = json.loads(constraint.value)
        schema = {"x-guidance": _LAYOUT, **schema} if isinstance(schema, dict) else schema
        return [f"constrained: %json {json.dumps(schema)}"], []
    if constraint.kind == "regex":
        return ["constrained: @constraint"], [{"name": "constraint", "lark_grammar": _regex(constraint.value)}]
    if constraint.kind == "lark":
        return ["constrained: @constraint"], [{"name": "constraint", "lark_grammar": constraint.value}]
    grammars = json.loads(constraint.value).get("grammars", [])
    return ["constrained: @constraint"], [{**grammars[0], "name": "constraint"}, *grammars[1:]] if grammars else []


def _regex(pattern: str) -> str:
    return f"start: ANSWER\nANSWER: /{_between_slashes(pattern)}/"


def _between_slashes(pattern: str) -> str:
    """A regular expression with its slashes escaped, unless they are."""
    out, escaped = [], False
    for character in pattern:
        if character == "\n":
            out.append(r"\n")
        elif character == "/" and not escaped:
            out.append(r"\/")
        else:
            out.append(character)
        escaped = character == "\\" and not escaped
    return "".join(out)
