"""The inputs of a step, packed one after the other without padding. Torch-free."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PackedBatch:
    """T tokens of S inputs. All arrays are int32 and contiguous."""

    tokens: np.ndarray  # [T]
    types: np.ndarray  # [T]: 1 for tokens of the second text of a pair, else 0
    starts: np.ndarray  # [S + 1]: input s has the tokens starts[s] up to starts[s + 1]

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    @property
    def positions(self) -> np.ndarray:
        """The position of each token in its input."""
        positions = np.arange(len(self.tokens), dtype=np.int32)
        positions -= np.repeat(self.starts[:-1], self.lengths)
        return positions


def pack_inputs(inputs: Sequence[Sequence[int]], seconds: Sequence[int] = ()) -> PackedBatch:
    """Pack inputs. `seconds`: where the second text of each begins; empty, or 0 for one that is no pair."""
    starts = np.zeros(len(inputs) + 1, dtype=np.int32)
    np.cumsum([len(tokens) for tokens in inputs], out=starts[1:])
    total = int(starts[-1])
    tokens = np.fromiter(itertools.chain.from_iterable(inputs), dtype=np.int32, count=total)
    types = np.zeros(total, dtype=np.int32)
    for index, second in enumerate(seconds):
        if second:
            types[starts[index] + second : starts[index + 1]] = 1
    return PackedBatch(tokens, types, starts)


def similar_lengths(lengths: Sequence[int], max_padded: int) -> list[list[int]]:
    """Group inputs, by index, for code that pads them to the longest of a group.

    The longest input of a group is less than twice as long as the shortest, so padding costs less than the tokens
    themselves. A group has at most `max_padded` tokens with padding, or one input.
    """
    by_size: defaultdict[int, list[int]] = defaultdict(list)
    for index, length in enumerate(lengths):
        by_size[int(length).bit_length()].append(index)
    groups: list[list[int]] = []
    for members in by_size.values():
        members.sort(key=lambda index: lengths[index])
        group: list[int] = []
        for index in members:
            if group and (len(group) + 1) * lengths[index] > max_padded:
                groups.append(group)
                group = []
            group.append(index)
        groups.append(group)
    return groups
