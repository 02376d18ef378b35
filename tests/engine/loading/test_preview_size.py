"""The memory that GGUF files take at least, before they are here."""

from __future__ import annotations

from pathlib import Path

import pytest

from syringa.engine.loading.model_size import read_model_size
from syringa.engine.loading.preview_size import estimate_gguf
from syringa.modelfiles import describe, locate
from syringa.modelfiles.preview import Preview
from tests.engine.loading.gguf_files import write_gguf

GB = 10**9


@pytest.mark.parametrize(
    ("quantization", "parameters", "gguf", "bf16"),
    [
        ("Q4_K_M", 16.0, 10, 20),  # 16.5 really
        ("IQ2_XXS", 26.67, 10, 20),
        ("MXFP4_MOE", 16.0, 10, 20),
        ("Q8_0", 8.89, 8.89, 17.78),  # 9.4 really
        ("BF16", 5.0, 5.0, 10.0),
        ("F32", 2.5, 2.5, 5.0),
        (None, 2.5, 2.5, 5.0),  # it may be F32
    ],
)
def test_weights_are_those_of_the_file_or_in_int8(
    quantization: str | None, parameters: float, gguf: float, bf16: float
) -> None:
    preview = Preview(model="org/m", weight_bytes=10 * GB, quantization=quantization)
    found = estimate_gguf(preview, native=True, max_model_len=8192)
    assert round(found.parameters / GB, 2) == parameters
    assert {dtype: round(size / GB, 2) for dtype, size in found.weights.items()} == {
        "int8": gguf,
        "gguf": gguf,
        "bf16": bf16,
        "fp32": round(2 * bf16, 2),
    }


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_file_takes_no_less_than_its_estimate(tmp_path: Path, kind: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", ffn_gate=kind, ffn_up=kind, ffn_down=kind)
    files = locate(str(path))
    real = read_model_size(files, describe(files)).weights
    preview = Preview(model="m", weight_bytes=path.stat().st_size, quantization=kind)
    least = estimate_gguf(preview, native=True, max_model_len=8192).weights
    assert all(least[dtype] <= 1.02 * real[dtype] for dtype in least)  # the file also has a header
