from __future__ import annotations

import tomllib

import pytest

from syringa.config.lines import find_lines, line_of

FILE = '''# a comment with [brackets] and "quotes"
port = 80 # model = 3

"quoted key" = 1
'a.b'.c . "d" = 2
list = [
    1, # one ]
    "two ] , [",
    [3, 4],
]
text = """
[[models]]
id = "not a table" \\""" and on
"""
raw = \'\'\'
port = 5
\'\'\'

[[models]]
id = "a"  # { [
prices = { input = 1.5, "output" = 2, more = [
    1,
] }

[models.defaults]
temperature = 0.5
[[models]]
id = "b"
defaults.top_k = 4
[models.prices]
input = 2020-01-01 10:00:00
[[models.inner]]
x = 1
[[models.inner]]
x = ""
[other]
[other.table]
empty = {}
'''


@pytest.mark.parametrize("text", [FILE, FILE.replace("\n", "\r\n")])
def test_lines(text: str) -> None:
    lines = find_lines(text)
    numbers = {
        ("port",): 2,
        ("quoted key",): 4,
        ("a.b", "c", "d"): 5,
        ("list",): 6,
        ("list", 0): 7,
        ("list", 1): 8,
        ("list", 2, 1): 9,
        ("text",): 11,
        ("raw",): 15,
        ("models", 0): 19,
        ("models", 0, "id"): 20,
        ("models", 0, "prices", "output"): 21,
        ("models", 0, "prices", "more", 0): 22,
        ("models", 0, "defaults"): 25,
        ("models", 0, "defaults", "temperature"): 26,
        ("models", 1): 27,
        ("models", 1, "id"): 28,
        ("models", 1, "defaults", "top_k"): 29,
        ("models", 1, "prices"): 30,
        ("models", 1, "prices", "input"): 31,
        ("models", 1, "inner", 1, "x"): 35,
        ("other", "table", "empty"): 38,
    }
    assert {path: lines.get(path) for path in numbers} == numbers
    assert tomllib.loads(text)["models"][1]["id"] == "b"


def test_tables_in_one_list() -> None:
    lines = find_lines('models = [\n  {id = "a"},\n  {id = "b", dtype = "x"},\n]\n')
    assert lines["models", 0, "id"] == 2
    assert lines["models", 1, "dtype"] == 3


def test_what_is_not_there_has_the_line_of_its_table() -> None:
    lines = find_lines('port = 1\n[[models]]\nid = "a"\n')
    assert line_of(lines, ("models", 0, "path")) == 2
    assert line_of(lines, ("models", 3)) == 2
    assert line_of(lines, ("nothing",)) is None


@pytest.mark.parametrize("text", ["a = ", "[a", 'a = "', "\x00", '"a', "a = [1", "a = {b"])
def test_what_cannot_be_read_has_no_lines(text: str) -> None:
    assert find_lines(text) == {}


def test_where_the_two_readings_differ_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syringa.config.lines._Reader._key", lambda self: [self._take(__import__("re").compile("."))])
    assert find_lines("abc = 1") == {}
