from __future__ import annotations

from typing import Any

import pytest

from tests.store.helpers import read


def cells(text: str) -> list[list[str]]:
    return [line.split()[:4] for line in text.splitlines()[1:]]


def test_limits_are_set_one_by_one(syringa: Any, stored: Any) -> None:
    syringa("keys", "create", "acme")
    first = syringa("organizations", "set", "acme", "--requests-per-minute", "5000", "--concurrent", "0")
    assert first.status == 0
    assert cells(first.out) == [["acme", "5,000", "default", "none"]]
    second = syringa("organizations", "set", "acme", "--requests-per-minute", "default", "--tokens-per-minute", "7")
    assert cells(second.out) == [["acme", "default", "7", "none"]]
    syringa("organizations", "set", "new", "--concurrent", "1")
    assert cells(syringa("organizations", "list").out) == [
        ["acme", "default", "7", "none"],
        ["new", "default", "default", "1"],
    ]
    acme, new = stored(lambda store: read(store).organizations.all())
    assert (acme.requests_per_minute, acme.tokens_per_minute, acme.concurrent) == (None, 7, 0)
    assert new.concurrent == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("acme",), "nothing to set"),
        (("a/b", "--concurrent", "1"), "1 to 64 characters"),
        (("acme", "--concurrent", "lots"), "--concurrent 'lots': expected a whole number"),
        (("acme", "--concurrent", "²"), "expected a whole number"),
        (("acme", "--concurrent", ""), "expected a whole number"),
    ],
)
def test_what_cannot_be_set(refusal: Any, arguments: tuple[str, ...], said: str) -> None:
    assert said in refusal("organizations", "set", *arguments)
