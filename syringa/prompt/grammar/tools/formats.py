"""Registry of the tool-call grammars, by format name. Add the grammar of a new tool-call format here.

Each grammar accepts what `output.tools.formats` parses for the same format. Formats that write arguments as JSON are
defined here; those that do not have to spell schemas out and have modules of their own (`tagged`, `gemma`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from syringa.output_formats import (
    DELIMITED_FORMATS,
    FENCE_BEGIN,
    GEMMA_FORMATS,
    TAGGED_FORMATS,
    TOOL_CALL_BEGIN,
    TOOL_CALL_END,
    DelimitedCallFormat,
    ToolCallFormat,
)
from syringa.prompt.chat.tools import ToolUse
from syringa.prompt.grammar.lark import ANY_TEXT, LarkVocabulary, escape_regex, not_starting_with
from syringa.prompt.grammar.tools.base import (
    MAX_CALLS,
    CallGrammar,
    alternatives,
    callable_tools,
    json_arguments,
    repeated_calls,
)
from syringa.prompt.grammar.tools.fenced import block_rules
from syringa.prompt.grammar.tools.gemma import gemma_grammar
from syringa.prompt.grammar.tools.tagged import tagged_grammar

_NAME_KEY = '{"name": "'
_WHITESPACE = r"[ \t\r\n]*"
_PYTHON_TAG = "<|python_tag|>"
# Any start that the Llama 3 parser would read as a call; other JSON stays text.
_LLAMA3_CALL_START = (
    rf"{_WHITESPACE}(<\|python_tag\|>)?{_WHITESPACE}\{{{_WHITESPACE}"
    rf'("(name|parameters|arguments)"|"type"{_WHITESPACE}:{_WHITESPACE}"function")'
)
_HARMONY_FINAL = "<|channel|>final<|message|>"
_HARMONY_PREAMBLE = "<|channel|>commentary<|message|>"
_HARMONY_NEXT_MESSAGE = "<|end|><|start|>assistant"


def tool_call_rules(
    use: ToolUse, format: ToolCallFormat, vocabulary: LarkVocabulary, alternative: str | None = None
) -> list[str]:
    """Return Lark rules, of which `answer` is everything the model may write after reasoning.

    Under `auto`, text is free until a call begins; the call follows the format, or is written in a code block, and the
    arguments of a `strict` tool follow its schema. With the rule `alternative`, there is no free text: the answer is
    that rule, or calls. Under `required`, the answer is calls only, and every schema is enforced.
    """
    if format == "harmony":
        return _harmony_rules(use, vocabulary, alternative)
    grammar = _GRAMMARS[format](use, vocabulary)
    trigger = vocabulary.literal(grammar.trigger)
    repeats = grammar.repeats and use.parallel
    if use.mode == "required" or alternative is not None:
        again = f" ({grammar.separator} {trigger} section){{0,{MAX_CALLS - 1}}}" if repeats else ""
        other = f"{alternative} | " if alternative is not None and use.mode == "auto" else ""
        return [*grammar.lines, f"answer: {other}{trigger} section{again}"]
    lines = [*grammar.lines, f"TEXT: {ANY_TEXT}"]
    if format in TAGGED_FORMATS or format in GEMMA_FORMATS:  # only calls in code blocks have their arguments as JSON
        tools = enumerate(callable_tools(use))
        lines += [f"arguments_{index}: {json_arguments(tool, use)}" for index, tool in tools]

    def text_rules(name: str, text: str) -> list[str]:
        """Return rules whose `name` is text to the end: it starts with the terminal `text`, calls may follow."""
        # Lazy: a complete trigger starts a call instead of continuing the text.
        rules = [f'{name}_fence[lazy]: {text} "{FENCE_BEGIN}"']
        found = [text, f"{name}_fence block"]
        if not grammar.opening:
            # A model may also spell out a trigger that is a special token of its vocabulary.
            rules.append(f"{name}_spelled[lazy]: {text} {json.dumps(grammar.trigger, ensure_ascii=False)}")
            before, tokens = vocabulary.split_at_special(grammar.trigger)
            if tokens:
                rules.append(f"{name.upper()}_BEFORE: {text} {json.dumps(before, ensure_ascii=False)}")
            opened = f"({name}_spelled | {name.upper()}_BEFORE {tokens})" if tokens else f"{name}_spelled"
            found.append(f"{opened} section" + (" rest" if repeats else ""))
        return [*rules, alternatives(name, found)]

    lines += [*text_rules("rest", "TEXT"), *block_rules(use, text_rules)]
    if not grammar.opening:
        return [*lines, "answer: rest"]
    lines += [f"START: {not_starting_with(grammar.excluded)}", *text_rules("beginning", "START")]
    return [*lines, f"answer: beginning | {grammar.opening} section"]


def _call_rule(use: ToolUse) -> str:
    return alternatives("call", [f"call_{index}" for index in range(len(callable_tools(use)))])


def _json_object_rules(use: ToolUse, *, key: str = "arguments", before: str = _NAME_KEY, after: str = "") -> list[str]:
    """Return rules whose `call` is a JSON object; `before` precedes the name, `after` follows the object."""
    lines = [_call_rule(use)]
    for index, tool in enumerate(callable_tools(use)):
        head = json.dumps(f'{before}{json.dumps(tool.name)[1:]}, "{key}": ')
        lines.append(f"call_{index}: {head} arguments_{index} {json.dumps('}' + after)}")
        lines.append(f"arguments_{index}: {json_arguments(tool, use)}")
    return lines


def _delimited_grammar(
    format: DelimitedCallFormat,
    use: ToolUse,
    vocabulary: LarkVocabulary,
    *,
    before_name: str = "",
    after_name: str = "",
    separator: str = "",
    extra_rules: tuple[str, ...] = (),
) -> CallGrammar:
    """Return the grammar of a delimited format. `before_name` is text, `after_name` and `separator` are Lark.

    The section marker is the trigger where the format has one, otherwise the marker of a call.
    """
    begin = (format.begin if format.section_begin else "") + before_name
    arguments_begin = vocabulary.literal(format.arguments_begin + ("```json\n" if format.code_block else ""))
    end_text = ("\n```" if format.code_block else "") + format.end
    end = vocabulary.literal(end_text) if end_text else ""
    lines = [_call_rule(use)]
    for index, tool in enumerate(callable_tools(use)):
        head = vocabulary.literal(begin + tool.name)
        lines.append(f"call_{index}: {head} {after_name} {arguments_begin} arguments_{index} {end}")
        lines.append(f"arguments_{index}: {json_arguments(tool, use)}")
    lines += extra_rules
    if not format.section_begin:
        return CallGrammar(trigger=format.begin, lines=[*lines, "section: call"], repeats=True)
    lines.append(f"section: {repeated_calls('call', separator, use)} {vocabulary.literal(format.section_end)}")
    return CallGrammar(trigger=format.section_begin, lines=lines)


def _hermes(line_break: str, use: ToolUse, vocabulary: LarkVocabulary) -> CallGrammar:
    lines = _json_object_rules(use, before=line_break + _NAME_KEY, after=line_break)
    lines.append(f"section: call {vocabulary.literal(TOOL_CALL_END)}")
    # A model without training on this format finds a line break likelier than the end: if one could lead to the next
    # call, it would call as often as it may.
    separator = r'"\n"' if vocabulary.is_special(TOOL_CALL_BEGIN) else ""
    return CallGrammar(trigger=TOOL_CALL_BEGIN, lines=lines, repeats=True, separator=separator)


def _llama3(use: ToolUse, vocabulary: LarkVocabulary) -> CallGrammar:
    """Calls follow each other directly, or with a semicolon or a line break between them."""
    lines = _json_object_rules(use, key="parameters", before="")
    more = rf' (("; " | "\n")? {json.dumps(_NAME_KEY)} call){{0,{MAX_CALLS - 1}}}' if use.parallel else ""
    lines.append(f"section: call{more}")
    lines.append(rf"OPENING: /[ \n]*{escape_regex(_NAME_KEY)}/")
    tag = f"{vocabulary.literal(_PYTHON_TAG)}? " if vocabulary.is_special(_PYTHON_TAG) else ""
    return CallGrammar(trigger=_NAME_KEY, lines=lines, opening=f"{tag}OPENING", excluded=_LLAMA3_CALL_START)


def _mistral(use: ToolUse, vocabulary: LarkVocabulary) -> CallGrammar:
    """SentencePiece vocabularies write a space before the list, later ones do not."""
    calls = repeated_calls("call", '", "', use)
    return CallGrammar(trigger="[TOOL_CALLS]", lines=[*_json_object_rules(use), f'section: " "? "[" {calls} "]"'])


def _mistral_args(use: ToolUse, vocabulary: LarkVocabulary) -> CallGrammar:
    """Some models write the id of the call before its arguments."""
    rules = (f"id: ({vocabulary.literal('[CALL_ID]')} ID)?", "ID: /[a-zA-Z0-9]{9}/")
    return _delimited_grammar(DELIMITED_FORMATS["mistral-args"], use, vocabulary, after_name="id", extra_rules=rules)


def _harmony_rules(use: ToolUse, vocabulary: LarkVocabulary, alternative: str | None) -> list[str]:
    """Like `tool_call_rules`. Text has a header of its own, so no trigger is searched for in it."""
    lines = [_call_rule(use)]
    for index, tool in enumerate(callable_tools(use)):
        head = f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>"
        lines.append(f"call_{index}: {vocabulary.literal(head)} arguments_{index}")
        lines.append(f"arguments_{index}: {json_arguments(tool, use)}")
    if use.mode == "required":
        return [*lines, "answer: call"]
    preamble, following = vocabulary.literal(_HARMONY_PREAMBLE), vocabulary.literal(_HARMONY_NEXT_MESSAGE)
    lines += [f"TEXT: {ANY_TEXT}", f"preamble: {preamble} TEXT {following}"]
    return [*lines, f"answer: preamble? (call | {vocabulary.literal(_HARMONY_FINAL)} {alternative or 'TEXT'})"]


_GRAMMARS: dict[ToolCallFormat, Callable[[ToolUse, LarkVocabulary], CallGrammar]] = {
    # Without line breaks, which a model without training on the format would go on writing.
    "plain": partial(_hermes, ""),
    "hermes": partial(_hermes, "\n"),
    "llama3": _llama3,
    "mistral": _mistral,
    "mistral-args": _mistral_args,
    "deepseek": partial(_delimited_grammar, DELIMITED_FORMATS["deepseek"], separator=r'"\n"'),
    "deepseek-v3.1": partial(_delimited_grammar, DELIMITED_FORMATS["deepseek-v3.1"]),
    # The name is part of the id `functions.name:0`, in which the calls of a conversation are counted.
    "kimi": partial(
        _delimited_grammar,
        DELIMITED_FORMATS["kimi"],
        before_name="functions.",
        after_name="NUMBER",
        extra_rules=("NUMBER: /:[0-9]{1,4}/",),
    ),
    **{name: partial(tagged_grammar, tags) for name, tags in TAGGED_FORMATS.items()},
    **{name: partial(gemma_grammar, format) for name, format in GEMMA_FORMATS.items()},
}
