"""Write a GGUF file with the shapes of Qwen3-30B-A3B, some of its layers and random weights: to compare speeds only.

    python -m bench.random_sparse_model FILE.gguf [--layers 8]
    python -m bench.larger_model --model FILE.gguf

Matrices have the types of a Q4_K_M file. The tokenizer is that of qwen2.5-coder-1.5b, which `syringa pull` fetches.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from syringa.modelfiles import locate

HIDDEN, EXPERTS, USED, INTERMEDIATE = 2048, 128, 8, 768
HEADS, KV_HEADS, HEAD_SIZE = 32, 4, 128
BLOCK_BYTES = {"Q4_K": 144, "Q6_K": 210}  # of 256 weights
HALF_SCALES = {"Q4_K": (0, 2), "Q6_K": (208,)}  # where a block has its numbers in fp16
SCALE = np.float16(2e-4)


def random_blocks(kind: str, shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Return random weights of a matrix, or of one for each expert, as they are stored."""
    *outer, inputs = shape
    blocks = generator.integers(0, 256, (int(np.prod(outer)), inputs // 256, BLOCK_BYTES[kind]), dtype=np.uint8)
    for at in HALF_SCALES[kind]:
        blocks[..., at : at + 2] = np.frombuffer(SCALE.tobytes(), np.uint8)
    return blocks.reshape(*outer, -1)


def write(path: Path, layers: int) -> None:
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_name(f"random Qwen3-30B-A3B, {layers} of 48 layers")
    writer.add_block_count(layers)
    writer.add_context_length(40960)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(6144)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_SIZE)
    writer.add_value_length(HEAD_SIZE)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(USED)
    writer.add_expert_feed_forward_length(INTERMEDIATE)
    reader = gguf.GGUFReader(locate("qwen2.5-coder-1.5b").path)
    for key, field in reader.fields.items():
        if key.startswith("tokenizer."):
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=sub_type)
    vocabulary = len(reader.fields["tokenizer.ggml.tokens"].contents())

    def add_blocks(name: str, kind: str, *shape: int) -> None:
        blocks = random_blocks(kind, shape, generator)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=GGMLQuantizationType[kind])

    def add_floats(name: str, *shape: int) -> None:
        values = generator.standard_normal(shape) * 0.02 + (len(shape) == 1)
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    add_blocks("token_embd", "Q4_K", vocabulary, HIDDEN)
    add_blocks("output", "Q6_K", vocabulary, HIDDEN)
    add_floats("output_norm", HIDDEN)
    for i in range(layers):
        layer, better = f"blk.{i}", "Q6_K" if i % 2 else "Q4_K"  # Q4_K_M has half of these in Q6_K
        for name, size in (("attn_norm", HIDDEN), ("ffn_norm", HIDDEN), ("attn_q_norm", HEAD_SIZE)):
            add_floats(f"{layer}.{name}", size)
        add_floats(f"{layer}.attn_k_norm", HEAD_SIZE)
        add_blocks(f"{layer}.attn_q", "Q4_K", HEADS * HEAD_SIZE, HIDDEN)
        add_blocks(f"{layer}.attn_k", "Q4_K", KV_HEADS * HEAD_SIZE, HIDDEN)
        add_blocks(f"{layer}.attn_v", better, KV_HEADS * HEAD_SIZE, HIDDEN)
        add_blocks(f"{layer}.attn_output", "Q4_K", HIDDEN, HEADS * HEAD_SIZE)
        add_floats(f"{layer}.ffn_gate_inp", EXPERTS, HIDDEN)
        for name in ("gate", "up"):
            add_blocks(f"{layer}.ffn_{name}_exps", "Q4_K", EXPERTS, INTERMEDIATE, HIDDEN)
        add_blocks(f"{layer}.ffn_down_exps", better, EXPERTS, HIDDEN, INTERMEDIATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, default=8, metavar="N", help="of 48 (default: 8, a file of 3 GB)")
    options = parser.parse_args()
    write(options.file, options.layers)


if __name__ == "__main__":
    main()
