"""Writers of the tool-call formats with JSON arguments."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import tokenizers

from syringa.output_formats import ToolCallFormat
from tests.prompt.grammar.matching import byte_tokenizer

Call = tuple[str, dict[str, Any]]

DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)


class JsonFormatCase(msgspec.Struct, frozen=True, kw_only=True):
    """A format. `write` writes calls as the model would; `markers` may be special tokens."""

    format: ToolCallFormat
    write: Callable[[list[Call]], str]
    markers: tuple[str, ...] = ()
    text_before: bool = True  # under `auto`
    text_after: bool = False

    def vocabularies(self) -> list[tokenizers.Tokenizer]:
        """Return tokenizers with the markers as text, as special tokens and as other added tokens."""
        return [byte_tokenizer(), byte_tokenizer(*self.markers), byte_tokenizer(plain=self.markers)]


def _hermes(calls: list[Call]) -> str:
    return "".join(f"<tool_call>\n{_object(call, 'arguments')}\n</tool_call>" for call in calls)


def _plain(calls: list[Call]) -> str:
    return "".join(f"<tool_call>{_object(call, 'arguments')}</tool_call>" for call in calls)


def _llama3(calls: list[Call]) -> str:
    return "; ".join(_object(call, "parameters") for call in calls)


def _mistral(calls: list[Call]) -> str:
    return "[TOOL_CALLS] [" + ", ".join(_object(call, "arguments") for call in calls) + "]"


def _mistral_args(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


def _deepseek(calls: list[Call]) -> str:
    section, begin, sep, end, section_end = DEEPSEEK
    each = [f"{begin}function{sep}{name}\n```json\n{_json(arguments)}\n```{end}" for name, arguments in calls]
    return section + "\n".join(each) + section_end


def _deepseek_v31(calls: list[Call]) -> str:
    section, begin, sep, end, section_end = DEEPSEEK
    return section + "".join(f"{begin}{name}{sep}{_json(arguments)}{end}" for name, arguments in calls) + section_end


def _kimi(calls: list[Call]) -> str:
    section, begin, sep, end, section_end = KIMI
    each = [f"{begin}functions.{name}:{n}{sep}{_json(arguments)}{end}" for n, (name, arguments) in enumerate(calls)]
    return section + "".join(each) + section_end


def _object(call: Call, key: str) -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def _json(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


JSON_FORMATS = [
    JsonFormatCase(format="plain", write=_plain, text_after=True),
    JsonFormatCase(format="hermes", write=_hermes, text_after=True),
    JsonFormatCase(format="llama3", write=_llama3, markers=("<|python_tag|>",), text_before=False),
    JsonFormatCase(format="mistral", write=_mistral, markers=("[TOOL_CALLS]",)),
    JsonFormatCase(
        format="mistral-args", write=_mistral_args, markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), text_after=True
    ),
    JsonFormatCase(format="deepseek", write=_deepseek, markers=DEEPSEEK),
    JsonFormatCase(format="deepseek-v3.1", write=_deepseek_v31, markers=DEEPSEEK),
    JsonFormatCase(format="kimi", write=_kimi, markers=KIMI),
]
