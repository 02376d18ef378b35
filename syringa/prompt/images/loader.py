"""Load the images of a request: fetch or decode them, and validate them for the engine."""

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

_MAX_FULL_IMAGES = 4  # the pixel budget of a request, in images of the maximum size
_MAX_CONCURRENT_FETCHES = 8  # for one request

# Few threads, because a decoded image may take a hundred megabytes; separate from the tokenization of other requests.
_DECODER_THREADS = ThreadPoolExecutor(2, thread_name_prefix="decode")

_DATA_URI = re.compile(r"data:image/[\w.+-]+(?:;[\w.+-]+=[\w.+-]*)*;base64,", re.IGNORECASE)
_WHITESPACE = re.compile(r"[ \t\r\n\f]+")


class ImageSource(msgspec.Struct, frozen=True, kw_only=True):
    """The location of an image in a request."""

    url: str  # http, https, or a base64 data URI
    param: str  # the JSON path of `url` in the request, for errors
    detail: Literal["low", "high", "auto"] = "auto"


class ImagePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the images that the server fetches and decodes."""

    allow_private: bool = False  # fetch from loopback and private networks
    max_bytes: int = 20 * 1024 * 1024
    timeout: float = 10.0  # seconds for one image; 0: no limit
    max_pixels: int = 40_000_000
    max_images: int = 50  # in one request


async def fetch_images(sources: Sequence[ImageSource], policy: ImagePolicy) -> list[Image]:
    """Return the images in order. Raises `InvalidRequest` with the `param` of the first that fails."""
    if len(sources) > policy.max_images:
        raise InvalidRequest(
            f"at most {policy.max_images} images in one request, got {len(sources)}.",
            param=sources[policy.max_images].param,
        )
    slots = asyncio.Semaphore(_MAX_CONCURRENT_FETCHES)
    budget = _PixelBudget(policy.max_pixels * _MAX_FULL_IMAGES)
    # Each URL is fetched once, on behalf of the first source that has it.
    wanted = {source.url: source for source in reversed(sources)}
    tasks = {url: asyncio.create_task(_load(source, policy, slots, budget)) for url, source in reversed(wanted.items())}
    try:
        await asyncio.gather(*tasks.values())
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    images = {url: task.result() for url, task in tasks.items()}
    return [msgspec.structs.replace(images[source.url], detail=source.detail) for source in sources]


class _PixelBudget:
    """The limit on the pixels of all images of one request, however small their files are."""

    def __init__(self, left: int) -> None:
        self._left = self._limit = left

    def spend(self, pixels: int) -> None:
        self._left -= pixels
        if self._left < 0:
            raise InvalidRequest(
                f"the images of this request have more than {self._limit} pixels in all.", code="image_too_large"
            )


async def _load(source: ImageSource, policy: ImagePolicy, slots: asyncio.Semaphore, budget: _PixelBudget) -> Image:
    loop = asyncio.get_running_loop()
    try:
        if source.url[:5].lower() == "data:":
            return await loop.run_in_executor(_DECODER_THREADS, _decode_data_uri, source.url, policy, budget)
        limits = FetchLimits(allow_private=policy.allow_private, max_bytes=policy.max_bytes, timeout=policy.timeout)
        async with slots:
            data = await fetch(source.url, limits)
        return await loop.run_in_executor(_DECODER_THREADS, _check, data, policy, budget)
    except InvalidRequest as error:
        raise InvalidRequest(f"{source.param}: {error.message}", param=source.param, code=error.code) from None


def _decode_data_uri(uri: str, policy: ImagePolicy, budget: _PixelBudget) -> Image:
    prefix = _DATA_URI.match(uri)
    if prefix is None:
        raise InvalidRequest("expected data:image/…;base64, and the image in base64.", code="invalid_image_url")
    text = _WHITESPACE.sub("", uri[prefix.end() :])
    if len(text) * 3 // 4 - 2 > policy.max_bytes:
        raise too_large(policy.max_bytes)
    try:
        if len(text) % 4:
            raise ValueError("padding")
        data = binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        raise InvalidRequest("the data URI is not valid base64.", code="invalid_base64_image") from None
    if len(data) > policy.max_bytes:
        raise too_large(policy.max_bytes)
    return _check(data, policy, budget)


def _check(data: bytes, policy: ImagePolicy, budget: _PixelBudget) -> Image:
    check_image(data, policy.max_pixels, budget.spend)
    return Image(data=data, digest=hashlib.sha256(data).digest())
