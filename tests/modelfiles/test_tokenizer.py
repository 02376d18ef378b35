from __future__ import annotations

import itertools
import json
import re
import time
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from syringa.errors import ModelError
from syringa.modelfiles import load_tokenizer, locate
from syringa.modelfiles.locate import ModelFiles
from syringa.modelfiles.tokenizer import tokenizer_from_gguf

from .gguf_builder import llama

DATA = Path(__file__).parents[1] / "data"
SMOLLM2 = json.loads((DATA / "tokenizer_smollm2.json").read_text())
SPM = json.loads((DATA / "tokenizer_spm.json").read_text())
PRE = json.loads((DATA / "tokenizer_pre.json").read_text())
TEXTS: list[str] = SMOLLM2["texts"]


def assert_same(tokenizer: Tokenizer, texts: list[str], ids: list[list[int]], prefix: list[int]) -> None:
    for text, expected in zip(texts, ids, strict=True):
        assert prefix + tokenizer.encode(text).ids == expected, text


@pytest.mark.parametrize("pre", PRE["ids"])
def test_pre_tokenizers_match_llama_cpp(pre: str) -> None:
    tokenizer = tokenizer_from_gguf({**PRE["metadata"], "tokenizer.ggml.pre": pre})
    ids = PRE["ids"][pre]
    if pre in ("gpt-4o", "tekken"):
        # llama.cpp simplifies these two and splits before combining marks; the models' own tokenizers do not.
        kept = [n for n, text in enumerate(TEXTS) if not any(unicodedata.category(c)[0] == "M" for c in text)]
        assert_same(tokenizer, [TEXTS[n] for n in kept], [ids[n] for n in kept], [])
    else:
        assert_same(tokenizer, TEXTS, ids, [])


def test_pre_tokenizer_references_are_distinct() -> None:
    """Otherwise the comparison with llama.cpp would prove nothing."""
    assert len({json.dumps(ids) for ids in PRE["ids"].values()}) == len(PRE["ids"])


def test_default_tokenizer_matches_llama_cpp() -> None:
    start = time.process_time()
    tokenizer = load_tokenizer(locate("default"))
    assert time.process_time() - start < 1.5  # takes 0.1 s on an idle machine
    assert tokenizer.encode("x =   5").ids == [104, 446, 333, 37]
    assert_same(tokenizer, TEXTS, SMOLLM2["ids"], [])
    tokenizer.encode_special_tokens = True
    assert_same(tokenizer, TEXTS, SMOLLM2["plain"], [])


def test_sentencepiece_tokenizer_matches_llama_cpp() -> None:
    tokenizer = tokenizer_from_gguf(SPM["metadata"])
    assert_same(tokenizer, TEXTS, SPM["ids"], [1])
    tokenizer.encode_special_tokens = True
    assert_same(tokenizer, TEXTS, SPM["plain"], [1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer__ggml__pre": "brand-new"}, "'brand-new' is not known"),
        ({"tokenizer__ggml__model": "bert"}, "kind 'bert' is not supported"),
        ({"tokenizer__ggml__tokens": None}, "no usable tokenizer.ggml.tokens"),
        ({"tokenizer__ggml__merges": None}, "no usable tokenizer.ggml.merges"),
        ({"tokenizer__ggml__merges": ["ab"]}, "not a merge"),
        ({"tokenizer__ggml__merges": ["b b"]}, "cannot be built"),
        ({"tokenizer__ggml__token_type": [1]}, "6 tokens have 1 types"),
        ({"tokenizer__ggml__tokens": ["a"] * 6}, "occur twice"),
        ({"tokenizer__ggml__model": "llama"}, "no usable tokenizer.ggml.scores"),
    ],
)
def test_tokenizer_from_gguf_refuses_invalid_metadata(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        tokenizer_from_gguf(llama(**changes))


def sentencepiece_reference(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """Join the pair whose token has the best score, the leftmost of equals, until no pair is a token."""
    ids = {token: id_ for id_, token in enumerate(tokens)}
    symbols = list(text.replace(" ", "▁"))
    while True:
        pairs = [(-scores[ids[a + b]], n) for n, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in ids]
        if not pairs:
            break
        n = min(pairs)[1]
        symbols[n : n + 2] = [symbols[n] + symbols[n + 1]]
    found: list[int] = []
    for symbol in symbols:
        found += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


def test_sentencepiece_tokenizer_of_gemma_matches_definition() -> None:
    """Gemma adds no space in front, and its files have runs of spaces and newlines as user-defined tokens."""
    metadata, known = SPM["metadata"], SPM["metadata"]["tokenizer.ggml.tokens"]
    added = {"<start_of_turn>": 3, "<end_of_turn>": 3, "\n\n": 4, "\n\n\n": 4, "  ": 4, "   ": 4}
    tokens = [*known, *(token for token in added if token not in known)]
    scores = [*metadata["tokenizer.ggml.scores"], *[-1000.0] * (len(tokens) - len(known))]
    types = [*metadata["tokenizer.ggml.token_type"], *[1] * (len(tokens) - len(known))]
    added |= {token: kind for token, kind in zip(tokens, types, strict=True) if kind in (3, 4)}
    gemma = metadata | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [added.get(token, kind) for token, kind in zip(tokens, types, strict=True)],
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = tokenizer_from_gguf(gemma)
    split = re.compile(f"({'|'.join(map(re.escape, sorted(added, key=len, reverse=True)))})")
    turn = "<start_of_turn>user\nWhat is  the   capital?<end_of_turn>\n<start_of_turn>model\n"
    for text in [turn, "a\n\n\n\nb", *TEXTS]:
        expected: list[int] = []
        for part in split.split(text):
            expected += [tokens.index(part)] if part in added else sentencepiece_reference(part, tokens, scores)
        assert tokenizer.encode(text).ids == expected, text
        assert tokenizer.decode(expected, skip_special_tokens=False) == text


def test_user_defined_tokens_are_not_special() -> None:
    tokenizer = tokenizer_from_gguf(llama())
    assert tokenizer.encode("ab<tool>a").ids == [4, 5, 2]
    assert [token.special for _, token in sorted(tokenizer.get_added_tokens_decoder().items())] == [True, True, False]


def test_load_tokenizer_ignores_truncation_and_padding(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(llama())
    tokenizer.enable_truncation(1)
    tokenizer.enable_padding(length=5)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    added = {"0": {"content": "<|endoftext|>"}, "6": {"content": "<extra>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    loaded = load_tokenizer(ModelFiles("m", str(tmp_path), "folder"))
    assert loaded.encode("abab<extra>").ids == [4, 4, 6]


def test_load_tokenizer_refuses_broken_folder(tmp_path: Path) -> None:
    files = ModelFiles("m", str(tmp_path), "folder")
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_tokenizer(files)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        load_tokenizer(files)
