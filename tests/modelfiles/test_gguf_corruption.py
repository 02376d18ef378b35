"""Corrupt GGUF files give one line with the file's name: in the reader, the description and the tokenizer."""

from __future__ import annotations

import random
import resource
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from syringa.errors import ModelError
from syringa.modelfiles import describe, read_gguf
from syringa.modelfiles.locate import ModelFiles
from syringa.modelfiles.tokenizer import load_tokenizer
from tests.tiers import examples

from .gguf_builder import Tensor, gguf, llama, string, value
from .gguf_mutations import Corruption, corrupt_fields, corrupt_randomly, header_fields

pytestmark = pytest.mark.filterwarnings("error")
TENSORS = {"token_embd.weight": (8, 6), "blk.0.attn_q.weight": (8, 8), "rope_freqs.weight": (2,)}
SENTENCEPIECE = {
    "tokenizer__ggml__model": "llama",
    "tokenizer__ggml__pre": None,
    "tokenizer__ggml__merges": None,
    "tokenizer__ggml__tokens": ["<unk>", "</s>", "▁", "a", "▁a", "<0x0A>"],
    "tokenizer__ggml__scores": [0.0, 0.0, -1.0, -2.0, -3.0, 0.0],
    "tokenizer__ggml__token_type": [2, 3, 1, 1, 1, 6],
    "tokenizer__ggml__eos_token_id": 1,
}
FILES = {
    "byte-level": gguf(llama(llama__rope__dimension_count=4, llama__rope__freq_base=10000.0), TENSORS),
    "sentencepiece": gguf(
        llama(
            **SENTENCEPIECE,
            llama__rope__scaling__type="yarn",
            llama__rope__scaling__factor=4.0,
            llama__rope__scaling__original_context_length=16,
        ),
        {"token_embd.weight": (8, 6)},
    ),
}
MAX_LINE = 600


def outcome(path: Path) -> str | None:
    """Return the message with which a model is refused; None if it is not."""
    files = ModelFiles("x", str(path), "gguf")
    try:
        read_gguf(path)
        describe(files)
        tokenizer = load_tokenizer(files)
    except ModelError as error:
        return error.message
    tokenizer.decode(tokenizer.encode("ab a\n").ids)
    return None


def check(path: Path, corruption: Corruption) -> str | None:
    path.write_bytes(corruption.data)
    began = time.process_time()
    message = outcome(path)
    assert time.process_time() - began < 20, corruption.name  # CPU time: a corrupt count must not cause a long loop
    if message is not None:
        assert str(path) in message, corruption.name
        assert "\n" not in message, corruption.name
        assert len(message) < MAX_LINE, corruption.name
    return message


