"""Vectors of an engine's result: reading, normalizing and comparing them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

from syringa.modelfiles.embedding import Similarity
from syringa.types import EmbeddingResult

Vector = Sequence[float]


def read_vectors(result: EmbeddingResult) -> list[Vector]:
    """Return the vectors of a result without copying them."""
    values, width = memoryview(result.values).cast("f"), result.width
    return [values[start : start + width] for start in range(0, len(values), width)]


def normalize(vector: Vector) -> Vector:
    """Return a vector scaled to the length 1."""
    length = math.hypot(*vector)
    return [value / length for value in vector] if length else vector


def cosine_similarity(a: Vector, b: Vector) -> float:
    lengths = math.hypot(*a) * math.hypot(*b)
    return _dot(a, b) / lengths if lengths else 0.0


def _dot(a: Vector, b: Vector) -> float:
    return math.fsum(map(operator.mul, a, b))


# As sentence-transformers has them: more is more similar, so distances are negative.
SIMILARITIES: dict[Similarity, Callable[[Vector, Vector], float]] = {
    "cosine": cosine_similarity,
    "dot": _dot,
    "euclidean": lambda a, b: -math.dist(a, b),
    "manhattan": lambda a, b: -sum(map(abs, map(operator.sub, a, b))),
}
