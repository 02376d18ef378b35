"""How families of models write their thoughts and their calls: names and marks, as data.

The prompt side makes grammars of them (`prompt.calls`, `prompt.answer`), the output side parsers (`output.tools`,
`output.reasoning`). A model's dialect is read off its chat template, and an administrator may name another.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

CallFormat = Literal[
    "plain",  # ours, for models without tools in their template: <tool_call>{"name": …, "arguments": {…}}</tool_call>
    "hermes",  # Hermes, Qwen 2.5 and 3: the same, on lines of its own
    "qwen-coder",  # <tool_call><function=…><parameter=…>…</parameter></function></tool_call>
    "llama3",  # {"name": …, "parameters": {…}} and nothing else
    "mistral",  # [TOOL_CALLS][{"name": …, "arguments": {…}}, …]
    "mistral-args",  # [TOOL_CALLS]name[ARGS]{…}
    "deepseek",  # V3 and R1: <｜tool▁call▁begin｜>function<｜tool▁sep｜>name, then the arguments in a code block
    "deepseek-v3.1",  # <｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}
    "deepseek-dsml",  # V3.2: <｜DSML｜invoke name="…"><｜DSML｜parameter name="…" string="true">…
    "kimi",  # <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}
    "glm",  # <tool_call>name<arg_key>…</arg_key><arg_value>…</arg_value></tool_call>
    "minimax",  # <minimax:tool_call><invoke name="…"><parameter name="…">…
    "gemma",  # <|tool_call>call:name{key:<|"|>text<|"|>}<tool_call|>
    "function-gemma",  # <start_function_call>call:name{key:<escape>text<escape>}<end_function_call>
    "harmony",  # gpt-oss: a message in the commentary channel, to=functions.name
]
CALL_FORMATS: tuple[CallFormat, ...] = get_args(CallFormat)

ThoughtFormat = Literal["think", "kimi-vl", "mistral", "gemma", "harmony"]


class ThoughtMarks(msgspec.Struct, frozen=True):
    """What stands around a thought, and what begins an answer."""

    begin: str
    end: str
    answer: str = ""


# Harmony's thoughts and answers are messages in channels; these marks are for grammars, its parser is its own.
THOUGHTS: dict[ThoughtFormat, ThoughtMarks] = {
    "think": ThoughtMarks("<think>", "</think>"),  # DeepSeek, Qwen3, Kimi, GLM, MiniMax
    "kimi-vl": ThoughtMarks("◁think▷", "◁/think▷"),
    "mistral": ThoughtMarks("[THINK]", "[/THINK]"),
    "gemma": ThoughtMarks("<|channel>thought\n", "<channel|>"),
    "harmony": ThoughtMarks(
        "<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|channel|>final<|message|>"
    ),
}


class CallMarks(msgspec.Struct, frozen=True, kw_only=True):
    """What stands around a call where the name and the arguments are apart: `begin` name `arguments` {…} `end`."""

    begin: str
    arguments: str
    end: str = ""
    code: bool = False  # the arguments stand in a code block
    section: str = ""  # before all calls
    section_end: str = ""


CALL_MARKS: dict[CallFormat, CallMarks] = {
    "mistral-args": CallMarks(begin="[TOOL_CALLS]", arguments="[ARGS]"),
    "deepseek": CallMarks(
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        arguments="\n",
        end="<｜tool▁call▁end｜>",
        code=True,
        section="<｜tool▁calls▁begin｜>",
        section_end="<｜tool▁calls▁end｜>",
    ),
    "deepseek-v3.1": CallMarks(
        begin="<｜tool▁call▁begin｜>",
        arguments="<｜tool▁sep｜>",
        end="<｜tool▁call▁end｜>",
        section="<｜tool▁calls▁begin｜>",
        section_end="<｜tool▁calls▁end｜>",
    ),
    "kimi": CallMarks(
        begin="<|tool_call_begin|>",
        arguments="<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
        section="<|tool_calls_section_begin|>",
        section_end="<|tool_calls_section_end|>",
    ),
}


class CallTags(msgspec.Struct, frozen=True, kw_only=True):
    """Calls whose arguments stand in tags, one by one. What a name, a key or a value has before it and behind it.

    A call is `call_begin` NAME `name_end` parameters `call_end`; a parameter is `key_begin` KEY `key_end` `value_begin`
    VALUE `value_end`. Where there is no `call_end`, the end of the section ends the one call in it.
    """

    begin: str
    end: str
    call_begin: str = ""
    name_end: str = ""
    call_end: str = ""
    key_begin: str
    key_end: str
    value_begin: str
    value_end: str
    token: str = ""  # a part of these that may be a token of its own
    several: bool = False  # whether a section has several calls
    padded: bool = False  # whether a value stands between line breaks that are not part of it
    says_type: bool = False  # whether `string="true"` or `string="false"` stands behind the key
    line_breaks: Literal["always", "sometimes"] = "always"  # between tags


CALL_TAGS: dict[CallFormat, CallTags] = {
    "qwen-coder": CallTags(
        begin="<tool_call>",
        end="</tool_call>",
        call_begin="<function=",
        name_end=">",
        call_end="</function>",
        key_begin="<parameter=",
        key_end=">",
        value_begin="",
        value_end="</parameter>",
        padded=True,
    ),
    # GLM 4.5 and 4.6 write line breaks, later ones none.
    "glm": CallTags(
        begin="<tool_call>",
        end="</tool_call>",
        key_begin="<arg_key>",
        key_end="</arg_key>",
        value_begin="<arg_value>",
        value_end="</arg_value>",
        line_breaks="sometimes",
    ),
    "minimax": CallTags(
        begin="<minimax:tool_call>",
        end="</minimax:tool_call>",
        call_begin='<invoke name="',
        name_end='">',
        call_end="</invoke>",
        key_begin='<parameter name="',
        key_end='"',
        value_begin=">",
        value_end="</parameter>",
        several=True,
    ),
    "deepseek-dsml": CallTags(
        begin="<｜DSML｜function_calls>",
        end="</｜DSML｜function_calls>",
        call_begin='<｜DSML｜invoke name="',
        name_end='">',
        call_end="</｜DSML｜invoke>",
        key_begin='<｜DSML｜parameter name="',
        key_end='"',
        value_begin=">",
        value_end="</｜DSML｜parameter>",
        token="｜DSML｜",
        several=True,
        says_type=True,
    ),
}


class GemmaMarks(msgspec.Struct, frozen=True):
    """Around a call, and on both sides of a text."""

    begin: str
    end: str
    quote: str


GEMMA_MARKS: dict[CallFormat, GemmaMarks] = {
    "gemma": GemmaMarks("<|tool_call>", "<tool_call|>", '<|"|>'),
    "function-gemma": GemmaMarks("<start_function_call>", "<end_function_call>", "<escape>"),
}


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """What a model was trained to write."""

    calls: CallFormat = "plain"
    thought: ThoughtFormat | None = None
    knows_tools: bool = False  # whether its chat template takes `tools`; otherwise the prompt gets our own words
