"""Read before any test here computes: as for the other models on `transformers`' definitions."""

from tests.engine.models.conftest import kernel_threads  # noqa: F401
