"""Kernels on GPUs with less shared memory than the one that their tile sizes were measured on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from syringa.engine.gpu.kernels import launch, prefill_attention

KIB = 1 << 10


@pytest.mark.parametrize(
    ("available", "stages", "stage_bytes", "expected"),
    [
        (227 * KIB, 4, 48 * KIB, 4),  # Hopper: as measured
        (227 * KIB, 6, 100 * KIB, 6),
        (0, 4, 48 * KIB, 4),  # no GPU, or not known
        (99 * KIB, 4, 16 * KIB, 4),
        (99 * KIB, 4, 48 * KIB, 3),
        (99 * KIB, 4, 68 * KIB, 2),
        (99 * KIB, 4, 200 * KIB, 1),
        (163 * KIB, 4, 48 * KIB, 4),
    ],
)
def test_fit_stages_keeps_what_has_room(
    monkeypatch: pytest.MonkeyPatch, available: int, stages: int, stage_bytes: int, expected: int
) -> None:
    monkeypatch.setattr(launch, "shared_memory", lambda: available)
    assert launch.fit_stages(stages, stage_bytes) == expected


@pytest.mark.parametrize(
    ("available", "keys", "small_keys"), [(227 * KIB, 64, 64), (163 * KIB, 32, 32), (99 * KIB, 16, 32), (0, 32, 32)]
)
def test_tiles_of_wide_heads_fit_beside_the_queries(
    monkeypatch: pytest.MonkeyPatch, available: int, keys: int, small_keys: int
) -> None:
    """Those of Hopper are as measured. `small_keys`: with a cache in FP8."""
    for module in (launch, prefill_attention):
        monkeypatch.setattr(module, "shared_memory", lambda: available)
    assert prefill_attention.choose_config(256).keys == keys
    assert prefill_attention.choose_config(256, torch.float8_e4m3fn).keys == small_keys


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "kib"), [(80, 163), (89, 99), (120, 99)])
def test_kernels_compile_and_fit_in_shared_memory(tmp_path: Path, capability: int, kib: int) -> None:
    """Of A100, of RTX 4090 and L40S, and of RTX 5090. Compiled without a GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.gpu.compiled_kernels", str(capability), str(kib)]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=900,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found: dict[str, float] = json.loads(result.stdout)
    assert len(found) > 20
    for name in (
        "_decode_kernel",
        "_prefill_kernel",
        "_scan_kernel",
        "_inverse_kernel",
        "_delta_decode_kernel",
        "_tiled",
    ):
        assert any(each.startswith(name) for each in found)
    if capability >= 89:  # the variants of kernels with FP8 rows
        parts = [set(each.split()) for each in found]
        for group in ("GROUP=0", "GROUP=128"):
            for variant in ({"NORM=True", "ADD=True", "GATED=False"}, {"NORM=False", "ADD=False", "GATED=True"}):
                assert any({"_quantize_kernel", group, *variant} <= each for each in parts)
        assert any({"_quantized_kernel", "FP8_ROWS=True", "BLOCK_M=64", "SPLITS=4"} <= each for each in parts)
    assert not {name: size for name, size in found.items() if size > kib}
    # Of products whose weights are loaded some iterations ahead. With the next tile only, 10 to 52.
    assert min(size for name, size in found.items() if name.startswith("_grouped")) > 60
