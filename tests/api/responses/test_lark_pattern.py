from __future__ import annotations

import json

import pytest

from syringa.api.responses.custom_input import CustomInput, parameters
from syringa.api.responses.lark_pattern import lark_pattern
from syringa.errors import InvalidRequest
from syringa.prompt.grammar.validation import validate
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
def test_what_fits_the_grammar_fits_the_string(definition: str, fits: list[str], does_not: list[str]) -> None:
    grammar = Grammar("json_schema", json.dumps(parameters(pattern=lark_pattern(definition, "p"))))
    validate(grammar)
    lark = Grammar("lark", definition)
    for text in fits:
        assert follows(grammar, json.dumps({"input": text}, separators=(",", ":"))), text
        assert follows(lark, text), text
    for text in does_not:
        assert not follows(grammar, json.dumps({"input": text}, separators=(",", ":"))), text


@pytest.mark.parametrize(
    ("definition", "said"),
    [
        ("a: /x/", "no rule named start"),
        ("start: b", "b is not defined"),
        ("start: a\na: a", "nothing fits"),
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
        ("start: a\na: b b b\nb: c c c\nc: a a a", "nothing fits"),
        ("\n".join([f"r{i}: r{i + 1} r{i + 1}" for i in range(40)] + ["start: r0", 'r40: "aaaaaaaaaa"']), "too long"),
    ],
)
def test_what_cannot_be_written_out_is_refused(definition: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        lark_pattern(definition, "p")
    assert said in caught.value.message
    assert caught.value.param == "p"


@pytest.mark.parametrize("text", ["", "plain", 'a "quoted"\\ \n\t é 😀', "\u2028 \x01"])
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_the_input_is_read_as_it_comes(text: str, ascii_only: bool, size: int) -> None:
    whole = json.dumps({"input": text}, ensure_ascii=ascii_only)
    reader = CustomInput()
    pieces = [reader.feed(whole[at : at + size]) for at in range(0, len(whole), size)]
    assert "".join(pieces) + reader.flush() == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "cut sh', "cut sh"),
        ('{"input": "cut \\u00', "cut "),
        ('{"input": "\\ud83d alone \\ude00 \\ud83d\\n"}', "\ufffd alone \ufffd \ufffd\n"),
        ('{"query": "x"}', '{"query": "x"}'),
        ('{"input": 3}', '{"input": 3}'),
        ("", ""),
    ],
)
def test_odd_arguments_are_not_lost(arguments: str, text: str) -> None:
    reader = CustomInput()
    assert reader.feed(arguments) + reader.flush() == text


def test_priorities_and_comments_make_no_difference() -> None:
    assert lark_pattern('start: A  // a comment\nA.2: "a"  # another', "p") == lark_pattern('start: A\nA: "a"', "p")
