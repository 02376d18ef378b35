"""The tokenizer for llguidance, whose special tokens no text can spell."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from llguidance import LLTokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from syringa.engine.structured_output.grammar_tokenizer import rename_special_tokens


def build_tokenizer(model: Any) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("[END]", special=True)])
    tokenizer.add_tokens([AddedToken("<call>", special=False), AddedToken("plain", special=False)])
    return tokenizer


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = {character: id_ for id_, character in enumerate(ALPHABET)}
MODELS = {
    "special tokens apart": lambda: models.BPE(BYTES, []),
    "in the vocabulary, one by merging": lambda: models.BPE(
        {**BYTES, "<s>": 256, "s>": 257, "<unk>": 258}, [("s", ">"), ("<", "s>")], unk_token="<s>"
    ),
    "with scores": lambda: models.Unigram([("<s>", 0.0), *((each, -5.0) for each in ALPHABET)], 0),
}


@pytest.mark.parametrize("name", MODELS)
def test_rename_special_tokens_keeps_ids_and_text(name: str) -> None:
    tokenizer = build_tokenizer(MODELS[name]())
    renamed, ids = rename_special_tokens(tokenizer.to_str())
    assert ids == {each: tokenizer.token_to_id(each) for each in ("<s>", "[END]", "<call>")}
    other = LLTokenizer(renamed, eos_token=ids["<s>"])
    text = "a<s>b[END]c<call>d"
    tokens = other.tokenize_str(text)
    assert not set(tokens) & set(ids.values())
    assert other.decode_str(tokens) == text
    assert all(other.is_special_token(id_) for id_ in ids.values())
    assert other.tokenize_str("x plain") == tokenizer.encode("x plain").ids
    vocabulary = tokenizers.Tokenizer.from_str(renamed).get_vocab()
    assert {
        token: id_ for token, id_ in tokenizer.get_vocab().items() if token not in ids
    }.items() <= vocabulary.items()
    assert json.loads(tokenizer.to_str())["model"]["type"] == json.loads(renamed)["model"]["type"]
