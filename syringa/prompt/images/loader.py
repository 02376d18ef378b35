"""Load the images of a request: fetch or decode them, and validate them for the engine."""

from __future__ import annotations

import asyncio
import binascii
import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from syringa.errors import InvalidRequest
from syringa.fair_thread_pool import FairThreadPool
from syringa.prompt.images.fetch import FetchLimits, fetch, too_large
from syringa.prompt.images.image_file import MAX_SIDE, check_image
from syringa.prompt.images.memory import ImageMemory, RequestBudget
from syringa.types import Image, in_background

_MAX_FULL_IMAGES = 4  # the pixel budget of a request, in images of the maximum size
_MAX_FULL_FILES = 8  # its byte budget, in files of the maximum size
_MAX_CONCURRENT_FETCHES = 8  # for one request

# Few threads, because a decoded image may take a hundred megabytes; separate from the tokenization of other requests.
_DECODER_THREADS = FairThreadPool(2, "decode")

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
    max_side: int = MAX_SIDE
    max_images: int = 50  # in one request
    max_memory: int = 2 << 30  # bytes of the image files of all requests; a tenant may hold half


_MEMORY = ImageMemory()
# Requests in the background take nothing from others. All of them together hold as much as one tenant.
_BACKGROUND_MEMORY, _BACKGROUND = ImageMemory(), ""


async def fetch_images(
    sources: Sequence[ImageSource], policy: ImagePolicy, tenant: str = "", *, memory: ImageMemory = _MEMORY
) -> list[Image]:
    """Return the images in order. Raises `InvalidRequest` with the `param` of the first that fails.

    Their files count against `memory` until the images are freed; `EngineOverloaded` is raised if it is full.
    """
    if len(sources) > policy.max_images:
        raise InvalidRequest(
            f"at most {policy.max_images} images in one request, got {len(sources)}.",
            param=sources[policy.max_images].param,
        )
    loading = _Loading(policy, tenant, memory)
    # Each URL is fetched once, on behalf of the first source that has it.
    wanted = {source.url: source for source in reversed(sources)}
    tasks = {url: asyncio.create_task(loading.load(source)) for url, source in reversed(wanted.items())}
    found: list[Image] = []
    try:
        await asyncio.gather(*tasks.values())
        images = {url: task.result() for url, task in tasks.items()}
        found += [msgspec.structs.replace(images[source.url], detail=source.detail) for source in sources]
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        loading.budget.release_with(found)
    return found


class _Loading:
    """Loads the images of one request."""

    def __init__(self, policy: ImagePolicy, tenant: str, memory: ImageMemory) -> None:
        self._background = in_background.get()
        self.budget = RequestBudget(
            _BACKGROUND_MEMORY if self._background else memory,
            _BACKGROUND if self._background else tenant,
            max_pixels=policy.max_pixels * _MAX_FULL_IMAGES,
            max_bytes=policy.max_bytes * _MAX_FULL_FILES,
            max_memory=policy.max_memory,
        )
        self._policy, self._tenant = policy, tenant
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT_FETCHES)

    async def load(self, source: ImageSource) -> Image:
        policy, budget = self._policy, self.budget
        try:
            if source.url[:5].lower() == "data:":
                return await self._in_thread(lambda: _decode_data_uri(source.url, policy, budget))
            limits = FetchLimits(allow_private=policy.allow_private, max_bytes=policy.max_bytes, timeout=policy.timeout)
            async with self._slots:
                data = await fetch(source.url, limits, budget.spend_bytes)
            return await self._in_thread(lambda: _check(data, policy, budget))
        except InvalidRequest as error:
            raise InvalidRequest(f"{source.param}: {error.message}", param=source.param, code=error.code) from None

    async def _in_thread(self, work: Callable[[], Image]) -> Image:
        return await asyncio.wrap_future(_DECODER_THREADS.submit(self._tenant, work, background=self._background))


def _decode_data_uri(uri: str, policy: ImagePolicy, budget: RequestBudget) -> Image:
    prefix = _DATA_URI.match(uri)
    if prefix is None:
        raise InvalidRequest("expected data:image/…;base64, and the image in base64.", code="invalid_image_url")
    text = _WHITESPACE.sub("", uri[prefix.end() :])
    if len(text) * 3 // 4 - 2 > policy.max_bytes:
        raise too_large(policy.max_bytes)
    budget.spend_bytes(max(0, len(text) * 3 // 4 - text[-2:].count("=")))
    try:
        if len(text) % 4:
            raise ValueError("padding")
        data = binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        raise InvalidRequest("the data URI is not valid base64.", code="invalid_base64_image") from None
    if len(data) > policy.max_bytes:
        raise too_large(policy.max_bytes)
    return _check(data, policy, budget)


def _check(data: bytes, policy: ImagePolicy, budget: RequestBudget) -> Image:
    check_image(data, policy.max_pixels, policy.max_side, budget.spend_pixels)
    return Image(data=data, digest=hashlib.sha256(data).digest())
