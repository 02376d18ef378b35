"""Corrupt models in the real loader: refused in one line, or loaded with logits from which no NaN is drawn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from syringa.engine.cpu.native import load_kernels
from syringa.engine.loading.weights import open_weights
from syringa.errors import ModelError
from syringa.modelfiles import describe, locate, read_gguf
from tests.engine.loading.corrupt_models import small_gguf

pytestmark = pytest.mark.skipif(load_kernels(1) is None, reason="no kernels were built: there was no compiler")


def load_corrupt_models(
    folder: Path, seed: int, count: int, *options: str, script: str = "corrupt_models"
) -> dict[str, int]:
    """Load `count` corrupt models in a process of its own. Return the outcomes."""
    last = folder / f"last-{seed}"
    command = [sys.executable, "-m", f"tests.engine.loading.{script}", "--last", str(last)]
    command += ["--seed", str(seed), "--count", str(count), *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    where = last.read_text() if last.exists() else "the whole models"
    assert result.returncode == 0, f"ended with {result.returncode} at {where}: {result.stderr[-2000:]}"
    found: dict[str, Any] = json.loads(result.stdout)
    assert not found["failures"], "\n".join(found["failures"][:5])
    assert sum(found["outcomes"].values()) == count
    outcomes: dict[str, int] = found["outcomes"]
    return outcomes


def test_corrupt_models_are_refused_in_one_line(tmp_path: Path) -> None:
    outcomes = load_corrupt_models(tmp_path, seed=1, count=80)
    assert outcomes["refused"] > 30
    assert outcomes["loaded"] > 3


def test_corrupt_quantized_folders_are_refused_in_one_line(tmp_path: Path) -> None:
    outcomes = load_corrupt_models(tmp_path, 1, 300, "--quantized")
    assert outcomes["refused"] > 200
    assert outcomes["loaded"] > 20


@pytest.mark.slow
def test_many_corrupt_models_are_refused_in_one_line(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(load_corrupt_models, tmp_path, seed, 500) for seed in (2, 3)]
        runs.append(pool.submit(load_corrupt_models, tmp_path, 4, 2000, "--quantized"))
    assert sum(run.result()["refused"] for run in runs) > 1400


def test_corrupt_gguf_files_of_other_families_are_refused_in_one_line(tmp_path: Path) -> None:
    outcomes = load_corrupt_models(tmp_path, 1, 42, script="corrupt_hf_models")
    assert outcomes["refused"] > 15
    assert outcomes["loaded"] > 5


@pytest.mark.slow
def test_many_corrupt_gguf_files_of_other_families_are_refused_in_one_line(tmp_path: Path) -> None:
    assert load_corrupt_models(tmp_path, 2, 700, script="corrupt_hf_models")["refused"] > 280


@pytest.mark.parametrize("compiled", [True, False])
def test_file_that_is_truncated_after_it_was_opened_is_reported(tmp_path: Path, compiled: bool) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(small_gguf("llama"))
    files = locate(str(path))
    weights = open_weights(files, describe(files).config, load_kernels(2) if compiled else None)
    name = "model.layers.0.mlp.down_proj.weight"
    assert weights(name).isfinite().all()
    os.truncate(path, read_gguf(path).tensors["blk.0.ffn_down.weight"].offset)
    with pytest.raises(ModelError, match=r"m\.gguf was truncated while it was read"):
        weights(name)
