"""A worker sizes its KV cache and its context by the memory that its parent has found free."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from syringa.engine.cpu.features import NO_MEMORY
from syringa.engine.loading.memory_plan import MemorySettings, program_bytes
from syringa.engine.loading.model_size import read_size
from syringa.engine.worker import startup
from syringa.engine.worker.options import WorkerOptions
from syringa.engine.worker.startup import load_engine, read_ahead
from syringa.errors import InvalidRequest, ModelError
from tests.engine.conftest import request
from tests.engine.loading.gguf_files import CACHE_BYTES, write_gguf
from tests.modelfiles.gguf_builder import write_parts


def options(path: Path, cache_tokens: int) -> WorkerOptions:
    """Return the options of a worker that finds memory for a cache of so many tokens beside its weights."""
    size = read_size(str(path))
    assert size is not None
    free = size.weights["bf16"] + program_bytes(size, MemorySettings()) + cache_tokens * CACHE_BYTES
    return WorkerOptions(socket="", model=str(path), dtype="bf16", device="cpu", threads=1, free_memory=free)


def test_worker_reduces_context_to_the_memory_that_is_free(tmp_path: Path) -> None:
    core, ready = load_engine(options(write_gguf(tmp_path / "m.gguf"), 4300))
    try:
        assert ready.info.max_model_len == core.max_length == 4096  # of 8192
        assert core.stats().blocks_total == 4300 // 16
        core.submit(request("a", [2] * 4095))
        with pytest.raises(InvalidRequest, match="4097 tokens"):
            core.submit(request("b", [2] * 4097))
    finally:
        core.close()


def test_worker_refuses_model_for_which_too_little_memory_is_free(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"m needs .* of memory") as refused:
        load_engine(options(write_gguf(tmp_path / "m.gguf"), 2000))
    assert refused.value.code == NO_MEMORY


def test_read_ahead_covers_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    requested = []

    def note(file: int, offset: int, length: int, advice: int) -> None:
        # Threads of engines that other tests have loaded may read ahead in this process as well.
        if os.path.samestat(os.fstat(file), path.stat()):
            requested.append((offset, length))

    monkeypatch.setattr(os, "posix_fadvise", note)
    monkeypatch.setattr(startup, "READ_AHEAD_BYTES", 1000)
    read_ahead(str(path))
    assert requested == [(offset, 1000) for offset in range(0, path.stat().st_size, 1000)]


def test_read_ahead_covers_all_parts_of_a_split_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = write_parts(tmp_path)
    requested = []

    def note(file: int, offset: int, length: int, advice: int) -> None:
        requested.extend(part for part in parts if os.path.samestat(os.fstat(file), part.stat()))

    monkeypatch.setattr(os, "posix_fadvise", note)
    read_ahead(str(parts[0]))
    assert requested == parts


def test_read_ahead_leaves_errors_to_the_loader(tmp_path: Path) -> None:
    read_ahead(str(tmp_path / "missing.gguf"))
