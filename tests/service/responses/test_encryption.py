from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syringa.service.responses.encryption import ContentCipher, ContentCiphers
from syringa.store import Store

KEY = bytes(range(32))


@given(st.text())
def test_encrypt_decrypt_round_trip(text: str) -> None:
    cipher = ContentCipher(KEY, "acme")
    assert cipher.decrypt(cipher.encrypt(text)) == text


def test_encryption_is_randomized() -> None:
    cipher = ContentCipher(KEY, "acme")
    one, two = cipher.encrypt("a secret thought"), cipher.encrypt("a secret thought")
    assert one != two
    assert "secret" not in one
    assert one.isascii()


def test_other_organization_cannot_decrypt() -> None:
    encrypted = ContentCipher(KEY, "acme").encrypt("thought")
    assert ContentCipher(KEY, "globex").decrypt(encrypted) is None
    assert ContentCipher(KEY, "").decrypt(encrypted) is None
    assert ContentCipher(bytes(32), "acme").decrypt(encrypted) is None


def test_changed_content_is_rejected() -> None:
    cipher = ContentCipher(KEY, "acme")
    encrypted = cipher.encrypt("thought")
    for position in range(len(encrypted)):
        other = "A" if encrypted[position] != "A" else "B"
        changed = encrypted[:position] + other + encrypted[position + 1 :]
        assert cipher.decrypt(changed) is None


@pytest.mark.parametrize(
    "text", ["", "s1.", "s1.AAAA", "s1.!!!!", "s1." + "A" * 15, "gAAAAABo", "s1.é", "\0", "s1.AA=="]
)
def test_invalid_content_is_rejected(text: str) -> None:
    assert ContentCipher(KEY, "acme").decrypt(text) is None


async def test_processes_share_master_key(tmp_path: Path) -> None:
    database = str(tmp_path / "s.db")
    async with Store(database) as one, Store(database) as two:
        first, second = ContentCiphers(), ContentCiphers()
        encrypted = (await first.for_organization("acme", one)).encrypt("thought")
        assert (await second.for_organization("acme", two)).decrypt(encrypted) == "thought"
        assert (await second.for_organization("globex", two)).decrypt(encrypted) is None


def test_unused_bits_cannot_be_changed() -> None:
    """The unused bits of the last base64 character cannot be changed either."""
    cipher = ContentCipher(b"k" * 32, "acme")
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    for text in ("a", "ab", "abc"):
        encrypted = cipher.encrypt(text)
        at = len(encrypted.rstrip("=")) - 1
        others = [encrypted[:at] + each + encrypted[at + 1 :] for each in alphabet if each != encrypted[at]]
        assert [cipher.decrypt(other) for other in others] == [None] * 63
