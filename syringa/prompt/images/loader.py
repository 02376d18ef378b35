"""The images of a request: fetched or decoded, checked, and ready for the engine."""

from __future__ import annotations

import asyncio
import binascii
import hashlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import msgspec

from syringa.errors import InvalidRequest
from syringa.prompt.images.fetch import FetchLimits, fetch, too_large
from syringa.prompt.images.image_file import check_image
from syringa.types import Image

_FULL_IMAGES = 4  # a request's images may have as many pixels as this many of the largest
_AT_ONCE = 8  # fetched at the same time for one request

# Few, because each decoded picture may take a hundred megabytes for a moment; apart from other requests' tokenizing.
_DECODERS = ThreadPoolExecutor(2, thread_name_prefix="decode")

_DATA_URI = re.compile(r"data:image/[\w.+-]+(?:;[\w.+-]+=[\w.+-]*)*;base64,", re.IGNORECASE)
_BLANKS = re.compile(r"[ \t\r\n\f]+")


class ImageSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request says that an image is."""

    url: str  # http, https, or a base64 data URI
    param: str  # the JSON path of `url` in the request, for errors
    detail: Literal["low", "high", "auto"] = "auto"


class ImagePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What this server is willing to fetch and to decode."""

    private: bool = False  # whether loopback and private networks may be fetched from
    max_bytes: int = 20 * 1024 * 1024
    timeout: float = 10.0  # seconds for one image; 0: no limit
    max_pixels: int = 40_000_000
    max_images: int = 50  # in one request


async def fetch_images(sources: Sequence[ImageSource], policy: ImagePolicy) -> list[Image]:
    """The images, in order. The first that cannot be had is an `InvalidRequest` that names its `param`."""
    if len(sources) > policy.max_images:
        raise InvalidRequest(
            f"at most {policy.max_images} images in one request, got {len(sources)}.",
            param=sources[policy.max_images].param,
        )
    slots = asyncio.Semaphore(_AT_ONCE)
    budget = _Pixels(policy.max_pixels * _FULL_IMAGES)
    # The same URL is fetched once, for the first that has it.
    wanted = {source.url: source for source in reversed(sources)}
    tasks = {url: asyncio.create_task(_read(source, policy, slots, budget)) for url, source in reversed(wanted.items())}
    try:
        await asyncio.gather(*tasks.values())
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    images = {url: task.result() for url, task in tasks.items()}
    return [msgspec.structs.replace(images[source.url], detail=source.detail) for source in sources]


class _Pixels:
    """What all images of one request may come to, however small their files."""

    def __init__(self, left: int) -> None:
        self._left = self._most = left

    def spend(self, pixels: int) -> None:
        self._left -= pixels
        if self._left < 0:
            raise InvalidRequest(
                f"the images of this request have more than {self._most} pixels in all.", code="image_too_large"
            )


async def _read(source: ImageSource, policy: ImagePolicy, slots: asyncio.Semaphore, budget: _Pixels) -> Image:
    loop = asyncio.get_running_loop()
    try:
        if source.url[:5].lower() == "data:":
            return await loop.run_in_executor(_DECODERS, _decoded, source.url, policy, budget)
        limits = FetchLimits(private=policy.private, max_bytes=policy.max_bytes, timeout=policy.timeout)
        async with slots:
            data = await fetch(source.url, limits)
        return await loop.run_in_executor(_DECODERS, _checked, data, policy, budget)
    except InvalidRequest as error:
        raise InvalidRequest(f"{source.param}: {error.message}", param=source.param, code=error.code) from None


def _decoded(uri: str, policy: ImagePolicy, budget: _Pixels) -> Image:
    begun = _DATA_URI.match(uri)
    if begun is None:
        raise InvalidRequest("expected data:image/…;base64, and the image in base64.", code="invalid_image_url")
    text = _BLANKS.sub("", uri[begun.end() :])
    if len(text) * 3 // 4 - 2 > policy.max_bytes:
        raise too_large(policy.max_bytes)
    try:
        if len(text) % 4:
            raise ValueError("padding")
        data = binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        raise InvalidRequest("the data URI is not proper base64.", code="invalid_base64_image") from None
    if len(data) > policy.max_bytes:
        raise too_large(policy.max_bytes)
    return _checked(data, policy, budget)


def _checked(data: bytes, policy: ImagePolicy, budget: _Pixels) -> Image:
    check_image(data, policy.max_pixels, budget.spend)
    return Image(data=data, digest=hashlib.sha256(data).digest())
