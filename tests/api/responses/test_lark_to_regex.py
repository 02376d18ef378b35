"""Tests of the conversion of Lark grammars to regular expressions."""

from __future__ import annotations

import json

import pytest

from syringa.api.responses.custom_input import custom_tool_parameters
from syringa.api.responses.lark_to_regex import lark_to_regex
from syringa.errors import InvalidRequest
from syringa.prompt.grammar.validation import validate_grammar
from syringa.types import Grammar
from tests.prompt.grammar.matching import follows

ARITHMETIC = """
start: expr
expr: term (SP ADD SP term)* -> add
    | term
term: factor (SP MUL SP factor)* -> mul
    | factor
factor: INT
SP: " "
ADD: "+"  // plus
MUL: "*"
%import common.INT
"""
NESTED = """
?start: value
value: "(" value ")" | ITEM | list
list: "[" [value ("," value)*] "]"
ITEM: "a".."c"
"""
SQL = """
start: "SELECT"i COLUMN ("," COLUMN)~0..2 "FROM" NAME where?
where: "WHERE" NAME "=" (NUMBER | STRING)
COLUMN: NAME | "*"
NAME: /[a-z_]+/
STRING: "'" /[^']*/ "'"
%import common (NUMBER, WS_INLINE)
%ignore WS_INLINE
"""
LISTS = """
start: left ";" right
left: left "," ITEM | ITEM
right: ITEM "," right | ITEM
ITEM: "x"{1,2}
"""
CASES = [
    (ARITHMETIC, ["1", "1 + 2 * 3"], ["", "1+2", "1 +"]),
    (NESTED, ["a", "((a))", "[a,[b],(c)]", "[]"], ["d", "(a", "[a,]"]),
    (SQL, ["select a FROM t", "SELECT a , b FROM t WHERE a = 'it \"is\"'"], ["SELECT FROM t", "SELECT a,b,c,d FROM t"]),
    (LISTS, ["x;x", "x,xx,x,x,x,x,x,x,x;x,x,x,x,x,x,x,x,x,xx"], ["x", "x,;x", "xxx;x"]),
    ('start: /a"b/i "\\\\"+', ['A"b\\\\'], ['a"b', "ab\\"]),
]


@pytest.mark.parametrize(("definition", "fits", "does_not"), CASES)
def test_lark_to_regex_matches_what_the_grammar_matches(definition: str, fits: list[str], does_not: list[str]) -> None:
    grammar = Grammar("json_schema", json.dumps(custom_tool_parameters(pattern=lark_to_regex(definition, "p"))))
    validate_grammar(grammar)
    lark = Grammar("lark", definition)
    for text in fits:
        assert follows(grammar, json.dumps({"input": text}, separators=(",", ":"))), text
        assert follows(lark, text), text
    for text in does_not:
        assert not follows(grammar, json.dumps({"input": text}, separators=(",", ":"))), text


@pytest.mark.parametrize(
    ("definition", "expected"),
    [
        ("a: /x/", "no rule named start"),
        ("start: b", "b is not defined"),
        ("start: a\na: a", "nothing matches"),
        ('start: "a"\nstart: "b"', "defined twice"),
        ('start: "a" & "b"', "'&'"),
        ("start: @other", "'@'"),
        ("%declare X\nstart: X", "%declare"),
        ("%import python.NAME\nstart: NAME", "common"),
        ("%import common.EMOJI\nstart: EMOJI", "common.EMOJI"),
        ("start: /a/m", "flags"),
        ('start: "ab".."c"', "range"),
        ('start: ("a"', "expected ')'"),
        ("start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested too deeply"),
        ("start: a\na: b b b\nb: c c c\nc: a a a", "nothing matches"),
        ("\n".join([f"r{i}: r{i + 1} r{i + 1}" for i in range(40)] + ["start: r0", 'r40: "aaaaaaaaaa"']), "too long"),
    ],
)
def test_lark_to_regex_rejects_unsupported_grammars(definition: str, expected: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        lark_to_regex(definition, "p")
    assert expected in caught.value.message
    assert caught.value.param == "p"


def test_lark_to_regex_ignores_priorities_and_comments() -> None:
    assert lark_to_regex('start: A  // a comment\nA.2: "a"  # another', "p") == lark_to_regex('start: A\nA: "a"', "p")


@pytest.mark.parametrize(
    ("definition", "same"),
    [
        ('?start: "a"?b\nb: "b"', 'start: "a"? b\nb: "b"'),
        ('start: b->alias\n  !b: "b"', 'start: b\nb: "b"'),
        ('start: first-part\nfirst-part: "b"', 'start: b\nb: "b"'),
    ],
)
def test_lark_to_regex_reads_modifiers_aliases_and_hyphens(definition: str, same: str) -> None:
    assert lark_to_regex(definition, "p") == lark_to_regex(same, "p")


@pytest.mark.parametrize("definition", ['start: "a"\n  | <x>', 'start: "a"\n  | "b', 'start: "a"\n  | %json {}'])
def test_lark_to_regex_names_unsupported_token(definition: str) -> None:
    with pytest.raises(InvalidRequest, match=r"line 2 has '[<\"]'|%json cannot be used"):
        lark_to_regex(definition, "p")
