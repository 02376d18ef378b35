from __future__ import annotations

import os

import pytest

from syringa import ids


def test_ids_are_long_and_never_the_same() -> None:
    found = [ids.random_id("x_") for _ in range(5000)]
    assert len(set(found)) == 5000
    assert all(len(each) == 34 and each.startswith("x_") for each in found)
    assert len(ids.random_id(count=8)) == 16


def test_no_byte_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    portions: list[bytes] = []

    def draw(count: int) -> bytes:
        portions.append(os.getrandom(count))
        return portions[-1]

    monkeypatch.setattr(ids, "_drawn", b"")
    monkeypatch.setattr(ids, "_used", 0)
    monkeypatch.setattr(ids.os, "urandom", draw)
    taken = [ids.random_bytes(count) for count in (16, 4000, 100, 5000, 16)]
    assert [len(each) for each in taken] == [16, 4000, 100, 5000, 16]
    assert taken[0] + taken[1] == portions[0][:4016]
    assert taken[2:4] == [portions[1][:100], portions[2]]
    assert taken[4] == portions[3][:16]


@pytest.mark.parametrize("bits", [1, 8, 63, 64])
def test_numbers_have_as_many_bits_as_wanted(bits: int) -> None:
    found = [ids.random_number(bits) for _ in range(400)]
    assert all(0 <= each < 2**bits for each in found)
    assert max(found) >= 2 ** (bits - 1)  # by chance once in 2 ** 400


def test_a_copy_of_the_process_draws_its_own() -> None:
    ids.random_id()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, ids.random_id().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 100).decode() != ids.random_id()
