"""The grammar of calls, in the format of each family. One file per family."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from syringa.output_formats import CALL_TAGS, GEMMA_MARKS, CallFormat
from syringa.prompt.chat.tools import ToolUse
from syringa.prompt.grammar.calls import deepseek, hermes, kimi, llama3, mistral
from syringa.prompt.grammar.calls.gemma import gemma
from syringa.prompt.grammar.calls.harmony import harmony_rules
from syringa.prompt.grammar.calls.section import MAX_CALLS, Section
from syringa.prompt.grammar.calls.tagged import tagged
from syringa.prompt.grammar.lark import ANY, Spelling, not_starting

_SECTIONS: dict[CallFormat, Callable[[ToolUse, Spelling], Section]] = {
    "plain": hermes.plain,
    "hermes": hermes.hermes,
    "llama3": llama3.llama3,
    "mistral": mistral.mistral,
    "mistral-args": mistral.mistral_args,
    "deepseek": deepseek.deepseek,
    "deepseek-v3.1": deepseek.deepseek_v31,
    "kimi": kimi.kimi,
    **{name: partial(tagged, tags) for name, tags in CALL_TAGS.items()},
    **{name: partial(gemma, marks) for name, marks in GEMMA_MARKS.items()},
}


def call_rules(use: ToolUse, format: CallFormat, spelling: Spelling, alternative: str | None = None) -> list[str]:
    """Lark rules, of which `answer` is all that the model may write, once it has thought.

    Under `auto` text is free until a call begins; from there on it is held to the format, and under a tool's `strict`
    its arguments to the schema. With an `alternative`, a rule, there is no free text: it is that, or calls. Under
    `required` there is nothing but calls, and every schema holds.
    """
    if format == "harmony":
        return harmony_rules(use, spelling, alternative)
    section = _SECTIONS[format](use, spelling)
    trigger = spelling.literal(section.trigger)
    many = section.repeats and use.parallel
    if use.mode == "required" or alternative is not None:
        again = f" ({section.between} {trigger} section){{0,{MAX_CALLS - 1}}}" if many else ""
        other = f"{alternative} | " if alternative is not None and use.mode == "auto" else ""
        return [*section.lines, f"answer: {other}{trigger} section{again}"]
    lines = [*section.lines, f"TEXT: {ANY}"]
    if section.opening:
        return [*lines, f"OTHER: {not_starting(section.excluded)}", f"answer: OTHER | {section.opening} section"]
    # Lazy: once the trigger is there it is a call, and not more of the text. A model may spell what is a token to it.
    lines.append(f"spelt[lazy]: TEXT {json.dumps(section.trigger, ensure_ascii=False)}")
    before, tokens = spelling.cut(section.trigger)
    if tokens:
        lines.append(f"BEFORE: TEXT {json.dumps(before, ensure_ascii=False)}" if before else "BEFORE: TEXT")
    lines.append("open: spelt" + (f" | BEFORE {tokens}" if tokens else ""))
    lines.append("answer: (open section)* TEXT" if many else "answer: TEXT | open section")
    return lines
