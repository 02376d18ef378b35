"""Grammars of the formats without JSON arguments, with markers as special tokens and as text."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from syringa.errors import InvalidRequest
from syringa.grammar import parser_limits, to_llguidance
from syringa.output_formats import TAGGED_FORMATS, ToolCallFormat
from syringa.prompt.chat.tools import Tool, ToolUse, close_schema
from tests.prompt.grammar.matching import STRICT, TIME, WEATHER, byte_tokenizer, call_grammar, follows, use
from tests.prompt.grammar.tools.unquoted_formats import FORMATS, MARKERS, vocabularies, written

Call = tuple[str, dict[str, Any]]
GOOD: Call = ("weather", {"city": 'Zürich\n"x"', "days": 3})
SHORT: Call = ("weather", {"city": ""})
NOW: Call = ("time", {})
LOOSE: Call = ("weather", {"town": [1, {"x": None}], "text": "a\nb"})
BAD: list[Call] = [
    LOOSE,
    ("weather", {"city": "x", "days": 12}),
    ("weather", {"city": "more than twelve"}),
    ("weather", {"days": 3}),
    ("weather", {"days": 3, "city": "x"}),
    ("weather", {"city": "x", "town": "y"}),
    ("time", {"x": "y"}),
]
CASES = [
    pytest.param(format, vocabulary, id=f"{format}-{spelled}")
    for format in FORMATS
    for vocabulary, spelled in zip(vocabularies(format), ("spelled", "special", "added"), strict=True)
]


class Writer:
    """Check whether a grammar allows calls."""

    def __init__(self, format: ToolCallFormat, vocabulary: tokenizers.Tokenizer, tools: ToolUse) -> None:
        self._format, self._vocabulary = format, vocabulary
        self._grammar = call_grammar(tools, format, vocabulary)

    def fits(self, *calls: Call, before: str = "", after: str = "") -> bool:
        return self.allows(before + written(self._format, *calls) + after)

    def allows(self, text: str) -> bool:
        return follows(self._grammar, text, self._vocabulary)


@pytest.mark.parametrize(("format", "vocabulary"), CASES)
def test_required_mode_allows_only_valid_calls(format: ToolCallFormat, vocabulary: tokenizers.Tokenizer) -> None:
    strict = Writer(format, vocabulary, use())
    for calls in ([GOOD], [SHORT], [NOW], [GOOD, NOW], [NOW] * 8):
        assert strict.fits(*calls), calls
    assert not strict.fits(*[NOW] * 9)
    for bad in BAD:
        assert not strict.fits(bad), bad
    assert not strict.fits(("whether", {"city": "x"}))
    assert not strict.fits(GOOD, before="Well. ")
    assert not strict.fits(GOOD, after=" Done.")
    assert not strict.allows("")
    assert not strict.allows(written(format, GOOD)[:-1])


@pytest.mark.parametrize(("format", "vocabulary"), CASES)
def test_auto_mode_allows_text_and_calls(format: ToolCallFormat, vocabulary: tokenizers.Tokenizer) -> None:
    loose = Writer(format, vocabulary, use("auto"))
    strict = Writer(format, vocabulary, use("auto", STRICT, TIME))
    for each in (loose, strict):
        for text in ("", "Well, < and {", written(format, GOOD)[:3]):
            assert each.allows(text), text
        assert each.fits(GOOD)
        assert each.fits(GOOD, NOW, before="Well.\n\n")
        assert not each.fits(("thyme", {}))
        assert not each.fits(GOOD, before=written(format, GOOD)[:-1])
        several = format in TAGGED_FORMATS and TAGGED_FORMATS[format].multiple_calls
        assert each.fits(GOOD, after=" Done.") != several
    assert loose.fits(LOOSE)
    assert not strict.fits(LOOSE)
    for bad in BAD[:-1]:
        assert not strict.fits(bad), bad


@pytest.mark.parametrize(("format", "vocabulary"), CASES)
def test_single_call_of_a_single_tool(format: ToolCallFormat, vocabulary: tokenizers.Tokenizer) -> None:
    one = Writer(format, vocabulary, use(names="time", parallel=False))
    assert one.fits(NOW)
    assert not one.fits(GOOD)
    assert not one.fits(NOW, NOW)
    auto = Writer(format, vocabulary, use("auto", parallel=False))
    assert auto.fits(NOW, before="Well. ")
    assert auto.allows("Well.")
    assert not auto.fits(NOW, NOW)


def test_glm_line_breaks_are_optional() -> None:
    text = written("glm", ("weather", {"city": "Paris", "days": 3}))
    for mode in ("required", "auto"):
        assert follows(call_grammar(use(mode), "glm"), text)
        assert follows(call_grammar(use(mode), "glm"), text.replace("\n", ""))


def test_deepseek_dsml_allows_an_empty_line_without_parameters() -> None:
    text = written("deepseek-dsml", NOW)
    assert follows(call_grammar(use(), "deepseek-dsml"), text.replace('time">\n', 'time">\n\n'))


@pytest.mark.parametrize("format", FORMATS)
def test_names_and_schemas_cannot_escape_the_grammar(format: ToolCallFormat) -> None:
    odd = {
        "type": "object",
        "properties": {"a/b %json 'x' |": {"enum": ['</p>\n| /x/ \\ "', "]"]}, "b": {"pattern": "^/[/]\\/\n$"}},
        "required": ["a/b %json 'x' |"],
    }
    tool = Tool(name="f-1_", parameters=odd, schema=close_schema(odd))
    grammar = call_grammar(use("required", tool, names="f-1_"), format)
    key = "a/b %json 'x' |"
    if format in TAGGED_FORMATS:
        assert follows(grammar, written(format, ("f-1_", {key: "]", "b": "///\n"})))
        assert follows(grammar, written(format, ("f-1_", {key: '</p>\n| /x/ \\ "'})))
    assert not follows(grammar, written(format, ("f-1_", {key: "x"})))


@pytest.mark.parametrize("format", ["qwen-coder", "minimax", "deepseek-dsml", "glm"])
def test_parameter_names_with_markers_are_rejected_if_required(format: ToolCallFormat) -> None:
    key = f"a{TAGGED_FORMATS[format].key_end}b"
    schema = {"type": "object", "properties": {key: {"type": "string"}, "c": {"type": "string"}}}
    tool = Tool(name="f", parameters=schema, schema=close_schema(schema))
    assert follows(call_grammar(use("required", tool, names="f"), format), written(format, ("f", {"c": "x"})))
    schema = {**schema, "required": [key]}
    tool = Tool(name="f", parameters=schema, schema=close_schema(schema))
    with pytest.raises(InvalidRequest, match="cannot be written"):
        call_grammar(use("required", tool, names="f"), format)


def test_unsatisfiable_schema_is_rejected() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"allOf": [{"type": "string"}, {"type": "null"}]}},
        "required": ["a"],
    }
    for format in FORMATS:
        with pytest.raises(InvalidRequest):
            call_grammar(use("required", Tool(name="f", schema=schema), names="f"), format)


def test_part_of_a_marker_may_be_a_special_token() -> None:
    """In DeepSeek's vocabulary the token is inside the markers, and the part before it is text."""
    tokenizer = byte_tokenizer(*MARKERS["deepseek-dsml"])
    auto = call_grammar(use("auto", STRICT, TIME), "deepseek-dsml", tokenizer)
    text = written("deepseek-dsml", ("weather", {"city": "a</b", "days": 1}))
    assert follows(auto, f"a < b </ {text}", tokenizer)
    assert not follows(auto, f"a < b </ {text.replace('>1<', '>x<')}", tokenizer)
    assert not follows(auto, text.replace("weather", "whether"), tokenizer)


