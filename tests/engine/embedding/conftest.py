"""Disable AMX before any test computes, and start the kernels' threads, as in `tests/engine/models/conftest.py`."""

from __future__ import annotations

from tests.engine.models.conftest import kernel_threads

__all__ = ["kernel_threads"]
