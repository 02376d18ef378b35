"""Grammars of the formats with JSON arguments, with markers as special tokens and as text."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers

from syringa.prompt.chat.tools import ToolUse
from tests.prompt.grammar.matching import STRICT, TIME, byte_tokenizer, call_grammar, follows, use
from tests.prompt.grammar.tools.json_formats import DEEPSEEK, JSON_FORMATS, KIMI, JsonFormatCase

GOOD = ("weather", {"city": 'Zürich "x"', "days": 3})
NOW: tuple[str, dict[str, Any]] = ("time", {})
LOOSE = ("weather", {"town": [1, {"x": None}]})
CASES = [
    pytest.param(family, vocabulary, id=f"{family.format}-{spelled}")
    for family in JSON_FORMATS
    for vocabulary, spelled in zip(family.vocabularies(), ("spelled", "special", "added"), strict=True)
]


class Writer:
    """Check whether a grammar allows calls."""

    def __init__(self, family: JsonFormatCase, vocabulary: tokenizers.Tokenizer, tools: ToolUse) -> None:
        self.write = family.write
        self._vocabulary = vocabulary
        self._grammar = call_grammar(tools, family.format, vocabulary)

    def fits(self, *calls: tuple[str, dict[str, Any]], before: str = "", after: str = "") -> bool:
        return self.allows(before + self.write(list(calls)) + after)

    def allows(self, text: str) -> bool:
        return follows(self._grammar, text, self._vocabulary)


@pytest.mark.parametrize(("family", "vocabulary"), CASES)
def test_required_mode_allows_only_valid_calls(family: JsonFormatCase, vocabulary: tokenizers.Tokenizer) -> None:
    strict = Writer(family, vocabulary, use())
    assert strict.fits(GOOD)
    assert strict.fits(NOW)
    assert strict.fits(GOOD, NOW)
    assert strict.fits(*[NOW] * 8)
    assert not strict.fits(*[NOW] * 9)
    assert not strict.fits(LOOSE)
    assert not strict.fits(("weather", {"city": "x", "days": 12}))
    assert not strict.fits(("whether", {"city": "x"}))
    assert not strict.fits(GOOD, before="Well, ")
    assert not strict.fits(GOOD, after=" Done.")
    assert not strict.allows("")
    assert not strict.allows(family.write([GOOD])[:-1])


@pytest.mark.parametrize(("family", "vocabulary"), CASES)
def test_auto_mode_allows_text_and_calls(family: JsonFormatCase, vocabulary: tokenizers.Tokenizer) -> None:
    free = Writer(family, vocabulary, use("auto"))
    strict = Writer(family, vocabulary, use("auto", STRICT, TIME))
    for each in (free, strict):
        assert each.allows("")
        assert each.allows("hello <tool [TOOL_CALLS {")
        assert each.fits(GOOD)
        assert each.fits(GOOD, NOW)
        assert not each.fits(("whether", {"city": "x"}))
        assert not each.allows(family.write([GOOD])[:-1])
        if family.text_before:
            assert each.fits(GOOD, NOW, before="Well, Zoë.\n\n")
        assert each.fits(GOOD, after=" Done.") == family.text_after
    assert free.fits(LOOSE)
    assert not strict.fits(LOOSE)


@pytest.mark.parametrize(("family", "vocabulary"), CASES)
def test_single_tool_and_single_call_are_enforced(family: JsonFormatCase, vocabulary: tokenizers.Tokenizer) -> None:
    for mode in ("required", "auto"):
        one = Writer(family, vocabulary, use(mode, names="time", parallel=False))
        assert one.fits(NOW)
        assert not one.fits(GOOD)
        assert not one.fits(NOW, NOW)
    assert one.allows("Well.")


def follow(text: str, format: Any, *markers: str, mode: str = "required", **kwargs: Any) -> bool:
    vocabulary = byte_tokenizer(*markers)
    return follows(call_grammar(use(mode, **kwargs), format, vocabulary), text, vocabulary)


@pytest.mark.parametrize("markers", [(), ("<|python_tag|>",)])
def test_llama3_constrains_whatever_parses_as_a_call(markers: tuple[str, ...]) -> None:
    def free(text: str) -> bool:
        return follow(text, "llama3", *markers, mode="auto")

    now = '{"name": "time", "parameters": {}}'
    for text in (f"\n{now}", f"{now}\n{now}", now + now, f"{now}; {now}"):
        assert free(text), text
    assert free(f"<|python_tag|>{now}") == bool(markers)
    for text in ('{"x": 5}', "[1, 2]", '{"type": "Point", "at": 0}', '{ "names": 1', f"So: {now}", "{", ' {"'):
        assert free(text), text
    for text in (
        '{"name":"time","parameters":{}}',
        '{"name": "Bob"}',
        '\n{ "name": "time"}',
        '{"parameters": {}, "name": "time"}',
        '{"type": "function", "name": "time", "parameters": {}}',
        "<|python_tag|>{",
        "<|python_tag|>print(1)",
    ):
        assert not free(text) or (not markers and "tag" in text), text


def test_mistral_list_may_begin_with_a_space() -> None:
    for mode in ("auto", "required"):
        for text in (
            '[TOOL_CALLS][{"name": "time", "arguments": {}}]',
            '[TOOL_CALLS] [{"name": "time", "arguments": {}}]',
        ):
            assert follow(text, "mistral", mode=mode)
            assert follow(text, "mistral", "[TOOL_CALLS]", mode=mode)
    assert not follow('[TOOL_CALLS]{"name": "time", "arguments": {}}', "mistral")


def test_mistral_args_allows_valid_ids() -> None:
    for markers in ((), ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")):
        assert follow("[TOOL_CALLS]time[CALL_ID]aB3456789[ARGS]{}", "mistral-args", *markers)
        assert follow("[TOOL_CALLS]time[CALL_ID]aB3456789[ARGS]{}", "mistral-args", *markers, mode="auto")
        assert not follow("[TOOL_CALLS]time[CALL_ID]call_1[ARGS]{}", "mistral-args", *markers)


def test_kimi_requires_numbered_ids() -> None:
    section, begin, sep, end, section_end = KIMI
    for head, fits in [
        ("functions.time:12", True),
        ("functions.time:", False),
        ("functions.time", False),
        ("time:0", False),
        ("functions.time:x", False),
    ]:
        assert follow(f"{section}{begin}{head}{sep}{{}}{end}{section_end}", "kimi", *KIMI) == fits


def test_deepseek_requires_a_code_block() -> None:
    section, begin, sep, end, section_end = DEEPSEEK
    for body, fits in [
        ("time\n```json\n{}\n```", True),
        ("time\n```\n{}\n```", False),
        ("time\n{}", False),
        ("time\n```json\n{}", False),
    ]:
        assert follow(f"{section}{begin}function{sep}{body}{end}{section_end}", "deepseek", *DEEPSEEK) == fits


def test_hermes_calls_are_on_their_own_lines() -> None:
    call = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    for mode in ("auto", "required"):
        assert follow(f"{call}\n{call}", "hermes", "<tool_call>", "</tool_call>", mode=mode)
        assert not follow(call.replace("\n", ""), "hermes", "<tool_call>", "</tool_call>", mode=mode)
