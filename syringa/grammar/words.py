"""What llguidance says of a grammar, in the words of those who write one."""

from __future__ import annotations

import re

_NOTHING_FITS = "nothing fits it: its parts contradict each other, or a rule leads back to itself without end"
_TOO_COMPLEX = "its regular expressions are too complex"

# The first that is found in a message replaces it.
_PLAIN: list[tuple[re.Pattern[str], str]] = [
    (re.compile(expression), words)
    for expression, words in (
        (r"^(NoExtension(Bias)?|InternalError)$", _NOTHING_FITS),
        (r"Unable to determine if regex is empty", f"{_TOO_COMPLEX} where several hold at once"),
        (r"Unsatisfiable schema: Regex is empty", "Unsatisfiable schema: no text fits all that is said of a string"),
        (r"fuel exhausted|lexer precomputation failed", _TOO_COMPLEX),
        (r"too many (expressions|states)", f"{_TOO_COMPLEX}: too many states"),
        (r"Too many items|Current row has \d+ items", "it is too ambiguous: too many ways to read the same text"),
        (
            r"circular references with sibling keys",
            "a $ref that leads back to itself cannot have other keywords beside it",
        ),
    )
]


def plain(message: str) -> str:
    return next((words for expression, words in _PLAIN if expression.search(message)), message)
