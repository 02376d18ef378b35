from __future__ import annotations

import os

import pytest

from syringa import ids


def test_random_id_is_long_and_unique() -> None:
    found = [ids.random_id("x_") for _ in range(5000)]
    assert len(set(found)) == 5000
    assert all(len(each) == 34 and each.startswith("x_") for each in found)
    assert len(ids.random_id(count=8)) == 16


def test_random_bytes_uses_each_byte_once(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[bytes] = []

    def urandom(count: int) -> bytes:
        blocks.append(os.getrandom(count))
        return blocks[-1]

    monkeypatch.setattr(ids, "_buffer", b"")
    monkeypatch.setattr(ids, "_position", 0)
    monkeypatch.setattr(ids.os, "urandom", urandom)
    taken = [ids.random_bytes(count) for count in (16, 4000, 100, 5000, 16)]
    assert [len(each) for each in taken] == [16, 4000, 100, 5000, 16]
    assert taken[0] + taken[1] == blocks[0][:4016]
    assert taken[2:4] == [blocks[1][:100], blocks[2]]
    assert taken[4] == blocks[3][:16]


@pytest.mark.parametrize("bits", [1, 8, 63, 64])
def test_random_number_has_the_requested_bits(bits: int) -> None:
    found = [ids.random_number(bits) for _ in range(400)]
    assert all(0 <= each < 2**bits for each in found)
    assert max(found) >= 2 ** (bits - 1)  # fails by chance once in 2 ** 400


def test_forked_process_has_its_own_random_bytes() -> None:
    ids.random_id()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, ids.random_id().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 100).decode() != ids.random_id()