@pytest.fixture
def _little_memory() -> Iterator[None]:
    """Limit what this process may allocate in addition, so that a corrupt length cannot go unnoticed."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (512 << 20), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", FILES)
def test_whole_file_is_accepted(tmp_path: Path, name: str) -> None:
    assert check(tmp_path / "m.gguf", Corruption(name, FILES[name])) is None
    assert len(header_fields(FILES[name])) > 90


@pytest.mark.usefixtures("_little_memory")
@pytest.mark.parametrize("name", FILES)
def test_corrupt_header_field_is_reported_in_one_line(tmp_path: Path, name: str) -> None:
    corruptions = list(corrupt_fields(FILES[name]))
    chosen = random.Random(1).sample(corruptions, min(examples(800), len(corruptions)))
    refused = sum(check(tmp_path / "m.gguf", corruption) is not None for corruption in chosen)
    assert refused > len(chosen) / 2


@pytest.mark.usefixtures("_little_memory")
@pytest.mark.parametrize("name", FILES)
def test_random_corruption_is_reported_in_one_line(tmp_path: Path, name: str) -> None:
    choice = random.Random(2)
    for _ in range(examples(600)):
        check(tmp_path / "m.gguf", corrupt_randomly(FILES[name], choice))


def refusal(tmp_path: Path, tensors: Mapping[str, Tensor] = TENSORS, **changes: Any) -> str:
    message = check(tmp_path / "m.gguf", Corruption("", gguf(llama(**changes), tensors)))
    assert message is not None
    return message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama__context_length": 0}, "llama.context_length is 0"),
        ({"llama__context_length": 2**31}, "llama.context_length is 2147483648"),
        ({"llama__context_length": True}, "llama.context_length is True"),
        ({"llama__embedding_length": 16}, "llama.embedding_length is 16"),
        ({"llama__attention__head_count": 3}, "llama.attention.head_count is 3"),
        ({"llama__attention__head_count_kv": 0}, "llama.attention.head_count_kv is 0"),
        ({"llama__attention__head_count": 4, "llama__attention__head_count_kv": 3}, "head_count_kv is 3"),
        ({"llama__attention__key_length": 0}, "llama.attention.key_length is 0"),
        ({"llama__rope__dimension_count": 0}, "llama.rope.dimension_count is 0"),
        ({"llama__rope__dimension_count": 3}, "llama.rope.dimension_count is 3"),
        ({"llama__rope__dimension_count": 6}, "llama.rope.dimension_count is 6"),
        ({"llama__rope__freq_base": 0.0}, "llama.rope.freq_base is 0.0"),
        ({"llama__rope__freq_base": -1.0}, "llama.rope.freq_base is -1.0"),
        ({"llama__rope__freq_base": float("nan")}, "llama.rope.freq_base is nan"),
        ({"llama__attention__layer_norm_rms_epsilon": float("inf")}, "layer_norm_rms_epsilon is inf"),
        ({"llama__block_count": 0}, "llama.block_count is 0"),
        ({"llama__block_count": 5000}, "llama.block_count is 5000"),
        ({"llama__feed_forward_length": "x" * 1000}, "llama.feed_forward_length is 'xxx"),
        ({"general__alignment": 24}, "the key 'general.alignment' is 24"),
        ({"tokenizer__ggml__eos_token_id": 6}, "tokenizer.ggml.eos_token_id is 6, which is not a token"),
        ({"tokenizer__ggml__tokens": ["a", "b"]}, "token_embd.weight has 6 rows, and tokenizer.ggml.tokens has 2"),
        ({"tokenizer__ggml__tokens": ["a", "b", "c", "d", "e", "x" * 5000]}, "a token has 5000 characters"),
        ({"tokenizer__ggml__token_type": [1]}, "6 tokens have 1 types"),
        ({**SENTENCEPIECE, "tokenizer__ggml__scores": [0.0]}, "6 tokens have 1 scores"),
        ({**SENTENCEPIECE, "tokenizer__ggml__scores": [float("nan")] * 6}, "score is not a finite number"),
    ],
)
def test_impossible_value_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    assert message in refusal(tmp_path, **changes)


def test_more_layers_than_block_count_are_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, {**TENSORS, "blk.1.attn_q.weight": (8, 8)})
    assert "has tensors of 2 layers, and llama.block_count is 1" in message


def test_rope_factors_of_a_wrong_count_are_refused(tmp_path: Path) -> None:
    assert "rope_freqs.weight is not 2 factors" in refusal(tmp_path, {**TENSORS, "rope_freqs.weight": (3,)})


def test_token_that_a_model_does_not_have_is_accepted(tmp_path: Path) -> None:
    data = gguf(llama(tokenizer__ggml__bos_token_id=2**32 - 1), TENSORS)
    assert check(tmp_path / "m.gguf", Corruption("", data)) is None


def test_duplicate_keys_and_tensors_are_refused(tmp_path: Path) -> None:
    whole = gguf(llama(), TENSORS)
    pair = string("general.architecture") + value("llama")
    doubled = whole.replace(pair, pair + pair)
    count = len(llama())
    doubled = doubled[:16] + (count + 1).to_bytes(8, "little") + doubled[24:]
    message = check(tmp_path / "m.gguf", Corruption("", doubled))
    assert message is not None
    assert "the key 'general.architecture' occurs twice" in message
    renamed = gguf(llama(), {"token_embd.weight": (8, 6), "token_embd.weighs": (8, 6)})
    message = check(tmp_path / "m.gguf", Corruption("", renamed.replace(b"weighs", b"weight")))
    assert message is not None
    assert "the tensor 'token_embd.weight' occurs twice" in message


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    whole = FILES["byte-level"]
    field = next(field for field in header_fields(whole) if field.name == "offset of blk.0.attn_q.weight")
    data = whole[: field.offset] + bytes(8) + whole[field.offset + 8 :]
    message = check(tmp_path / "m.gguf", Corruption("", data))
    assert message is not None
    assert "the tensor 'blk.0.attn_q.weight' begins at byte 0 of the data and not at 192" in message


def test_length_within_a_large_file_is_not_allocated(tmp_path: Path) -> None:
    """A sparse file of 1 TiB, in which every length fits."""
    path = tmp_path / "m.gguf"
    for count in (2**30, 2**37):
        head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k")
        path.write_bytes(head + struct.pack("<IIQ", 9, 5, count))
        with path.open("r+b") as file:
            file.truncate(2**40)
        message = outcome(path)
        assert message is not None
        assert "the key 'k' ends beyond the 64 MiB of the largest header" in message