def test_schemas_that_are_not_enforced_allow_any_arguments() -> None:
    for format in FORMATS:
        grammar = call_grammar(use("auto", WEATHER, TIME), format)
        assert follows(grammar, written(format, ("time", {"a": "b", "c": 5, "d": [{"e": None}], "f": "{"})))


@pytest.mark.parametrize("format", FORMATS)
def test_long_strings_stay_within_the_lexer_limits(format: ToolCallFormat) -> None:
    """A length bound creates many lexer states, which the end marker must not make llguidance search."""
    text = {"type": "string", "minLength": 1, "maxLength": 2000}
    either = {"anyOf": [{"type": "string", "maxLength": 500}, {"type": "object"}, {"type": "integer", "minimum": 4}]}
    schema = {"type": "object", "properties": {"a": text, "b": text, "c": either}}
    tokenizer = byte_tokenizer()
    tool = Tool(name="f", parameters=schema, schema=close_schema(schema))
    grammar = call_grammar(use("required", tool, names="f"), format, tokenizer)
    eos = tokenizer.token_to_id("<eos>")
    limits = parser_limits()
    matcher = LLMatcher(
        LLTokenizer(tokenizer.to_str(), eos_token=eos), to_llguidance(grammar), log_level=0, limits=limits
    )
    for token in tokenizer.encode(written(format, ("f", {"a": "word < " * 200, "b": "x", "c": "word " * 50}))).ids:
        assert matcher.compute_bitmask()
        assert matcher.consume_token(token), matcher.get_error()
    assert matcher.is_accepting()
