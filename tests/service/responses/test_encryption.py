from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syringa.service.responses.encryption import ContentCipher, ContentCiphers
from syringa.store import Store

KEY = bytes(range(32))


@given(st.text())
def test_what_is_sealed_opens(text: str) -> None:
    seal = ContentCipher(KEY, "acme")
    assert seal.open(seal.seal(text)) == text


def test_it_says_nothing_and_is_never_the_same() -> None:
    seal = ContentCipher(KEY, "acme")
    one, two = seal.seal("a secret thought"), seal.seal("a secret thought")
    assert one != two
    assert "secret" not in one
    assert one.isascii()


def test_another_organization_does_not_open_it() -> None:
    sealed = ContentCipher(KEY, "acme").seal("thought")
    assert ContentCipher(KEY, "globex").open(sealed) is None
    assert ContentCipher(KEY, "").open(sealed) is None
    assert ContentCipher(bytes(32), "acme").open(sealed) is None


def test_what_was_changed_does_not_open() -> None:
    seal = ContentCipher(KEY, "acme")
    sealed = seal.seal("thought")
    for place in range(len(sealed)):
        other = "A" if sealed[place] != "A" else "B"
        changed = sealed[:place] + other + sealed[place + 1 :]
        assert seal.open(changed) is None


@pytest.mark.parametrize(
    "text", ["", "s1.", "s1.AAAA", "s1.!!!!", "s1." + "A" * 15, "gAAAAABo", "s1.é", "\0", "s1.AA=="]
)
def test_what_is_no_seal_does_not_open(text: str) -> None:
    assert ContentCipher(KEY, "acme").open(text) is None


async def test_every_process_opens_what_one_sealed(tmp_path: Path) -> None:
    database = str(tmp_path / "s.db")
    async with Store(database) as one, Store(database) as two:
        first, second = ContentCiphers(), ContentCiphers()
        sealed = (await first.of("acme", one)).seal("thought")
        assert (await second.of("acme", two)).open(sealed) == "thought"
        assert (await second.of("globex", two)).open(sealed) is None


def test_no_bit_of_it_can_be_changed() -> None:
    """The last character of base64 may have bits that say nothing: they are not the client's to set either."""
    seal = ContentCipher(b"k" * 32, "acme")
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    for text in ("a", "ab", "abc"):
        sealed = seal.seal(text)
        at = len(sealed.rstrip("=")) - 1
        others = [sealed[:at] + each + sealed[at + 1 :] for each in alphabet if each != sealed[at]]
        assert [seal.open(other) for other in others] == [None] * 63
