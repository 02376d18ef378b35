"""Tests of the conversion of GBNF to Lark: what the result accepts, errors, and the cost of hostile grammars."""

from __future__ import annotations

import contextlib
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syringa.errors import InvalidRequest
from syringa.prompt.grammar.gbnf import gbnf_to_lark, is_gbnf
from syringa.prompt.grammar.validation import check_grammar_text
from syringa.types import Grammar
from tests.prompt.grammar.matching import follows
from tests.tiers import examples

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws # with escapes
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""


def accepts(gbnf: str, text: str) -> bool:
    grammar = Grammar("lark", gbnf_to_lark(gbnf))
    check_grammar_text(grammar, "grammar")
    return follows(grammar, text)


@pytest.mark.parametrize(
    ("gbnf", "accepted", "refused"),
    [
        (JSON, ['{"a": [1, true, {"b":"x\\n"}]}', '{"é":-1.5e3}', "{}"], ['{"a": tru}', "[1]", '{"a":1']),
        # Whitespace that a number could take is what the line has to end with.
        (ARITHMETIC, ["a+(b*3)=4\n", "x = 1 \n"], ["a+=4\n", "a=4"]),
        ('root ::= [a-z]* "x"', ["abx", "x", "xx"], ["ab", ""]),
        ('root ::= ("abc" | [a-z])* "<"', ["abd<", "abc<"], ["abc"]),
        (r'root ::= "\u0041\x42\U00000043" [\u0041-\u0043] "\"\\\n"', ['ABCB"\\\n'], ['ABCD"\\\n']),
        (r"root ::= [^a-c\]\n-]", ["d", "é"], ["a", "]", "-", "\n"]),
        ("root ::= [a&&b] [a-z-9]", ["&a", "a-", "b9"], ["c9"]),
        ("root ::= 'it\\'s' '\"'", ["it's\""], ["its"]),  # as in xgrammar's EBNF
        ("root ::= .", ["a", "\n", "é"], ["", "ab"]),
        ('root ::= ( | "a") "x"?', ["", "a", "ax"], ["aa"]),
        ('start ::= "a"\nroot ::= start Start\nStart ::= "b"', ["ab"], ["a", "ba"]),
        ('root ::= aB | a-b\naB ::= "1" root?\na-b ::= "2" root?', ["1", "1221"], ["", "3"]),
        ('root ::= "a"{2} "b"{1,} "c"{0,2}', ["aab", "aabbcc"], ["ab", "aabccc"]),
        ('root ::= "(" root ")" | [a-z]+ "." | "ab"', ["(ab)", "(ab.)", "((abc.))"], ["(a)", "ab.)"]),
        ('# a comment\nroot ::= one # another\n  | "2"\none ::= "1"', ["1", "2"], ["3"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_gbnf_to_lark_accepts_the_same_texts(gbnf: str, accepted: list[str], refused: list[str]) -> None:
    assert is_gbnf(gbnf)
    for text in accepted:
        assert accepts(gbnf, text), text
    for text in refused:
        assert not accepts(gbnf, text), text


@pytest.mark.parametrize(
    ("gbnf", "message"),
    [
        ('x ::= "a"', "the grammar has no rule named root"),
        ("root ::= x", "line 1, at 'x': the rule x is not defined"),
        ('root ::= "a"\nroot ::= "b"', "line 2, at 'root': the rule root is defined twice"),
        ('root ::= ("a"', "line 1, at '(': the bracket is not closed"),
        ('root ::= "a")', "line 1, at ')': there is no bracket to close"),
        ('root ::=\n  "a"\n  *+', "line 3, at '+': expected something to repeat"),
        ('root ::= "a', "line 1, at '\"a': unexpected text"),
        ("root ::= []", "line 1, at '[]': the class of characters is empty"),
        (r'root ::= "\q"', r"invalid escape \q"),
        (r'root ::= "\ud800"', r"\ud800 is not a character"),
        ('root ::= "a"{x}', "line 1, at '{': unexpected text"),
        ('"a" ::= "b"', "line 1, at '\"a\"': unexpected text"),
        ("root ::= " + "(" * 200, "brackets are nested too deeply"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_gbnf_to_lark_names_the_line_of_an_error(gbnf: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        gbnf_to_lark(gbnf)
    assert message in raised.value.message


@pytest.mark.parametrize(
    "lark",
    ['start: "a"', '?start: x\nx: "::="', "start: /a ::= b/", "%llguidance {}\nstart: A\nA: /x/", "nothing"],
)
def test_lark_is_not_taken_for_gbnf(lark: str) -> None:
    assert not is_gbnf(lark)


COUNT = 20_000
HOSTILE = {
    "chain": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(COUNT)) + f'r{COUNT} ::= "x"',
    "names alike": 'root ::= "a"\n'
    + "".join(
        "".join(c.upper() if i >> k & 1 else c for k, c in enumerate("abcdefghijklmn")) + ' ::= "x"\n'
        for i in range(1 << 13)
    ),
    "classes": "root ::= " + "[" * 200_000,
    "strings": "root ::= " + '"' * 200_001,
    "quotes": "root ::= " + "\"'" * 100_000,
    "brackets": "root ::= " + "(" * 200_000,
    "braces": 'root ::= "a"' + "{1 " * 60_000,
    "comments": "root ::= #" + "\n#" * 100_000,
    "lines": "a\n" * 100_000,
    "parts": "root ::= root | " + '[a] "b"? root ' * 15_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_gbnf_to_lark_takes_linear_time(name: str) -> None:
    """llguidance's own converter takes minutes for the chain."""
    started = time.process_time()
    is_gbnf(HOSTILE[name])
    with contextlib.suppress(InvalidRequest):
        gbnf_to_lark(HOSTILE[name])
    assert time.process_time() - started < 20  # quadratic time is far beyond


# A GBNF expression without recursion, and the same as a Python regular expression.
_ATOMS = st.sampled_from(
    [('"a"', "a"), ('"ab"', "ab"), ("[ab]", "[ab]"), ("[^a]", "[^a]"), (".", r"[\s\S]"), ('""', "(?:)"), ('" "', " ")]
)
_EXPRESSIONS = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda two: (f"{two[0][0]} {two[1][0]}", two[0][1] + two[1][1])),
        st.tuples(inner, inner).map(lambda two: (f"({two[0][0]} | {two[1][0]})", f"(?:{two[0][1]}|{two[1][1]})")),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,}"])).map(
            lambda both: (f"({both[0][0]}){both[1]}", f"(?:{both[0][1]}){both[1]}")
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=examples(200), deadline=None)
@given(_EXPRESSIONS, st.lists(st.text("ab \n", max_size=5), min_size=1, max_size=4))
def test_gbnf_without_recursion_matches_like_a_regular_expression(both: tuple[str, str], texts: list[str]) -> None:
    gbnf, pattern = both
    grammar = Grammar("lark", gbnf_to_lark(f"root ::= part\npart ::= {gbnf}"))
    for text in texts:
        assert follows(grammar, text) == (re.fullmatch(pattern, text) is not None), (gbnf, text)
