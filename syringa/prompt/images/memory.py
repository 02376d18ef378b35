"""Limits on the memory of images: of one request, and of all requests of a process together."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from threading import RLock

from syringa.errors import EngineOverloaded, InvalidRequest
from syringa.types import Image


class ImageMemory:
    """The bytes of image files that the requests of a process hold, by tenant. Thread-safe."""

    def __init__(self) -> None:
        self._lock = RLock()  # an image may be freed, and call `release`, within `take`
        self._held: Counter[str] = Counter()

    @property
    def held(self) -> int:
        return self._held.total()

    def take(self, tenant: str, size: int, limit: int) -> None:
        """Add `size` bytes. Raises `EngineOverloaded` above `limit`, of which a tenant may hold half."""
        with self._lock:
            if self._held[tenant] + size > limit // 2 or self._held.total() + size > limit:
                raise EngineOverloaded("The server holds too many images of running requests. Try again later.")
            self._held[tenant] += size

    def release(self, tenant: str, size: int) -> None:
        with self._lock:
            self._held[tenant] -= size
            if not self._held[tenant]:
                del self._held[tenant]


class RequestBudget:
    """The limits on all images of one request, however small their files are. Thread-safe."""

    def __init__(self, memory: ImageMemory, tenant: str, *, max_pixels: int, max_bytes: int, max_memory: int) -> None:
        self._memory, self._tenant = memory, tenant
        self._max_pixels, self._max_bytes, self._max_memory = max_pixels, max_bytes, max_memory
        self._lock = RLock()
        self._pixels = self._bytes = self._users = 0
        self._released = False

    def spend_pixels(self, pixels: int) -> None:
        with self._lock:
            self._pixels += pixels
            if self._pixels > self._max_pixels:
                raise InvalidRequest(
                    f"the images of this request have more than {self._max_pixels} pixels in all.",
                    code="image_too_large",
                )

    def spend_bytes(self, size: int) -> None:
        with self._lock:
            if self._released:
                raise InvalidRequest("the request has ended.")  # in a thread that outlives a canceled request
            if self._bytes + size > self._max_bytes:
                raise InvalidRequest(
                    f"the images of this request have more than {self._max_bytes} bytes in all.",
                    code="image_file_too_large",
                )
            self._memory.take(self._tenant, size, self._max_memory)
            self._bytes += size

    def release_with(self, images: Sequence[Image]) -> None:
        """Release the memory when the last of the images is freed, at once if there are none."""
        self._users = len(images) + 1
        for image in images:
            weakref.finalize(image, self._drop).atexit = False
        self._drop()

    def _drop(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._released = True
                self._memory.release(self._tenant, self._bytes)
