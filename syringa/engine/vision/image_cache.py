"""LRU cache of vision tower output, bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from weakref import WeakValueDictionary

from syringa.engine.vision.prompt_images import EncodedImage


class ImageCache:
    """Cache of recent images that also finds every image a sequence still references. Thread-safe.

    A sequence pins its images by referencing them, so there is no release call to forget. Pinned images count towards
    the limit and leave less of it to unpinned ones.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._recent: OrderedDict[bytes, EncodedImage] = OrderedDict()
        self._alive: WeakValueDictionary[bytes, EncodedImage] = WeakValueDictionary()
        self._lock = Lock()

    @property
    def size(self) -> int:
        """Bytes of all images in memory. More than `limit` only if all of them are pinned."""
        with self._lock:
            return self._size()

    def get(self, image_hash: bytes) -> EncodedImage | None:
        with self._lock:
            image = self._alive.get(image_hash)
            if image is not None:
                self._keep(image)
            return image

    def add(self, image: EncodedImage) -> None:
        with self._lock:
            self._alive[image.image_hash] = image
            self._keep(image)

    def _keep(self, image: EncodedImage) -> None:
        self._recent[image.image_hash] = image
        self._recent.move_to_end(image.image_hash)
        while self._recent and self._size() > self.limit:
            self._recent.popitem(last=False)

    def _size(self) -> int:
        return sum(image.size for image in self._alive.values())
