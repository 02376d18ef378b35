from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from syringa.modelfiles import ModelDescription, ModelFiles, locate
from syringa.modelfiles.tokenizer import tokenizer_from_gguf
from syringa.prompt.tokens.tokenizer import Tokenizer
from tests.tiers import examples

DATA = Path(__file__).parents[2] / "data"
TEXTS: list[str] = json.loads((DATA / "tokenizer_smollm2.json").read_text())["texts"]
SPM_METADATA = json.loads((DATA / "tokenizer_spm.json").read_text())["metadata"]


def description(**changes: Any) -> ModelDescription:
    fields = {"name": "m", "architecture": "X", "config": {}, "max_model_len": 8, "end_tokens": frozenset(), **changes}
    return ModelDescription(**fields)


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.load(locate("default"))


@pytest.fixture(scope="module")
def library(smollm2: Tokenizer) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(smollm2.to_json())


@pytest.fixture(scope="module")
def spm() -> Tokenizer:
    return Tokenizer(tokenizer_from_gguf(SPM_METADATA), description(bos_token=1, add_bos=True))


@given(st.text(st.characters(codec="utf-8", exclude_characters="▁")))  # SentencePiece's space
@settings(deadline=None, max_examples=examples(200))
def test_decode_inverts_encode(smollm2: Tokenizer, spm: Tokenizer, text: str) -> None:
    for tokenizer in (smollm2, spm):
        if all(bytes([byte]) in tokenizer.bytes_table for byte in text.encode()):  # SmolLM2 lacks some rare bytes
            assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


@given(st.lists(st.integers(0, 49151), max_size=12))
@settings(deadline=None)
def test_decode_matches_the_tokenizers_library(
    smollm2: Tokenizer, library: tokenizers.Tokenizer, ids: list[int]
) -> None:
    ordinary = [id_ for id_ in ids if id_ not in smollm2.special_ids]
    assert smollm2.decode(ordinary) == library.decode(ordinary)


def test_token_bytes_join_to_the_text(smollm2: Tokenizer, spm: Tokenizer) -> None:
    for text in TEXTS:
        for tokenizer in (smollm2, spm):
            ids = tokenizer.encode(text, add_special=False)
            space = (
                b" " if tokenizer.strips_leading_space and not text.startswith(("<s>", "<think>", "[INST]")) else b""
            )
            if "</s>" in text or "<think>" in text or "[INST]" in text:
                continue  # a space follows each marker of a SentencePiece vocabulary
            assert b"".join(map(tokenizer.token_bytes, ids)) == (space if text else b"") + text.encode()
    assert smollm2.token_bytes(2) == b"<|im_end|>"
    assert spm.token_bytes(3 + 0xE4) == b"\xe4"
    assert smollm2.token_bytes(-1) == smollm2.token_bytes(10**6) == b""


def test_special_tokens_are_parsed_and_skipped(smollm2: Tokenizer, spm: Tokenizer) -> None:
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.vocab_size == 49152
    assert smollm2.encode("a<|im_end|>") == [81, 2]
    assert 2 not in smollm2.encode("a<|im_end|>", parse_special=False)
    assert smollm2.decode([81, 2, 82]) == "ab"
    assert smollm2.decode([81, 2, 82], skip_special=False) == "a<|im_end|>b"
    assert spm.encode("")[0] == 1
    assert spm.encode("", add_special=False) == []


def test_leading_space_of_sentencepiece_is_removed(spm: Tokenizer) -> None:
    ids = spm.encode("Hello the world")
    assert spm.decode(ids) == "Hello the world"
    assert spm.decode(ids, skip_special=False) == "<s> Hello the world"


def test_tokens_containing_finds_tokens_by_text(smollm2: Tokenizer) -> None:
    for text in ("\n", " ", "é", "the", "ee", "<|im_end|>"):
        table, special = smollm2.bytes_table, smollm2.special_ids
        naive = {id_ for id_, value in enumerate(table) if text.encode() in value and id_ not in special}
        assert smollm2.tokens_containing(text) == (naive or {smollm2.encode(text, parse_special=False)[-1]})
    assert smollm2.encode("\n")[0] in smollm2.tokens_containing("\n")
    rare = '\n:"*#@!'
    assert smollm2.tokens_containing(rare) == {smollm2.encode(rare)[-1]}


def test_lone_surrogates_are_replaced(smollm2: Tokenizer) -> None:
    assert smollm2.decode(smollm2.encode("a\ud83d b")) == "a\ufffd b"
    assert smollm2.decode(smollm2.encode("\ud83d\ude42")) == "🙂"
    assert smollm2.tokens_containing("\ud83d")


def test_tokenizer_is_thread_safe(smollm2: Tokenizer) -> None:
    def both(n: int) -> bool:
        special = n % 2 == 0
        return (2 in smollm2.encode("<|im_end|>", parse_special=special)) is special

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(both, range(400)))


def byte_level_folder(folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    save(folder, tokenizer)


def sentencepiece_folder(folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<s>", "</s>", "<unk>", *bytes_], show_progress=False, max_token_length=8
    )
    tokenizer.train_from_iterator(["Hello the world and all the words"] * 5, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][:3]  # byte tokens are ordinary tokens
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    save(folder, tokenizer)


def save(folder: Path, tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"architectures": ["X"], "model_type": "llama"}))


@pytest.mark.parametrize("make", [byte_level_folder, sentencepiece_folder])
def test_tokenizer_of_a_folder_matches_transformers(tmp_path: Path, make: Any) -> None:
    transformers = pytest.importorskip("transformers")
    make(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    ours = Tokenizer.load(ModelFiles("m", str(tmp_path), "folder"))
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.encode(text, add_special=False) == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids, clean_up_tokenization_spaces=False)
