"""Images of a prompt as the scheduler sees them: placeholder ranges and content hashes. Torch-free."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from syringa.types import Image


def hash_image(image: Image, cache_key: bytes) -> bytes:
    """Return a hash of what the model gets from an image: its content, and whether it is of low detail.

    It depends on the request's cache key too, so that a tenant does not find the images of another.
    """
    detail = b"low" if image.detail == "low" else b"full"
    return hashlib.blake2b(image.digest + detail, key=cache_key, digest_size=32).digest()


@dataclass(eq=False)
class EncodedImage:
    """One image after the vision tower, independent of the prompt it is used in."""

    image_hash: bytes
    tokens: list[int]  # replace the placeholder in the prompt
    ranges: list[tuple[int, int]]  # half-open ranges of `tokens` whose embeddings come from the vision tower
    embeddings: Any  # a tensor, [image tokens, hidden]
    text_before: str = ""  # text around `tokens`, tokenized together with the text next to it
    text_after: str = ""
    grid: tuple[int, int] | None = None  # rows and columns of image tokens, for models with M-RoPE

    @property
    def size(self) -> int:
        """The size of the embeddings in bytes."""
        return int(self.embeddings.nbytes)


class PlaceholderRange(NamedTuple):
    """Consecutive positions of a prompt whose embeddings come from one image."""

    begin: int
    end: int
    image_hash: bytes
    embeddings: Any  # of this range only


@dataclass(eq=False)
class PromptImages:
    """The images of one prompt. A reference to this object keeps their embeddings in memory."""

    images: Sequence[EncodedImage]
    ranges: list[PlaceholderRange]  # by position
    bidirectional: bool = False  # whether the tokens of a range attend to each other in both directions
    mrope_positions: np.ndarray | None = None  # [3, prompt]: temporal, height and width, for models with M-RoPE
    mrope_delta: int = 0  # position minus index of the tokens after the prompt
    _begins: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._begins = [each.begin for each in self.ranges]

    def overlapping(self, begin: int, end: int) -> Iterator[PlaceholderRange]:
        """Yield the ranges that overlap positions [`begin`, `end`)."""
        for each in self.ranges[max(0, bisect_right(self._begins, begin) - 1) :]:
            if each.begin >= end:
                break
            if each.end > begin:
                yield each

    def block_hash_extra(self, begin: int, end: int) -> bytes:
        """Return what a block hash of positions [`begin`, `end`) must cover besides its tokens."""
        found = self.overlapping(begin, end)
        return b"".join(each.image_hash + (begin - each.begin).to_bytes(8, "little", signed=True) for each in found)

    def chunk_end(self, begin: int, end: int) -> int:
        """Return where a prefill chunk [`begin`, `end`) may end without splitting a bidirectional range.

        That is before the range, or after it if the chunk begins with it: this exceeds the token budget, but other
        sequences could otherwise starve the range forever.
        """
        if self.bidirectional:
            for each in self.overlapping(end - 1, end):
                if each.end > end:
                    return each.begin if each.begin > begin else each.end
        return end

    def chunk_begin(self, begin: int) -> int:
        """Return the last position up to `begin` where a chunk may begin without splitting a bidirectional range.

        The result would be correct inside a range too, but fewer rows at once would change the order of sums.
        """
        if self.bidirectional and begin:
            for each in self.overlapping(begin - 1, begin):
                if each.end > begin:
                    return each.begin
        return begin


def mrope_positions(length: int, grids: Sequence[tuple[int, tuple[int, int]]]) -> tuple[np.ndarray, int]:
    """Return the M-RoPE positions `[3, length]` of a prompt and the delta of the tokens after it.

    `grids` holds the index of the first token and (rows, columns) of each image. Text advances all three components by
    one; an image has one temporal position, and advances the next token by its longer side.
    """
    positions = np.empty((3, length), dtype=np.int64)
    index = position = 0
    for begin, (height, width) in grids:
        positions[:, index:begin] = np.arange(position, position + begin - index)
        position += begin - index
        index = begin + height * width
        cells = np.indices((1, height, width)).reshape(3, -1)
        positions[:, begin:index] = cells + position
        position += max(height, width)
    positions[:, index:] = np.arange(position, position + length - index)
    return positions, position - index
