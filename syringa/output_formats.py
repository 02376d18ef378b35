"""Tool-call and reasoning formats of model families: their names and markers, as data.

The prompt side derives grammars from them (`prompt.grammar.tools`, `prompt.grammar.output_grammar`), the output side
parsers (`output.tools`, `output.reasoning`). The formats of a model are detected from its chat template and can be set
explicitly (`prompt.chat.format_detection`).
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

ToolCallFormat = Literal[
    "plain",  # for models whose template has no tools: <tool_call>{"name": …, "arguments": {…}}</tool_call>
    "hermes",  # Hermes, Qwen 2.5 and 3: the same, with the object on its own line
    "qwen-coder",  # <tool_call><function=…><parameter=…>…</parameter></function></tool_call>
    "llama3",  # {"name": …, "parameters": {…}} and nothing else
    "mistral",  # [TOOL_CALLS][{"name": …, "arguments": {…}}, …]
    "mistral-args",  # [TOOL_CALLS]name[ARGS]{…}
    "deepseek",  # V3 and R1: <｜tool▁call▁begin｜>function<｜tool▁sep｜>name, arguments in a code block
    "deepseek-v3.1",  # <｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}
    "deepseek-dsml",  # V3.2: <｜DSML｜invoke name="…"><｜DSML｜parameter name="…" string="true">…
    "kimi",  # <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}
    "glm",  # <tool_call>name<arg_key>…</arg_key><arg_value>…</arg_value></tool_call>
    "minimax",  # <minimax:tool_call><invoke name="…"><parameter name="…">…
    "gemma",  # <|tool_call>call:name{key:<|"|>text<|"|>}<tool_call|>
    "function-gemma",  # <start_function_call>call:name{key:<escape>text<escape>}<end_function_call>
    "harmony",  # gpt-oss: a message in the commentary channel, to=functions.name
]
TOOL_CALL_FORMATS: tuple[ToolCallFormat, ...] = get_args(ToolCallFormat)

TOOL_CALL_BEGIN, TOOL_CALL_END = "<tool_call>", "</tool_call>"

# A Markdown code block, in which some models write calls instead of in their own format.
FENCE_BEGIN, FENCE_END = "```json", "```"

ReasoningFormat = Literal["think", "kimi-vl", "mistral", "gemma", "harmony"]


class ReasoningMarkers(msgspec.Struct, frozen=True):
    """Markers around the reasoning section, and before the answer that follows it."""

    begin: str
    end: str
    answer_begin: str = ""


# Harmony writes reasoning and answers as messages in channels. These markers serve its grammar; `output.harmony` parses
# the messages themselves.
REASONING_MARKERS: dict[ReasoningFormat, ReasoningMarkers] = {
    "think": ReasoningMarkers("<think>", "</think>"),  # DeepSeek, Qwen3, Kimi, GLM, MiniMax
    "kimi-vl": ReasoningMarkers("◁think▷", "◁/think▷"),
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]"),
    "gemma": ReasoningMarkers("<|channel>thought\n", "<channel|>"),
    "harmony": ReasoningMarkers(
        "<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|channel|>final<|message|>"
    ),
}


class DelimitedCallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Calls whose name and JSON arguments are separated by markers: `begin` NAME `arguments_begin` {…} `end`."""

    begin: str
    arguments_begin: str
    end: str = ""
    code_block: bool = False  # the arguments are in a Markdown code block
    section_begin: str = ""  # before all calls
    section_end: str = ""


DELIMITED_FORMATS: dict[ToolCallFormat, DelimitedCallFormat] = {
    "mistral-args": DelimitedCallFormat(begin="[TOOL_CALLS]", arguments_begin="[ARGS]"),
    "deepseek": DelimitedCallFormat(
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        arguments_begin="\n",
        end="<｜tool▁call▁end｜>",
        code_block=True,
        section_begin="<｜tool▁calls▁begin｜>",
        section_end="<｜tool▁calls▁end｜>",
    ),
    "deepseek-v3.1": DelimitedCallFormat(
        begin="<｜tool▁call▁begin｜>",
        arguments_begin="<｜tool▁sep｜>",
        end="<｜tool▁call▁end｜>",
        section_begin="<｜tool▁calls▁begin｜>",
        section_end="<｜tool▁calls▁end｜>",
    ),
    "kimi": DelimitedCallFormat(
        begin="<|tool_call_begin|>",
        arguments_begin="<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
        section_begin="<|tool_calls_section_begin|>",
        section_end="<|tool_calls_section_end|>",
    ),
}


class TaggedCallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Calls with one tag for each argument.

    A section is `begin` calls `end`; a call is `call_begin` NAME `name_end` parameters `call_end`; a parameter is
    `key_begin` KEY `key_end` `value_begin` VALUE `value_end`. Without a `call_end`, a section is a single call and its
    end ends the call.
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
    inner_token: str = ""  # a part of the markers that may be a special token of the vocabulary
    multiple_calls: bool = False  # whether a section may contain several calls
    padded: bool = False  # whether a value is surrounded by line breaks that are not part of it
    type_attribute: bool = False  # whether `string="true"` or `string="false"` follows the key
    line_breaks: Literal["always", "sometimes"] = "always"  # between tags


TAGGED_FORMATS: dict[ToolCallFormat, TaggedCallFormat] = {
    "qwen-coder": TaggedCallFormat(
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
    # GLM 4.5 and 4.6 write line breaks, later versions do not.
    "glm": TaggedCallFormat(
        begin="<tool_call>",
        end="</tool_call>",
        key_begin="<arg_key>",
        key_end="</arg_key>",
        value_begin="<arg_value>",
        value_end="</arg_value>",
        line_breaks="sometimes",
    ),
    "minimax": TaggedCallFormat(
        begin="<minimax:tool_call>",
        end="</minimax:tool_call>",
        call_begin='<invoke name="',
        name_end='">',
        call_end="</invoke>",
        key_begin='<parameter name="',
        key_end='"',
        value_begin=">",
        value_end="</parameter>",
        multiple_calls=True,
    ),
    "deepseek-dsml": TaggedCallFormat(
        begin="<｜DSML｜function_calls>",
        end="</｜DSML｜function_calls>",
        call_begin='<｜DSML｜invoke name="',
        name_end='">',
        call_end="</｜DSML｜invoke>",
        key_begin='<｜DSML｜parameter name="',
        key_end='"',
        value_begin=">",
        value_end="</｜DSML｜parameter>",
        inner_token="｜DSML｜",
        multiple_calls=True,
        type_attribute=True,
    ),
}


class GemmaCallFormat(msgspec.Struct, frozen=True):
    """Markers around a call, and the marker that quotes a string."""

    begin: str
    end: str
    quote: str


GEMMA_FORMATS: dict[ToolCallFormat, GemmaCallFormat] = {
    "gemma": GemmaCallFormat("<|tool_call>", "<tool_call|>", '<|"|>'),
    "function-gemma": GemmaCallFormat("<start_function_call>", "<end_function_call>", "<escape>"),
}


class ModelFormats(msgspec.Struct, frozen=True, kw_only=True):
    """The output formats a model was trained on."""

    tool_calls: ToolCallFormat = "plain"
    reasoning: ReasoningFormat | None = None
    supports_tools: bool = False  # whether the chat template takes `tools`; otherwise the prompt describes them


def content_markers(formats: ModelFormats) -> frozenset[str]:
    """Return the markers that an assistant's text may contain: those of reasoning and of tagged tool calls.

    Harmony has none: its markers separate messages.
    """
    found = {TOOL_CALL_BEGIN, TOOL_CALL_END} if formats.tool_calls in ("plain", "hermes") else set()
    if formats.reasoning is not None and formats.reasoning != "harmony":
        reasoning = REASONING_MARKERS[formats.reasoning]
        found |= {reasoning.begin, reasoning.end}
    if tags := TAGGED_FORMATS.get(formats.tool_calls):
        found |= {tags.begin, tags.end, tags.call_begin, tags.call_end}
        found |= {tags.key_begin, tags.key_end, tags.value_begin, tags.value_end}
    return frozenset(found)
