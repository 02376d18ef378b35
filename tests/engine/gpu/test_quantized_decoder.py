"""Decoders with quantized weights as they are stored, by Triton's interpreter against the reference operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from syringa.engine.gpu.decoder import GpuExperts
from syringa.engine.gpu.ops.base import ReferenceOps
from syringa.engine.gpu.ops.triton_ops import TritonOps
from syringa.engine.gpu.packed_weight import PackedWeight
from tests.engine.gpu.tiny_models import load_stored_gpu_model
from tests.engine.loading.quantized_folders import quantize_folder
from tests.engine.models.native_models import EXPERTS
from tests.engine.models.tiny_models import PROMPTS, SIZES, difference, run, save

SMALL: dict[str, Any] = SIZES | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
SPARSE = SMALL | EXPERTS | {"moe_intermediate_size": 64, "num_experts": 12}  # few rows per expert stay in fp32


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", "fp8 blocks"),
        ("llama", "gptq act-order"),
        ("qwen3", "awq"),
        ("qwen3_moe", "compressed"),
        ("qwen3_moe", "fp8 blocks"),
    ],
)
def test_quantized_decoder_on_kernels_matches_reference_ops(tmp_path: Path, family: str, layout: str) -> None:
    """Prefill, a step with decode and prefill rows, and decode steps on the fused path."""
    save(tmp_path, AutoConfig.for_model(family, **(SPARSE if family.endswith("moe") else SMALL)))
    quantize_folder(tmp_path, layout)
    prompts = [PROMPTS[0][:5], PROMPTS[2][:8]]  # short: a step takes a second in the interpreter
    expected = run(load_stored_gpu_model(tmp_path, ReferenceOps()), prompts)
    on_kernels = load_stored_gpu_model(tmp_path, TritonOps())
    decoder: Any = on_kernels.model.decoder  # type: ignore[attr-defined]
    mlp = decoder.layers[0].mlp
    assert isinstance(mlp.down if isinstance(mlp, GpuExperts) else mlp.down.weight, PackedWeight)
    found = [*run(on_kernels, prompts, chunk=4), *run(on_kernels, [prompts[0][:2]], chunk=1)]
    for logits, wanted in zip(found, [*expected, expected[0][:2]], strict=True):
        assert difference(logits, wanted) < 1e-5
