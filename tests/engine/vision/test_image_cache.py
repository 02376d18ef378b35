from __future__ import annotations

import numpy as np

from syringa.engine.vision.image_cache import ImageCache
from syringa.engine.vision.prompt_images import EncodedImage


def encoded_image(name: str, size: int = 100) -> EncodedImage:
    return EncodedImage(name.encode(), [], [], np.zeros(size, dtype=np.uint8))


def test_image_cache_evicts_least_recently_used() -> None:
    cache = ImageCache(300)
    for name in "abc":
        cache.add(encoded_image(name))
    assert cache.get(b"a") is not None
    cache.add(encoded_image("d"))
    assert [cache.get(name) is not None for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    assert cache.size == 300


def test_image_cache_finds_and_counts_referenced_images() -> None:
    cache = ImageCache(300)
    referenced = [encoded_image(name) for name in "abcd"]
    for each in referenced:
        cache.add(each)
    assert cache.size == 400
    cache.add(encoded_image("e"))
    assert cache.size == 400
    assert cache.get(b"e") is None
    assert cache.get(b"a") is referenced[0]
    referenced.clear()
    cache.add(encoded_image("f"))
    assert cache.size <= 300


def test_image_cache_does_not_keep_image_larger_than_limit() -> None:
    cache = ImageCache(50)
    cache.add(encoded_image("a"))
    assert cache.get(b"a") is None
    assert cache.size == 0
