"""What the vision tower has made of recent images, up to so many bytes."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from weakref import WeakValueDictionary

from syringa.engine.vision.images import Picture


class PictureStore:
    """Keeps recent pictures, and finds every one that somebody still holds. Callable from any thread.

    A sequence pins its pictures by holding them: nothing has to be given back, so nothing can be forgotten. What is
    held counts towards the limit, and leaves less room for what is only kept in case it comes again.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._recent: OrderedDict[bytes, Picture] = OrderedDict()
        self._alive: WeakValueDictionary[bytes, Picture] = WeakValueDictionary()
        self._lock = Lock()

    @property
    def size(self) -> int:
        """Bytes of all that is in memory. Above the limit, all of it is in use."""
        with self._lock:
            return self._size()

    def get(self, key: bytes) -> Picture | None:
        with self._lock:
            picture = self._alive.get(key)
            if picture is not None:
                self._keep(picture)
            return picture

    def add(self, picture: Picture) -> None:
        with self._lock:
            self._alive[picture.key] = picture
            self._keep(picture)

    def _keep(self, picture: Picture) -> None:
        self._recent[picture.key] = picture
        self._recent.move_to_end(picture.key)
        while self._recent and self._size() > self.limit:
            self._recent.popitem(last=False)

    def _size(self) -> int:
        return sum(picture.size for picture in self._alive.values())
