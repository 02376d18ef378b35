"""GGUF models whose weights stay in the file's quantized blocks, compared with the same file in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from syringa.engine.cpu.layers.linear import BlockEmbedding, BlockLinear, Int8Linear
from syringa.engine.cpu.native import BLOCK_TYPES, load_kernels
from syringa.engine.loading import precision
from syringa.engine.loading.loaded_model import LoadedModel, LoadOptions
from syringa.engine.loading.loader import load_model
from syringa.engine.loading.model_size import ModelSize
from syringa.engine.loading.weights import GgufWeights
from syringa.engine.models.fused import FusedDecoder
from syringa.errors import ModelError
from syringa.modelfiles import locate, read_gguf
from tests.engine.gguf_blocks import dequantize, random_blocks
from tests.engine.models.tiny_models import PROMPTS, run
from tests.modelfiles.gguf_builder import StoredTensor, Tensor, gguf, llama

pytestmark = pytest.mark.skipif(load_kernels(1) is None, reason="no kernels were built: there was no compiler")
HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, VOCAB = 256, 4, 2, 512, 160
SHAPES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INTERMEDIATE, HIDDEN),
    "ffn_up": (INTERMEDIATE, HIDDEN),
    "ffn_down": (HIDDEN, INTERMEDIATE),
}
Q4_K_M = dict.fromkeys(SHAPES, "Q4_K") | {"attn_v": "Q6_K", "ffn_down": "Q6_K"}
# Each layer's types, in the order of SHAPES.
MIXED = [
    dict(zip(SHAPES, ("Q4_0", "Q5_0", "Q8_0", "Q5_1", "Q4_1", "Q4_1", "IQ4_XS"), strict=True)),
    dict(zip(SHAPES, ("Q5_K", "IQ4_NL", "MXFP4", "Q6_K", "Q4_K", "Q5_K", "Q2_K"), strict=True)),
]


class GgufModel:
    """A file with random weights of a usual size. Blocks are written as they are, tensors of type F32 are random."""

    def __init__(self, path: Path, architecture: str, layers: list[dict[str, str]], *, head: str | None) -> None:
        self.writer = GGUFWriter(path, architecture)
        writer, self.random = self.writer, np.random.default_rng(0)
        writer.add_block_count(len(layers))
        writer.add_context_length(256)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(INTERMEDIATE)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list([f"t{i}" for i in range(VOCAB)])
        writer.add_token_types([1] * VOCAB)
        writer.add_token_merges(["t 1"])
        self.matrix("token_embd", (VOCAB, HIDDEN), "Q6_K")
        self.vector("output_norm.weight", HIDDEN)
        if head:
            self.matrix("output", (VOCAB, HIDDEN), head)
        for i, types in enumerate(layers):
            self.vector(f"blk.{i}.attn_norm.weight", HIDDEN)
            self.vector(f"blk.{i}.ffn_norm.weight", HIDDEN)
            for name, shape in SHAPES.items():
                self.matrix(f"blk.{i}.{name}", shape, types[name])
                if architecture == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                    self.vector(f"blk.{i}.{name}.bias", shape[0])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def vector(self, name: str, size: int) -> None:
        self.writer.add_tensor(name, (1 + self.random.normal(0, 0.1, size)).astype(np.float32))

    def matrix(self, name: str, shape: tuple[int, int], type_name: str) -> None:
        seed = int(self.random.integers(1 << 30))
        if type_name == "F32":
            self.writer.add_tensor(f"{name}.weight", self.random.normal(0, 0.06, shape).astype(np.float32))
            return
        spread = dequantize(random_blocks(type_name, *shape, seed, scale=1.0), type_name).std()
        blocks = random_blocks(type_name, *shape, seed, scale=0.06 / float(spread))
        self.writer.add_tensor(f"{name}.weight", blocks, raw_dtype=GGMLQuantizationType[type_name])


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def load(path: Path, dtype: str) -> LoadedModel:
    return load_model(LoadOptions(model=str(path), dtype=dtype, threads=2))


@pytest.mark.parametrize(
    ("architecture", "layers", "head"),
    [("llama", [Q4_K_M, Q4_K_M], "Q6_K"), ("qwen2", [Q4_K_M, Q4_K_M], None), ("llama", MIXED, "F32")],
    ids=["llama", "qwen2 tied", "mixed types"],
)
def test_gguf_logits_match_fp32_and_are_batch_invariant(
    tmp_path: Path, architecture: str, layers: list[dict[str, str]], head: str | None
) -> None:
    path = tmp_path / "m.gguf"
    GgufModel(path, architecture, layers, head=head)
    loaded = load(path, "gguf")
    assert loaded.info.dtype == "gguf"
    expected = run(load(path, "fp32"), PROMPTS)
    batch = run(loaded, PROMPTS)
    for got, wanted in zip(batch, expected, strict=True):
        assert float((got - wanted).norm() / wanted.norm()) < 0.1
    for i, prompt in enumerate(PROMPTS):
        assert torch.equal(run(loaded, [prompt])[0], batch[i])
    for chunk in (1, 13):
        for got, whole in zip(run(loaded, PROMPTS, chunk=chunk), batch, strict=True):
            assert torch.equal(got, whole)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_logits_in_blocks_are_as_accurate_as_in_int8(tmp_path: Path, kind: str) -> None:
    """Weights are exact in blocks, and activations have one scale per 64 or 128 inputs, those of int8 per 64."""
    path = tmp_path / "m.gguf"
    GgufModel(path, "llama", [dict.fromkeys(SHAPES, kind)] * 2, head=kind)
    prompts = [[(7 * i * i + 3 * i + 11 * j) % 150 + 5 for i in range(40)] for j in range(12)]
    expected = torch.cat(run(load(path, "fp32"), prompts))

    def error(dtype: str) -> float:
        return float((torch.cat(run(load(path, dtype), prompts)) - expected).norm() / expected.norm())

    assert error("gguf") < error("int8")
    assert error("gguf") < 0.05


def test_gguf_layers_stay_in_blocks_where_types_allow(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    GgufModel(path, "llama", MIXED, head="F32")
    model: Any = load(path, "gguf").model
    first, second = model.layers
    assert isinstance(model.embedding, BlockEmbedding)
    assert isinstance(model.head, Int8Linear)  # from F32
    attention, mlp = first.mixer, first.mlp
    linears = attention.project, attention.out.linear, mlp.gate_up.linear, mlp.down.linear
    assert all(isinstance(each, BlockLinear) for each in linears)
    assert isinstance(second.mixer.project, BlockLinear)
    assert isinstance(second.mlp.gate_up.linear, Int8Linear)  # gate and up are of different types
    assert isinstance(second.mlp.down.linear, Int8Linear)  # Q2_K
    automatic: Any = load(path, "auto")
    assert automatic.info.dtype == "int8"  # a small model


def test_layers_run_in_one_call_if_one_of_their_types_has_no_kernel(tmp_path: Path) -> None:
    """Q3_K_M has q and k in Q3_K, and v in Q4_K or Q5_K."""
    path = tmp_path / "m.gguf"
    GgufModel(path, "llama", [Q4_K_M | {"attn_q": "Q3_K", "attn_k": "Q3_K"}, Q4_K_M], head="Q6_K")
    model = load(path, "gguf").model
    assert isinstance(model, FusedDecoder)
    projections: list[Any] = [layer.mixer for layer in model.layers]
    assert [type(each.project) for each in projections] == [Int8Linear, BlockLinear]


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "IQ1_S", "IQ2_XXS", "IQ3_S", "TQ1_0", "NVFP4"])
def test_gguf_types_without_a_kernel_become_int8(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m.gguf"
    GgufModel(path, "llama", [dict.fromkeys(SHAPES, kind)], head="Q6_K")
    loaded: Any = load(path, "gguf")
    assert isinstance(loaded.model.layers[0].mlp.down.linear, Int8Linear)
    for got, wanted in zip(run(loaded, PROMPTS), run(load(path, "fp32"), PROMPTS), strict=True):
        assert float((got - wanted).norm() / wanted.norm()) < 0.1
    weights = GgufWeights(locate(str(path)), {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS})
    info = weights.find("blk.0.ffn_down.weight")
    data = np.frombuffer(path.read_bytes(), np.uint8, info.size, info.offset).reshape(HIDDEN, -1)
    assert torch.equal(weights.read(info), torch.from_numpy(dequantize(data, kind)))


def nvfp4_weights(path: Path, shape: tuple[int, ...], scales: dict[str, list[float]]) -> tuple[GgufWeights, np.ndarray]:
    """Return the tensors of a file with one in NVFP4, and that tensor without its second scale."""
    outputs = int(np.prod(shape[1:]))
    blocks = random_blocks("NVFP4", outputs, shape[0])
    tensors: dict[str, Tensor] = {"blk.0.ffn_down.weight": StoredTensor(shape, 40, blocks.tobytes())}
    for name, numbers in scales.items():
        tensors[name] = StoredTensor((len(numbers),), 0, np.array(numbers, np.float32).tobytes())
    path.write_bytes(gguf(llama(), tensors))
    weights = GgufWeights(locate(str(path)), {"num_attention_heads": 2, "num_key_value_heads": 1})
    return weights, dequantize(blocks, "NVFP4").reshape(tuple(reversed(shape)))


@pytest.mark.parametrize("name", ["blk.0.ffn_down.scale", "blk.0.ffn_down.weight.scale"])
def test_second_scale_of_nvfp4_is_applied(tmp_path: Path, name: str) -> None:
    weights, plain = nvfp4_weights(tmp_path / "m.gguf", (128, 3), {name: [0.25], "blk.0.ffn_down.input_scale": [7.0]})
    read = weights("model.layers.0.mlp.down_proj.weight")
    assert torch.equal(read, torch.from_numpy(plain * np.float32(0.25)))


def test_second_scales_of_nvfp4_experts_are_applied(tmp_path: Path) -> None:
    scales = [0.25, 3.0]
    weights, plain = nvfp4_weights(tmp_path / "m.gguf", (128, 3, 2), {"blk.0.ffn_down.scale": scales})
    expected = torch.from_numpy(plain * np.array(scales, np.float32)[:, None, None])
    info = weights.find("blk.0.ffn_down.weight")
    assert torch.equal(weights.read(info), expected)
    half = info.size // 2
    second = msgspec.structs.replace(info, shape=info.shape[:2], offset=info.offset + half, size=half)
    assert torch.equal(weights.read(second), expected[1])
    wrong, _ = nvfp4_weights(tmp_path / "n.gguf", (128, 3, 2), {"blk.0.ffn_down.scale": [1.0, 2.0, 3.0]})
    with pytest.raises(ModelError, match=r"n\.gguf: blk\.0\.ffn_down\.weight has 3 scales"):
        wrong.read(wrong.find("blk.0.ffn_down.weight"))


def test_type_that_cannot_be_read_is_refused_with_advice(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(llama(), {"output.weight": StoredTensor((256, 1), 15, bytes(292))}))  # Q8_K
    weights = GgufWeights(locate(str(path)), {"num_attention_heads": 2, "num_key_value_heads": 1})
    with pytest.raises(ModelError, match=r"output\.weight is of the type Q8_K, which cannot be read: fetch"):
        weights("lm_head.weight")


def test_tied_embedding_is_held_once(tmp_path: Path) -> None:
    GgufModel(tmp_path / "tied.gguf", "qwen2", [Q4_K_M], head=None)
    tied: Any = load(tmp_path / "tied.gguf", "gguf").model
    assert tied.embedding.weights is tied.head
    GgufModel(tmp_path / "untied.gguf", "qwen2", [Q4_K_M], head="Q6_K")
    untied: Any = load(tmp_path / "untied.gguf", "gguf").model
    assert untied.embedding.weights is not untied.head


@pytest.mark.parametrize("dtype", ["gguf", "int8", "fp32"])
def test_loaded_model_does_not_map_its_file(tmp_path: Path, dtype: str) -> None:
    """Its pages would count as memory of the worker, and truncating the file would end the process."""
    path = tmp_path / "mapped.gguf"
    GgufModel(path, "llama", [Q4_K_M], head="F32")
    loaded = load(path, dtype)
    assert str(path) not in Path("/proc/self/maps").read_text()
    path.write_bytes(b"")
    assert run(loaded, PROMPTS[:1])[0].isfinite().all()


def test_gguf_with_infinite_scale_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    GgufModel(path, "llama", [Q4_K_M], head=None)
    whole = path.read_bytes()
    tensors = read_gguf(path).tensors
    for name, at in (("blk.0.attn_k.weight", 1), ("blk.0.attn_v.weight", 209), ("token_embd.weight", 209)):
        position = tensors[name].offset + at
        path.write_bytes(whole[:position] + b"\x7c" + whole[position + 1 :])
        for dtype in ("gguf", "int8", "fp32"):
            with pytest.raises(ModelError, match=rf"m\.gguf: {name} is corrupt"):
                load(path, dtype)


def test_prefers_gguf_for_large_models_that_are_smaller_than_int8() -> None:
    def prefers(parameters: int, size: int, kernels: str = "avx512") -> bool:
        weights = {"gguf": size, "int8": parameters}
        model = ModelSize(
            name="m",
            architecture="M",
            format="GGUF",
            parameters=parameters,
            native=True,
            weights=weights,
            file_bytes=size,
            max_model_len=16,
        )
        return precision.prefers_gguf(model, kernels)

    large = precision.MIN_GGUF_PARAMETERS
    assert prefers(large, large // 2)
    assert not prefers(large, large // 2, "base")
    assert not prefers(large, large + 1)  # Q8_0 has scales besides its bytes
    assert not prefers(large - 1, large // 2)
