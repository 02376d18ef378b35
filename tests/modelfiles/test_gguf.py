from __future__ import annotations

import contextlib
import os
import random
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, quants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from syringa.engine.loading.weights import GgufWeights
from syringa.errors import ModelError
from syringa.modelfiles import describe, forget_gguf, locate, read_gguf, read_metadata
from syringa.modelfiles.gguf import read_first_metadata
from syringa.modelfiles.gguf_config import config_from_gguf
from syringa.modelfiles.locate import ModelFiles
from syringa.modelfiles.tokenizer import load_tokenizer
from tests.tiers import examples

from .gguf_builder import TENSORS, StoredTensor, gguf, llama, string, write_parts

pytestmark = pytest.mark.filterwarnings("error")
WHOLE = gguf(llama(), TENSORS)


def write(folder: Path, data: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(data)
    return path


def test_read_gguf_returns_metadata_and_tensors(tmp_path: Path) -> None:
    file = read_gguf(write(tmp_path, WHOLE))
    assert file.metadata["llama.block_count"] == 1
    assert file.metadata["tokenizer.ggml.tokens"][4] == "ab"
    assert file.metadata["tokenizer.ggml.token_type"] == [3, 3, 1, 1, 1, 4]
    assert file.metadata["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    tensor = file.tensors["blk.0.attn_q.weight"]
    assert tensor.shape == (8, 8)
    assert tensor.type == "F32"
    assert tensor.offset + tensor.size == len(WHOLE)
    assert file.floats("blk.0.attn_q.weight") == [1.0] * 64


def test_read_gguf_remembers_a_file_until_it_changes(tmp_path: Path) -> None:
    path = write(tmp_path, WHOLE)
    os.utime(path, (time.time() + 3600,) * 2)
    assert read_gguf(path) is not read_gguf(path)  # just written: another write could have the same time
    os.utime(path, (1000, 1000))
    file = read_gguf(path)
    assert read_gguf(path) is file
    os.utime(path, (2000, 2000))
    changed = read_gguf(path)
    assert changed is not file
    forget_gguf()
    assert read_gguf(path) is not changed
    path.unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        read_gguf(path)


def test_read_gguf_of_default_model_is_fast_and_matches_gguf_package() -> None:
    path = locate("default").path
    start = time.process_time()
    file = read_gguf(path)
    assert time.process_time() - start < 1.0
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(file.tensors) == 272
    # As `gguf.GGUFReader` reports them.
    assert (file.tensors["token_embd.weight"].offset, file.tensors["token_embd.weight"].type) == (1785664, "Q8_0")
    assert (file.tensors["blk.0.ffn_gate.weight"].offset, file.tensors["blk.0.ffn_gate.weight"].type) == (
        32421952,
        "Q4_1",
    )


@pytest.mark.parametrize("length", range(0, len(WHOLE), 7))
def test_read_gguf_refuses_truncated_file(tmp_path: Path, length: int) -> None:
    with pytest.raises(ModelError):
        read_gguf(write(tmp_path, WHOLE[:length]))


def test_read_gguf_refuses_truncated_default_model(tmp_path: Path) -> None:
    whole = Path(locate("default").path).read_bytes()[: 4 << 20]
    for length in random.Random(1).sample(range(len(whole)), 25):
        with pytest.raises(ModelError, match="cut off"):
            read_gguf(write(tmp_path, whole[:length] if length >= 4 else b"GGUF"))


@settings(max_examples=examples(400), suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_corrupt_gguf_raises_only_model_error(tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    data = bytearray(WHOLE)
    for position, byte in flips:
        data[position] = byte
    files = ModelFiles("x", str(write(tmp_path, bytes(data))), "gguf")
    began = time.process_time()
    for step in (lambda: read_gguf(files.path), lambda: describe(files), lambda: load_tokenizer(files)):
        with contextlib.suppress(ModelError):
            step()
    assert time.process_time() - began < 20  # CPU time: a corrupt count must not cause a long loop


def test_read_gguf_refuses_huge_counts(tmp_path: Path) -> None:
    for count in (2**31, 2**63, 2**64 - 1):
        for data in (
            b"GGUF" + struct.pack("<IQQ", 3, count, 0),
            b"GGUF" + struct.pack("<IQQ", 3, 0, count),
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IIQ", 9, 8, count),
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IIQ", 9, 5, count),
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, count),
        ):
            with pytest.raises(ModelError, match="cut off"):
                read_gguf(write(tmp_path, data + b"\0" * 64))


def test_read_metadata_names_unsupported_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a GGUF file"):
        read_metadata(write(tmp_path, b"PK\x03\x04 something"))
    with pytest.raises(ModelError, match="not a GGUF file"):
        read_metadata(write(tmp_path, b""))
    with pytest.raises(ModelError, match="big-endian"):
        read_metadata(write(tmp_path, b"GGUF" + struct.pack(">IQQ", 3, 0, 0)))
    with pytest.raises(ModelError, match="version 9"):
        read_metadata(write(tmp_path, b"GGUF" + struct.pack("<IQQ", 9, 0, 0)))
    with pytest.raises(ModelError, match="cannot be read"):
        read_metadata(tmp_path / "missing.gguf")
    with pytest.raises(ModelError, match="keep names"):
        read_metadata(write(tmp_path, gguf({"split.count": 2})))


def test_read_gguf_joins_the_parts_of_a_split_model(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    files = [read_gguf(part) for part in parts]
    assert files[0] == files[1]
    assert files[0].path == str(parts[0])
    assert set(files[0].tensors) == set(TENSORS)
    assert {info.file for info in files[0].tensors.values()} == {str(part) for part in parts}
    assert files[0].metadata["general.architecture"] == "llama"
    assert locate(str(tmp_path)).path == str(parts[0])


def test_split_model_reads_its_weights_from_all_parts(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    config = config_from_gguf(read_gguf(parts[0]))
    weights = GgufWeights(ModelFiles("model", str(parts[0]), "gguf"), config)
    assert all(
        bool((weights(name) == 1).all())
        for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight")
    )


def test_split_model_with_a_missing_or_foreign_part_is_refused(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    content = parts[1].read_bytes()
    parts[1].write_bytes(gguf({"split.no": 1, "split.count": 2}, {"other.weight": (8,), "another.weight": (8,)}))
    with pytest.raises(ModelError, match=r"hold \d+ tensors and not"):
        read_gguf(parts[0])
    parts[1].unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.gguf is missing"):
        read_gguf(parts[0])
    parts[0].with_name("renamed.gguf").write_bytes(content)
    with pytest.raises(ModelError, match="keep names"):
        read_gguf(parts[0].with_name("renamed.gguf"))


def test_config_from_gguf_of_default_model() -> None:
    config = config_from_gguf(read_gguf(locate("default").path))
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected


def config_of(tmp_path: Path, tensors: Mapping[str, tuple[int, ...]] = TENSORS, **changes: Any) -> dict[str, Any]:
    return config_from_gguf(read_gguf(write(tmp_path, gguf(llama(**changes), tensors))))


def test_config_from_gguf_follows_tensors_and_architecture(tmp_path: Path) -> None:
    assert config_of(tmp_path, {**TENSORS, "output.weight": (8, 6)})["tie_word_embeddings"] is False
    assert config_of(tmp_path, {**TENSORS, "blk.0.attn_q.bias": (8,)})["attention_bias"] is True
    assert config_of(tmp_path, general__architecture="qwen2")["attention_bias"] is True
    assert config_of(tmp_path, general__architecture="qwen3")["architectures"] == ["Qwen3ForCausalLM"]
    smollm3 = config_of(tmp_path, general__architecture="smollm3", smollm3__block_count=5)
    assert smollm3["no_rope_layers"] == [1, 1, 1, 0, 1]
    assert config_of(tmp_path, llama__attention__key_length=16, llama__attention__value_length=16)["head_dim"] == 16
    assert config_of(tmp_path, llama__rope__dimension_count=2)["partial_rotary_factor"] == 0.5
    assert config_of(tmp_path, llama__attention__head_count_kv=[1, 1])["num_key_value_heads"] == 1


def test_config_from_gguf_rope_scaling(tmp_path: Path) -> None:
    linear = config_of(tmp_path, llama__rope__scaling__type="linear", llama__rope__scaling__factor=2.0)
    assert linear["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    yarn = config_of(
        tmp_path,
        llama__rope__scaling__type="yarn",
        llama__rope__scaling__factor=4.0,
        llama__rope__scaling__original_context_length=16,
    )
    assert yarn["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    data = gguf(llama(), {**TENSORS, "rope_freqs.weight": (2,)})
    factors = struct.pack("<ff", 1.0, 8.0)
    path = write(tmp_path, data[:-32] + factors + data[-24:])
    assert config_from_gguf(read_gguf(path))["rope_scaling"] == {
        "rope_type": "longrope",
        "original_max_position_embeddings": 64,
        "attention_factor": 1.0,
        "short_factor": [1.0, 8.0],
        "long_factor": [1.0, 8.0],
    }
    assert config_of(tmp_path, {**TENSORS, "rope_freqs.weight": (2,)})["rope_scaling"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "mamba"}, "'mamba' does not run.*llama, mistral, qwen2, qwen3, smollm3"),
        ({"general__architecture": None}, "does not name its architecture"),
        ({"llama__block_count": None}, "llama.block_count is missing"),
        ({"llama__attention__head_count": 0}, "head_count is 0"),
        ({"llama__attention__head_count_kv": [1, 2]}, "head_count_kv is"),
        ({"llama__expert_count": 8}, "llama.expert_used_count is missing"),
        ({"general__architecture": "qwen3", "qwen3__expert_count": 8}, "qwen3 models with experts are not supported"),
        ({"general__architecture": "glm4", "glm4__attention__sliding_window": 8}, "glm4 with a sliding window"),
        ({"llama__rope__scaling__type": "longrope"}, "longrope"),
    ],
)
def test_config_from_gguf_refuses_unsupported_models(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_of(tmp_path, **changes)


def test_first_metadata_are_the_keys_that_are_there_whole() -> None:
    found = [read_first_metadata(WHOLE[:size]) for size in range(len(WHOLE) + 1)]
    sizes = [len(each) for each in found]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) > len(found[-1]) // 2
    assert all(each.items() <= found[-1].items() for each in found)
    assert found[-1]["tokenizer.ggml.tokens"] == llama()["tokenizer.ggml.tokens"]
    assert read_first_metadata(b"PK\x03\x04" + WHOLE) == {}


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (31, "is of the type Q4_0_4_4, which is not supported: fetch the model in another quantization"),
        (41, "is of the type Q1_0, which is not supported: fetch"),
        (99, "is of the unknown type 99: fetch the model in another quantization"),
    ],
)
def test_read_gguf_refuses_types_that_cannot_be_read(tmp_path: Path, number: int, message: str) -> None:
    tensors = {"blk.0.attn_q.weight": StoredTensor((256, 1), number, bytes(144))}
    with pytest.raises(ModelError, match=f"the tensor 'blk.0.attn_q.weight' {message}"):
        read_gguf(write(tmp_path, gguf(llama(), tensors)))


def test_read_gguf_knows_every_type_that_the_gguf_package_dequantizes(tmp_path: Path) -> None:
    for kind, (inputs, size) in GGML_QUANT_SIZES.items():
        try:
            quants.dequantize(np.zeros(size, np.uint8), kind)
        except NotImplementedError:
            continue
        tensors = {"w": StoredTensor((inputs, 1), int(kind), bytes(size))}
        info = read_gguf(write(tmp_path, gguf(llama(), tensors))).tensors["w"]
        assert (info.type, info.size) == (kind.name, size)
