"""Prepare requests with images outside the step loop: read the files, run the vision tower, expand the prompt.

The tower runs in a thread of its own. In the step loop, a step with an image would take as long as the tower (seconds
on a laptop) and stall every stream. A request is queued once its images are encoded, so the step loop never waits.
Background requests are prepared after all others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import Event, Lock
from weakref import WeakSet

import msgspec
import torch

from syringa.engine.vision.family import TowerInputs
from syringa.engine.vision.image_cache import ImageCache
from syringa.engine.vision.image_reader import ImageReader, ProcessedImage
from syringa.engine.vision.placeholders import PlaceholderExpander
from syringa.engine.vision.prompt_images import EncodedImage, PromptImages, hash_image
from syringa.errors import ContextLengthExceeded, EngineError, InvalidRequest, SyringaError
from syringa.fair_thread_pool import FairThreadPool
from syringa.types import EngineRequest, Image

logger = logging.getLogger("syringa.vision")

MAX_CONCURRENT_REQUESTS = 4  # each may hold the pixels of one image, 50 MB and more
CACHE_BYTES = 512 << 20
POLL_SECONDS = 0.02


class PreprocessingCanceled(Exception):
    """The request of an image was canceled before the image was encoded."""


@dataclass(frozen=True)
class PreprocessingTask:
    """A request being prepared. `future` fails with a `SyringaError`."""

    future: Future[tuple[EngineRequest, PromptImages]]
    canceled: Event

    def cancel(self) -> None:
        """Cancel before the task begins, or after the tower call in progress."""
        self.canceled.set()
        self.future.cancel()


@dataclass(frozen=True)
class VisionComponents:
    """What `ImagePreprocessor` needs of a model with a vision tower."""

    reader: ImageReader
    encode: Callable[[TowerInputs], torch.Tensor]  # the tower: returns [image tokens, hidden]
    threads: int


class ImagePreprocessor:
    def __init__(self, vision: VisionComponents, max_length: int, cache_bytes: int = CACHE_BYTES) -> None:
        self.reader = vision.reader
        self.max_length = max_length
        self.cache = ImageCache(cache_bytes)
        self.encoded_images = 0
        family = vision.reader.family
        self._encode = vision.encode
        self._expander = PlaceholderExpander(
            vision.reader.tokenizer,
            vision.reader.placeholder,
            bidirectional=family.bidirectional,
            mrope=family.mrope,
        )
        self._lock = Lock()
        self._in_progress: dict[bytes, Future[EncodedImage]] = {}
        self._in_background: WeakSet[PromptImages] = WeakSet()  # of background requests that wait or run
        self._closing = False
        self._pool = FairThreadPool(MAX_CONCURRENT_REQUESTS, "images")
        # Torch's thread count is per thread. The step loop's may be one, because its kernels have their own threads.
        self._tower = FairThreadPool(1, "tower", initializer=partial(torch.set_num_threads, vision.threads))
        self._tower.submit("", int).result()  # start the thread before the step loop runs

    def check(self, request: EngineRequest) -> None:
        """Raise `InvalidRequest` unless the request has one image per placeholder."""
        placeholders = request.prompt.count(self.reader.placeholder)
        if placeholders != len(request.images):
            raise InvalidRequest(
                f"The prompt has {placeholders} image placeholders, but the request has {len(request.images)} images.",
                param="messages",
            )

    def prepare(self, request: EngineRequest) -> PreprocessingTask:
        """Start to encode the images of a request, or to read them if it is only counted.

        The result has the request with its prompt expanded.
        """
        canceled = Event()
        future = self._pool.submit(
            request.tenant, lambda: self._prepare(request, canceled), background=request.background
        )
        return PreprocessingTask(future, canceled)

    def close(self) -> None:
        self._closing = True
        self._pool.close()
        self._tower.close()

    def _prepare(self, request: EngineRequest, canceled: Event) -> tuple[EngineRequest, PromptImages]:
        try:
            if not request.count_only:
                self._wait_for_cache(canceled, background=request.background)
            for image in request.images:  # refuse a broken image before the tower encodes the others
                if self.cache.get(hash_image(image, request.cache_key)) is None:
                    self.reader.decode(image)
            encoded = []
            for image in request.images:
                get = self._get_or_read if request.count_only else self._get_or_encode
                image_hash = hash_image(image, request.cache_key)
                encoded.append(get(image, image_hash, canceled, background=request.background))
                self._check_length(len(request.prompt) + sum(len(each.tokens) - 1 for each in encoded))
            tokens, prompt_images = self._expander.expand(request.prompt, encoded)
            self._check_length(len(tokens) + request.longest_resumed)
        except (SyringaError, PreprocessingCanceled):
            raise
        except Exception as error:
            logger.exception("image preprocessing failed: request=%s", request.id)
            raise EngineError(f"An image could not be prepared: {error}") from error
        if request.background:
            with self._lock:
                self._in_background.add(prompt_images)
        return msgspec.structs.replace(request, prompt=tokens, images=()), prompt_images

    def _wait_for_cache(self, canceled: Event, *, background: bool) -> None:
        """Wait until the images that requests pin are within the cache limit.

        Background requests pin half of it at most, and other requests do not wait for what they pin. Only before the
        first image of a request: later, requests could wait for what each other pins.
        """
        while not (canceled.is_set() or self._closing):
            pinned = self._pinned_in_background()
            if background:
                full = pinned > self.cache.limit // 2 or self.cache.size > self.cache.limit
            else:
                full = self.cache.size - pinned > self.cache.limit
            if not full:
                return
            time.sleep(POLL_SECONDS)

    def _pinned_in_background(self) -> int:
        """Return the bytes of the images of background requests that wait or run."""
        with self._lock:
            return sum(image.size for image in {image for prompt in self._in_background for image in prompt.images})

    def _check_length(self, tokens: int) -> None:
        if tokens >= self.max_length:
            raise ContextLengthExceeded(
                f"With its images the prompt has {tokens} tokens or more; the context is {self.max_length} tokens, "
                "of which one at least is for the answer.",
                param="messages",
            )

    def _get_or_read(
        self, image: Image, image_hash: bytes, canceled: Event, *, background: bool = False
    ) -> EncodedImage:
        """Return an image from the cache, or else without embeddings, which only its tokens are read from."""
        if cached := self.cache.get(image_hash):
            return cached
        if canceled.is_set() or self._closing:
            raise PreprocessingCanceled
        return _encoded_image(image_hash, self.reader.read(image), torch.empty(0))

    def _get_or_encode(self, image: Image, image_hash: bytes, canceled: Event, *, background: bool) -> EncodedImage:
        """Return an image from the cache, or encode it once however many requests need it at the same time."""
        while True:
            with self._lock:
                if cached := self.cache.get(image_hash):
                    return cached
                entry = self._in_progress.get(image_hash)
                is_owner = entry is None
                if entry is None:
                    entry = self._in_progress[image_hash] = Future()
            if is_owner:
                self._complete(entry, image, image_hash, canceled, background=background)
            try:
                return entry.result()
            except PreprocessingCanceled:
                if is_owner:
                    raise
                # The owner of the entry was canceled: try again, as the owner if need be.

    def _complete(
        self, entry: Future[EncodedImage], image: Image, image_hash: bytes, canceled: Event, *, background: bool
    ) -> None:
        try:
            encoded = self._encode_image(image, image_hash, canceled, background=background)
            self.cache.add(encoded)
            entry.set_result(encoded)
        except BaseException as error:  # other requests wait for this entry: it must complete in any case
            entry.set_exception(error)
        with self._lock:
            del self._in_progress[image_hash]
            self.encoded_images += entry.exception() is None

    def _encode_image(self, image: Image, image_hash: bytes, canceled: Event, *, background: bool) -> EncodedImage:
        processed = self.reader.read(image)
        self._check_length(len(processed.tokens))
        parts = []
        # One tower call per tile or crop, so that an image with many of them does not block small images.
        for inputs in _consume_inputs(processed):
            if canceled.is_set() or self._closing:
                raise PreprocessingCanceled
            parts.append(self._tower.submit("", partial(self._encode, inputs), background=background).result())
        embeddings = torch.cat(parts)
        expected = sum(end - begin for begin, end in processed.ranges)
        if len(embeddings) != expected:
            raise EngineError(f"The vision tower returned {len(embeddings)} embeddings for {expected} image tokens.")
        return _encoded_image(image_hash, processed, embeddings)


def _encoded_image(image_hash: bytes, processed: ProcessedImage, embeddings: torch.Tensor) -> EncodedImage:
    return EncodedImage(
        image_hash,
        processed.tokens,
        processed.ranges,
        embeddings,
        processed.text_before,
        processed.text_after,
        processed.grid,
    )


def _consume_inputs(processed: ProcessedImage) -> Iterable[TowerInputs]:
    """Yield the tower inputs of an image, releasing each after use."""
    while processed.tower_inputs:
        yield processed.tower_inputs.pop(0)
