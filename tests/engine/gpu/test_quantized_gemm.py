"""Products with quantized weights under Triton's interpreter, against the same weights in fp32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.gpu_quantized import LAYERS, dense_cases, tiles_of
from syringa.engine.gpu import packed_weight
from syringa.engine.gpu.kernels import fp8, launch, moe, reference
from syringa.engine.gpu.kernels.fixed_point import FixedPointRows, fixed_point_rows
from syringa.engine.gpu.kernels.fp8 import quantize_rows
from syringa.engine.gpu.kernels.gemv import GemvConfig
from syringa.engine.gpu.kernels.int4_gemv import Int4GemvConfig, supports_int4_gemv
from syringa.engine.gpu.kernels.quantized_gemm import QuantizedConfig, dequantize
from syringa.engine.gpu.model import COMPILED_STEPS, DUMMY_DECODES
from syringa.engine.gpu.ops import quantized_linear as quantized_linear_module
from syringa.engine.gpu.ops.quantized_linear import (
    DEQUANTIZED_ROWS,
    FEW_TILES_ROWS,
    FUSED_ROWS,
    few_tiles_config,
    multiplies_fp8_rows,
    quantize_for,
    quantized_linear,
    quantized_matmul,
)
from syringa.engine.gpu.packed_weight import (
    PackedWeight,
    multiplies_blocks,
    pack_fp8,
    pack_weight,
    stack_packed,
    unpack_weight,
)
from syringa.engine.loading.quantized import QuantizedWeight, quantize_fp8
from syringa.engine.models.config import ClampedSwiglu
from tests.engine.gpu.compiled_kernels import make_weight
from tests.engine.gpu.kernel_inputs import FP32_TOLERANCE, dequantize_rows, nan_filled, random, relative_error

SMALL = QuantizedConfig(rows=16, outputs=16, inputs=128, warps=1, stages=1)
SPLIT_K = SMALL._replace(splits=3)


def random_codes(outputs: int, inputs: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.uint8)


def random_weight(kind: str, outputs: int, inputs: int, seed: int = 1) -> QuantizedWeight:
    """Return a weight of one of KINDS, with different scales everywhere."""
    form, _, detail = kind.partition(" ")
    group = inputs if detail in ("channel", "whole") else int(detail.split()[0])
    groups = -(-inputs // group)
    scales = random(outputs, groups, seed=seed).abs() / 8 + 0.01
    if form == "fp8":
        data, _ = quantize_fp8(random(outputs, inputs, seed=seed + 1))
        return QuantizedWeight("fp8", data, scales, group)
    codes = random_codes(outputs, inputs, seed + 2)
    if form == "mxfp4":
        scales = torch.exp2(random_codes(outputs, groups, seed + 3).float() / 2 - 7).bfloat16()
        return QuantizedWeight("mxfp4", codes, scales, group)
    zeros = random_codes(outputs, groups, seed + 4) + 1 if "zeros" in detail else None
    return QuantizedWeight("int4", codes, scales.half(), group, zeros)


KINDS = [
    "fp8 channel",
    "fp8 32",
    "int4 32",
    "int4 64 zeros",
    "int4 128",
    "int4 whole",
    "mxfp4 32",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inputs", [128, 160])
def test_pack_weight_keeps_numbers(kind: str, inputs: int) -> None:
    weight = random_weight(kind, 24, inputs)
    packed = pack_weight(weight)
    assert packed.shape == (24, inputs)
    assert torch.equal(unpack_weight(packed), weight.dequantize())
    assert torch.equal(dequantize(packed, torch.float32), weight.dequantize())


@pytest.mark.parametrize(
    ("capability", "outputs", "blocks_of", "expected"),
    [
        ((9, 0), 256, 128, True),
        ((8, 9), 256, 128, False),
        ((10, 0), 256, 128, False),
        ((12, 0), 256, 128, False),
        ((9, 0), 192, 128, False),
        ((9, 0), 256, 64, False),
    ],
)
def test_products_of_blocks_are_left_to_cublas_on_hopper_only(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], outputs: int, blocks_of: int, expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(packed_weight, "multiplies_blocks", lambda device: multiplies_blocks(torch.device("cuda", 0)))
    scales = random(-(-outputs // blocks_of), 512 // 128).abs().repeat_interleave(blocks_of, 0)[:outputs]
    data, _ = quantize_fp8(random(outputs, 512, seed=1))
    packed = pack_weight(QuantizedWeight("fp8", data, scales, 128))
    assert (packed.cublas_scales is not None) == expected
    per_output = pack_weight(QuantizedWeight("fp8", data, scales[:, :1], 512))
    assert per_output.cublas_scales is not None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "config", "everything"), [(1, SMALL, False), (17, SPLIT_K, True)], ids=["plain", "fused, split inputs"]
)
def test_quantized_linear_matches_reference(
    kind: str, rows: int, config: QuantizedConfig, everything: bool
) -> None:  # fmt: skip
    inputs, outputs = 352, 30  # the last tile of outputs and the last iteration are partial
    weight = pack_weight(random_weight(kind, outputs * (2 if everything else 1), inputs))
    x = random(rows, inputs)
    bias = random(len(weight), seed=7) if everything else None
    options: dict[str, Any] = {
        "gated": everything,
        "residual": random(rows, outputs, seed=8) if everything else None,
        "norm_weight": random(inputs, seed=9) if everything else None,
        "eps": 1e-6,
    }
    expected = reference.linear(x.double(), unpack_weight(weight), bias, dtype=torch.float64, **options)
    out = quantized_linear(x, weight, bias, out=nan_filled(rows, outputs), config=config, **options)
    assert relative_error(out, expected) < FP32_TOLERANCE
    assert not launch.get_workspace(x.device, 0, 0)[1].any(), "a counter was not reset"


@pytest.mark.parametrize("kind", ["fp8 channel", "fp8 32"])
def test_quantized_linear_with_fp8_rows_matches_rounded_reference(kind: str) -> None:
    weight, x = pack_weight(random_weight(kind, 60, 352)), random(17, 352)
    norm_weight = random(352, seed=9)
    rows, scales = quantize_rows(x, weight.row_group, norm_weight=norm_weight, eps=1e-6)
    normed = reference.rms_norm(x, norm_weight, 1e-6)
    rounded = dequantize_rows(rows, scales, weight.row_group)
    assert 0 < relative_error(rounded, normed) < 0.1  # the interpreter truncates
    expected = reference.linear(rounded.double(), unpack_weight(weight), gated=True, dtype=torch.float64)
    config = SPLIT_K._replace(fp8_rows=True)
    out = quantized_linear(x, weight, gated=True, norm_weight=norm_weight, eps=1e-6, config=config)
    assert relative_error(out, expected) < FP32_TOLERANCE


@pytest.mark.parametrize("group", [0, 32])
def test_quantize_rows_applies_what_comes_before_the_product(group: int) -> None:
    x, residual, norm_weight = random(5, 96), random(5, 96, seed=2), random(96, seed=3)
    total = x + residual
    rows, scales = quantize_rows(x, group, residual=residual, norm_weight=norm_weight, eps=1e-6)
    assert torch.equal(residual, total)
    expected = quantize_rows(reference.rms_norm(total, norm_weight, 1e-6), group)
    assert relative_error(dequantize_rows(rows, scales, group), dequantize_rows(*expected, group)) < 0.01
    pair = random(5, 2 * 96, seed=4)
    rows, scales = quantize_rows(pair, group, gated=True)
    assert rows.shape == (5, 96)
    expected = quantize_rows(reference.silu_mul(pair), group)
    assert relative_error(dequantize_rows(rows, scales, group), dequantize_rows(*expected, group)) < 0.01


@pytest.mark.parametrize(("width", "warps"), [(256, 1), (1024, 2), (4096, 8), (12_288, 8), (16_384, 8), (16_416, 16)])
def test_quantize_rows_chooses_warps_by_width(monkeypatch: pytest.MonkeyPatch, width: int, warps: int) -> None:
    launched: list[int] = []

    def launch_kernel(*args: Any, num_warps: int, **constants: Any) -> None:
        launched.append(num_warps)

    monkeypatch.setattr(fp8, "_quantize_kernel", {(1,): launch_kernel})
    quantize_rows(torch.empty(1, width, device="meta"))
    assert launched == [warps]


@pytest.mark.parametrize("inputs", [512, 8256])  # the inputs of the second are split
def test_fp8_rows_with_few_tiles_are_not_left_to_cublas(monkeypatch: pytest.MonkeyPatch, inputs: int) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", None)
    rows = FUSED_ROWS + 3
    weight, x, bias = pack_fp8(random(32, inputs)), random(rows, inputs, seed=2), random(32, seed=3)
    assert multiplies_fp8_rows(rows, weight)
    quantized = quantize_for(x, weight)
    rounded = dequantize_rows(quantized.values, quantized.scales, 0)
    expected = reference.linear(rounded.double(), unpack_weight(weight), bias, dtype=torch.float64)
    for given in (x, quantized):
        assert relative_error(quantized_matmul(given, weight, bias), expected) < FP32_TOLERANCE


@pytest.mark.parametrize(
    ("rows", "outputs", "kind", "processors"),
    [
        (257, 64, "fp8 channel", 132),
        (65, 64 * 133, "fp8 channel", 132),
        (65, 64 * 59, "fp8 channel", 58),
        (65, 128, "fp8 128", 132),
    ],
    ids=["many rows", "many tiles", "many tiles for an L4", "blocks"],
)
def test_other_fp8_rows_are_left_to_cublas(
    monkeypatch: pytest.MonkeyPatch, rows: int, outputs: int, kind: str, processors: int
) -> None:
    monkeypatch.setattr(quantized_linear_module, "num_processors", lambda: processors)
    weight = replace(pack_weight(random_weight(kind, outputs, 256)), cublas_scales=torch.ones(1))
    calls: list[Any] = []

    def scaled_mm(a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append((len(a), b.shape[1], options["use_fast_accum"]))
        return torch.zeros(len(a), b.shape[1])

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    padded = rows if weight.per_channel else -(-rows // 4) * 4
    assert quantized_matmul(random(rows, 256), weight, None).shape == (rows, outputs)
    assert calls == [(padded, outputs, weight.per_channel)]


def test_benchmark_times_the_configurations_of_few_tiles() -> None:
    found = set()
    for case in dense_cases(["fp8 channel"]):
        if FUSED_ROWS < case.rows <= FEW_TILES_ROWS:
            weight = make_weight("fp8", *LAYERS[case.layer])
            if (config := few_tiles_config(case.rows, weight)) is not None:
                assert config in tiles_of(case)
                found.add(case.layer)
    assert found == {"qkv", "o", "down"}


@pytest.mark.parametrize("kind", ["fp8", "fp8 blocks", "int4"])
@pytest.mark.parametrize("shape", [(1024, 2048), (1024, 3072), (4096, 1024), (2048, 6144), (2560, 9728), (4096, 12288)])
def test_compiled_steps_use_every_configuration_of_mixed_steps(
    monkeypatch: pytest.MonkeyPatch, kind: str, shape: tuple[int, int]
) -> None:
    """Of layers of Qwen3 from 0.6B to 8B, without a product being computed."""
    weight = make_weight(kind, *shape)
    weight = replace(weight, cublas_scales=weight.scales if kind == "fp8" else None)
    used: list[Any] = []

    def multiply(x: torch.Tensor, weight: PackedWeight, *args: Any, x_scales: Any = None, **options: Any) -> None:
        used.append(next(each for each in args if isinstance(each, tuple)))

    monkeypatch.setattr(quantized_linear_module, "quantized_gemm", multiply)
    for name in ("gemv", "int4_gemv", "fixed_point_rows"):
        monkeypatch.setattr(quantized_linear_module, name, lambda *args, **options: None)
    monkeypatch.setattr(quantized_linear_module, "quantize_rows", lambda x, *args, **options: (x, x))
    monkeypatch.setattr(torch, "_scaled_mm", lambda x, *args, **options: x)

    def configurations(rows: int) -> set[Any]:
        used.clear()
        quantized_matmul(torch.empty(rows, shape[1], dtype=torch.bfloat16, device="meta"), weight, None)
        return set(used)

    most, compiled = DEQUANTIZED_ROWS - 1, set()
    for prompt, _, logits in COMPILED_STEPS:
        compiled |= configurations(min(DUMMY_DECODES + prompt, most)) | configurations(logits)
    for rows in range(1, most + 1):
        assert configurations(rows) <= compiled, f"{rows} rows"


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("gated", [False, True])
def test_fp8_gemv_matches_reference(rows: int, gated: bool) -> None:
    weight, x = pack_fp8(random(32, 100)), random(rows, 100, seed=2)
    bias, norm_weight = random(32, seed=3), random(100, seed=4)
    options: dict[str, Any] = {"gated": gated, "norm_weight": norm_weight, "eps": 1e-6}
    expected = reference.linear(x.double(), unpack_weight(weight), bias, dtype=torch.float64, **options)
    out = quantized_linear(x, weight, bias, config=GemvConfig(4, 32, 1), **options)
    assert relative_error(out, expected) < FP32_TOLERANCE


def to_floats(rows: FixedPointRows) -> torch.Tensor:
    numbers = 256 * rows.high.double() + rows.low.double()
    units = numbers.unflatten(1, (rows.scales.shape[1], -1))
    assert torch.equal(rows.sums.double(), numbers.unflatten(1, (rows.sums.shape[1], -1)).sum(-1))
    return (units * rows.scales.double()[:, :, None]).flatten(1)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_fixed_point_rows_round_to_15_bits_of_the_largest_input(norm: bool, ordered: bool) -> None:
    unit = 64
    x, norm_weight = 3.0 * random(2, 1280, seed=2), random(1280, seed=4)
    x[1, :unit] = 0.0
    order = torch.randperm(1280, generator=torch.Generator().manual_seed(5)) if ordered else None
    rows = fixed_point_rows(x, unit, order=order, norm_weight=norm_weight if norm else None, eps=1e-6)
    expected = reference.rms_norm(x.double(), norm_weight.double(), 1e-6) if norm else x.double()
    expected = expected if order is None else expected[:, order]
    largest = expected.unflatten(1, (-1, unit)).abs().amax(-1).repeat_interleave(unit, 1)
    assert bool(((to_floats(rows) - expected).abs() <= 0.51 * largest / 32767 + 1e-6 * largest).all())


@pytest.mark.parametrize("kind", ["int4 32", "int4 64 zeros", "int4 128", "int4 128 zeros", "int4 256", "int4 whole"])
@pytest.mark.parametrize(("rows", "everything"), [(1, True), (2, True), (2, False)])
def test_int4_gemv_matches_reference(kind: str, rows: int, everything: bool) -> None:
    inputs, outputs = 768, 30  # the last program and the last iteration are partial
    weight = pack_weight(random_weight(kind, outputs * (2 if everything else 1), inputs))
    x = random(rows, inputs, seed=2).bfloat16()
    bias = random(len(weight), seed=7) if everything else None
    options: dict[str, Any] = {
        "gated": everything,
        "residual": random(rows, outputs, seed=8) if everything else None,
    }
    rounded = to_floats(fixed_point_rows(x, weight.unit))
    expected = reference.linear(rounded, unpack_weight(weight), bias, dtype=torch.float64, **options)
    config = Int4GemvConfig(512, 1)
    out = quantized_linear(x, weight, bias, out=nan_filled(rows, outputs), config=config, **options)
    assert relative_error(out, expected) < FP32_TOLERANCE


@pytest.mark.parametrize(
    ("kind", "inputs", "rows", "dtype", "supported"),
    [
        ("int4 128", 512, 2, torch.bfloat16, True),
        ("int4 128", 512, 3, torch.bfloat16, False),
        ("int4 128", 512, 1, torch.float32, False),
        ("int4 128", 576, 1, torch.bfloat16, False),
        ("int4 96", 576, 1, torch.bfloat16, False),
        ("mxfp4 32", 512, 1, torch.bfloat16, False),
    ],
)
def test_supports_int4_gemv(kind: str, inputs: int, rows: int, dtype: torch.dtype, supported: bool) -> None:
    assert supports_int4_gemv(pack_weight(random_weight(kind, 8, inputs)), rows, dtype) is supported


@pytest.mark.parametrize("kind", ["fp8 32", "int4 64 zeros"])
@pytest.mark.parametrize("rows", [3, 70, 400])
def test_quantized_matmul_with_default_config_matches_reference(kind: str, rows: int) -> None:
    weight, x, bias = pack_weight(random_weight(kind, 48, 160)), random(rows, 160), random(48, seed=3)
    expected = reference.linear(x.double(), unpack_weight(weight), bias, dtype=torch.float64)
    assert relative_error(quantized_matmul(x, weight, bias), expected) < FP32_TOLERANCE


@pytest.mark.parametrize("rows", [2, 400])
def test_quantized_matmul_reorders_inputs(rows: int) -> None:
    stored = random_weight("int4 32", 16, 128)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(1))
    stored = QuantizedWeight("int4", stored.data, stored.scales, 32, order=order)
    x = random(rows, 128)
    expected = x.double() @ stored.dequantize().double().T
    assert relative_error(quantized_matmul(x, pack_weight(stored), None), expected) < FP32_TOLERANCE


@pytest.mark.parametrize(
    ("kind", "tokens", "swiglu"),
    [
        ("fp8 channel", 9, None),
        ("fp8 channel", 9, ClampedSwiglu(1.702, 0.5)),
        ("fp8 32", 1, None),
        ("int4 64 zeros", 9, None),
        ("mxfp4 32", 1, ClampedSwiglu(1.702, 0.5)),
        ("mxfp4 32", 9, ClampedSwiglu(1.702, 0.5)),
    ],
)
def test_moe_mlp_with_quantized_experts_matches_reference(kind: str, tokens: int, swiglu: ClampedSwiglu | None) -> None:
    experts, hidden, intermediate, top_k = 4, 96, 64, 2

    def stack(outputs: int, inputs: int, seed: int) -> PackedWeight:
        return stack_packed([pack_weight(random_weight(kind, outputs, inputs, seed + 9 * e)) for e in range(experts)])

    gate_up, down = stack(2 * intermediate, hidden, 1), stack(hidden, intermediate, 5)
    x, logits = random(tokens, hidden), random(tokens, experts, seed=2)
    assert torch.equal(dequantize(gate_up, torch.float32), unpack_weight(gate_up))
    biases = random(experts, 2 * intermediate, seed=3), random(experts, hidden, seed=4)
    expected = reference.moe_mlp(
        x, logits, unpack_weight(gate_up), unpack_weight(down), top_k, biases=biases, swiglu=swiglu
    )
    configs = SMALL, SMALL._replace(outputs=32)
    result = moe.moe_mlp(x, logits, gate_up, down, top_k, biases=biases, swiglu=swiglu, configs=configs)
    assert relative_error(result, expected) < 1e-5
    if gate_up.format != "fp8":
        return
    in_fp8 = [config._replace(fp8_rows=True) for config in configs]
    result = moe.moe_mlp(x, logits, gate_up, down, top_k, biases=biases, swiglu=swiglu, configs=(configs[0], in_fp8[1]))
    assert 1e-5 < relative_error(result, expected) < 0.1  # the interpreter truncates
    rows, scales = quantize_rows(x, gate_up.row_group)
    rounded = rows.float() * scales.T.repeat_interleave(gate_up.row_group or hidden, 1)[:, :hidden]
    expected = reference.moe_mlp(
        rounded, logits, unpack_weight(gate_up), unpack_weight(down), top_k, biases=biases, swiglu=swiglu
    )
    result = moe.moe_mlp(x, logits, gate_up, down, top_k, biases=biases, swiglu=swiglu, configs=(in_fp8[0], configs[1]))
    assert relative_error(result, expected) < 1e-5
