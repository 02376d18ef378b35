"""Prepares requests with images beside the step loop: reads them, runs the vision tower, and expands the prompt.

The tower runs in one thread of its own, not in the step loop. There, a step with an image would last as long as the
tower does, seconds on a laptop, and every stream would stand still for it. Beside it they go on, slower while the two
share the cores. A request joins the queue when its images are rows of numbers, so the step loop never waits for one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event, Lock

import msgspec
import torch

from syringa.engine.vision.cache import PictureStore
from syringa.engine.vision.expand import Expander
from syringa.engine.vision.fair_pool import FairPool
from syringa.engine.vision.family import Inputs
from syringa.engine.vision.images import Picture, Pictures, picture_key
from syringa.engine.vision.reader import Reader, Reading
from syringa.errors import ContextLengthExceeded, EngineError, InvalidRequest, SyringaError
from syringa.types import EngineRequest, Image

logger = logging.getLogger("syringa.vision")

# How many requests are prepared at once: each may hold one image's pixels, 50 MB and more. The rest wait as files.
AT_ONCE = 4
STORE_BYTES = 512 << 20
PATIENCE_SECONDS = 0.02


class Abandoned(Exception):
    """Nobody waits any longer for the request that an image was prepared for."""


@dataclass(frozen=True)
class Preparation:
    """A request on its way. `future` fails with a `SyringaError`."""

    future: Future[tuple[EngineRequest, Pictures]]
    gone: Event

    def cancel(self) -> None:
        """Before it begins, or after the frame that the tower is at."""
        self.gone.set()
        self.future.cancel()


@dataclass(frozen=True)
class Vision:
    """What a model that sees brings along."""

    reader: Reader
    encode: Callable[[Inputs], torch.Tensor]  # the tower: [places, hidden] of one frame
    threads: int


class Studio:
    def __init__(self, vision: Vision, max_length: int, store_bytes: int = STORE_BYTES) -> None:
        self.reader = vision.reader
        self.max_length = max_length
        self.store = PictureStore(store_bytes)
        self.encoded = 0  # images that the tower has seen
        family = vision.reader.family
        self._encode = vision.encode
        self._expander = Expander(
            vision.reader.tokenizer, vision.reader.placeholder, joint=family.joint, planar=family.planar
        )
        self._lock = Lock()
        self._making: dict[bytes, Future[Picture]] = {}
        self._closing = False
        self._pool = FairPool(AT_ONCE, "images")
        # Torch's number of threads is a thread's own. The step loop's may be one, because its kernels have their own.
        self._tower = ThreadPoolExecutor(
            1, thread_name_prefix="tower", initializer=torch.set_num_threads, initargs=(vision.threads,)
        )
        self._tower.submit(int).result()  # starts it, while nobody computes yet

    def check(self, request: EngineRequest) -> None:
        """Raises `InvalidRequest` where placeholders and images do not fit one another."""
        places = request.prompt.count(self.reader.placeholder)
        if places != len(request.images):
            raise InvalidRequest(
                f"The prompt has places for {places} images and {len(request.images)} came with it.", param="messages"
            )

    def prepare(self, request: EngineRequest) -> Preparation:
        """The request with its images in their places and no longer as files."""
        gone = Event()
        return Preparation(self._pool.submit(request.tenant, lambda: self._prepare(request, gone)), gone)

    def close(self) -> None:
        self._closing = True
        self._pool.close()
        self._tower.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, request: EngineRequest, gone: Event) -> tuple[EngineRequest, Pictures]:
        try:
            self._wait_for_room()
            for image in request.images:  # a broken one should be told before the tower works for its neighbours
                if self.store.get(picture_key(image)) is None:
                    self.reader.decode(image)
            pictures = []
            for image in request.images:
                pictures.append(self._picture(image, gone))
                self._check_length(len(request.prompt) + sum(len(picture.tokens) - 1 for picture in pictures))
            tokens, placed = self._expander.expand(request.prompt, pictures)
            self._check_length(len(tokens))
        except (SyringaError, Abandoned):
            raise
        except Exception as error:
            logger.exception("an image could not be prepared")
            raise EngineError(f"An image could not be prepared: {error}") from error
        return msgspec.structs.replace(request, prompt=tokens, images=()), placed

    def _wait_for_room(self) -> None:
        """Until what running requests hold is within the limit. Only before a request's first image: with some of
        them made, several requests could each wait for what the others hold."""
        while self.store.size > self.store.limit and not self._closing:
            time.sleep(PATIENCE_SECONDS)

    def _check_length(self, tokens: int) -> None:
        if tokens >= self.max_length:
            raise ContextLengthExceeded(
                f"With its images the prompt has {tokens} tokens or more; the context is {self.max_length} tokens, "
                "of which one at least is for the answer.",
                param="messages",
            )

    def _picture(self, image: Image, gone: Event) -> Picture:
        """The tower sees an image once, however many requests ask for it at the same time."""
        key = picture_key(image)
        while True:
            with self._lock:
                if known := self.store.get(key):
                    return known
                entry = self._making.get(key)
                mine = entry is None
                if entry is None:
                    entry = self._making[key] = Future()
            if mine:
                self._fulfil(entry, image, key, gone)
            try:
                return entry.result()
            except Abandoned:
                if mine:
                    raise
                # Whoever made it for both has lost interest: the next one takes over.

    def _fulfil(self, entry: Future[Picture], image: Image, key: bytes, gone: Event) -> None:
        try:
            picture = self._make(image, key, gone)
            self.store.add(picture)
            entry.set_result(picture)
        except BaseException as error:  # those who wait for this entry must hear of it, whatever it is
            entry.set_exception(error)
        with self._lock:
            del self._making[key]
            self.encoded += entry.exception() is None

    def _make(self, image: Image, key: bytes, gone: Event) -> Picture:
        reading = self.reader.read(image)
        self._check_length(len(reading.tokens))
        parts = []
        # One frame at a time, so that many small images do not wait behind one with many tiles.
        for frame in _consumed(reading):
            if gone.is_set() or self._closing:
                raise Abandoned
            parts.append(self._tower.submit(self._encode, frame).result())
        rows = torch.cat(parts)
        places = sum(end - begin for begin, end in reading.runs)
        if len(rows) != places:
            raise EngineError(f"The vision tower gave {len(rows)} rows for {places} places.")
        return Picture(key, reading.tokens, reading.runs, rows, reading.lead, reading.tail, reading.grid)


def _consumed(reading: Reading) -> Iterable[Inputs]:
    """The frames, each forgotten once it was used."""
    while reading.frames:
        yield reading.frames.pop(0)
