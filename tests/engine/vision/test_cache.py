from __future__ import annotations

import numpy as np

from syringa.engine.vision.cache import PictureStore
from syringa.engine.vision.images import Picture


def picture(name: str, size: int = 100) -> Picture:
    return Picture(name.encode(), [], [], np.zeros(size, dtype=np.uint8))


def test_the_least_recently_used_goes_first() -> None:
    store = PictureStore(300)
    for name in "abc":
        store.add(picture(name))
    assert store.get(b"a") is not None
    store.add(picture("d"))
    assert [store.get(name) is not None for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    assert store.size == 300


def test_what_is_held_is_found_and_counts() -> None:
    store = PictureStore(300)
    held = [picture(name) for name in "abcd"]
    for each in held:
        store.add(each)
    assert store.size == 400
    store.add(picture("e"))
    assert store.size == 400
    assert store.get(b"e") is None
    assert store.get(b"a") is held[0]
    held.clear()
    store.add(picture("f"))
    assert store.size <= 300


def test_one_that_is_larger_than_all_is_not_kept() -> None:
    store = PictureStore(50)
    store.add(picture("a"))
    assert store.get(b"a") is None
    assert store.size == 0
