"""Small tokenizers with the token names of each family."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from syringa.modelfiles import ModelDescription
from syringa.prompt.tokens.fim import find_fim_format
from syringa.prompt.tokens.tokenizer import Tokenizer
from tests.prompt.chat.test_tools import byte_tokenizer

STARCODER = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<|endoftext|>", "<file_sep>")
QWEN = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|endoftext|>", "<|file_sep|>")
CODELLAMA = ("▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>", "<s>", "</s>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
CODESTRAL = ("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "<s>", "</s>")


def wrap(tokenizer: tokenizers.Tokenizer, bos: str | None = None) -> Tokenizer:
    fields: dict[str, Any] = {"name": "m", "architecture": "X", "config": {}, "max_model_len": 8}
    first = tokenizer.token_to_id(bos) if bos else None
    return Tokenizer(
        tokenizer, ModelDescription(**fields, end_tokens=frozenset(), bos_token=first, add_bos=bos is not None)
    )


def byte_level(names: tuple[str, ...], *, special: bool, bos: str | None = None) -> Tokenizer:
    return wrap(byte_tokenizer(*names) if special else byte_tokenizer(plain=names), bos)


def sentencepiece(names: tuple[str, ...]) -> Tokenizer:
    """Return a tokenizer like Llama's, with a space before each text and byte fallback."""
    pieces = ["<unk>", *names, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgh"]
    model = models.BPE({piece: id_ for id_, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return wrap(tokenizer, "<s>")


@pytest.mark.parametrize(
    ("tokenizer", "spelled", "ends"),
    [
        (byte_level(STARCODER, special=True), "<fim_prefix>ab<fim_suffix>cd<fim_middle>", STARCODER),
        (byte_level(QWEN, special=False), "<|fim_prefix|>ab<|fim_suffix|>cd<|fim_middle|>", QWEN),
        (
            byte_level(DEEPSEEK, special=False, bos=DEEPSEEK[3]),
            "<｜begin▁of▁sentence｜><｜fim▁begin｜>ab<｜fim▁hole｜>cd<｜fim▁end｜>",
            (*DEEPSEEK[:3], DEEPSEEK[4]),
        ),
        (sentencepiece(CODELLAMA), "<s>▁<PRE> ab▁<SUF>cd▁<MID>", CODELLAMA[:4]),
        (sentencepiece(CODESTRAL), "<s>[SUFFIX]cd[PREFIX] ab", CODESTRAL[:3]),
    ],
    ids=["starcoder", "qwen", "deepseek", "codellama", "codestral"],
)
def test_fim_prompt_of_model_families(tokenizer: Tokenizer, spelled: str, ends: tuple[str, ...]) -> None:
    fim = find_fim_format(tokenizer)
    assert fim is not None
    built = fim.build(tokenizer.encode("ab"), fim.encode_suffix("cd"))
    assert b"".join(map(tokenizer.token_bytes, built.tokens)).decode() == spelled
    own = built.tokens[built.before : len(built.tokens) - built.after]
    assert own == tokenizer.encode("ab", add_special=False)
    assert fim.end_tokens == {tokenizer.token_id(name) for name in ends}
    for marker in (built.tokens[built.before - 1], built.tokens[-1]):
        assert marker in fim.end_tokens or not built.after


@pytest.mark.parametrize("tokenizer", [byte_level(STARCODER, special=True), sentencepiece(CODELLAMA)])
@pytest.mark.parametrize("suffix", ["", " c", "c", "\n  d", "é"])
def test_encode_suffix_preserves_bytes(tokenizer: Tokenizer, suffix: str) -> None:
    fim = find_fim_format(tokenizer)
    assert fim is not None
    built = fim.build([], fim.encode_suffix(suffix))
    tokens = built.tokens[len(built.tokens) - built.after + 1 : -1]
    assert b"".join(map(tokenizer.token_bytes, tokens)).decode() == suffix


def test_build_adds_a_missing_bos_token() -> None:
    tokenizer = sentencepiece(CODESTRAL)
    fim = find_fim_format(tokenizer)
    assert fim is not None
    with_start, bare = tokenizer.encode("ab"), tokenizer.encode("ab", add_special=False)
    assert fim.build(with_start, [7]) == fim.build(bare, [7])


@pytest.mark.parametrize("names", [(), STARCODER[:2], QWEN[1:], CODELLAMA[1:], ("[SUFFIX]",)])
def test_find_fim_format_returns_none_without_markers(names: tuple[str, ...]) -> None:
    assert find_fim_format(byte_level(names, special=True)) is None
