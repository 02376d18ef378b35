from __future__ import annotations

import pytest
from tokenizers import processors

from syringa.errors import ModelError
from syringa.modelfiles import ModelDescription
from syringa.prompt.tokens.encoder_tokenizer import EncoderTokenizer
from tests.embedding_models import CLS, SEP, VOCAB, bert_tokenizer, encoder_tokenizer, tokens_of


def test_encoder_tokenizer_wraps_texts_and_pairs_as_the_post_processor_does() -> None:
    tokenizer, reference = encoder_tokenizer(), bert_tokenizer()
    first, second = tokenizer.encode_texts(["some text", "more"])
    assert tokenizer.wrap(first) == reference.encode("some text").ids
    pair = reference.encode("some text", "more")
    assert tokenizer.wrap_pair(first, second) == (pair.ids, pair.type_ids.index(1))
    assert (tokenizer.special_tokens_single, tokenizer.special_tokens_pair) == (2, 3)


def test_encoder_tokenizer_encode_adds_special_tokens_on_both_sides() -> None:
    tokenizer = encoder_tokenizer()
    assert tokenizer.encode("ab") == [CLS, *tokens_of("ab"), SEP]
    assert tokenizer.encode("ab", add_special=False) == tokens_of("ab")
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"


def test_encoder_tokenizer_reads_special_tokens_of_clients_as_characters() -> None:
    (tokens,) = encoder_tokenizer().encode_texts(["a [SEP] b"])
    assert SEP not in tokens
    assert tokens == [VOCAB["a"], VOCAB["["], *tokens_of("sep"), VOCAB["]"], VOCAB["b"]]


def test_encoder_tokenizer_strips_and_lowercases_texts() -> None:
    tokenizer = encoder_tokenizer(lower_case=True)
    assert tokenizer.encode_texts(["  AB\n", "ab", "\ud800 "]) == [tokens_of("ab"), tokens_of("ab"), []]


def test_encoder_tokenizer_without_post_processor_adds_nothing() -> None:
    tokenizer = bert_tokenizer()
    tokenizer.post_processor = processors.Sequence([])
    encoder = EncoderTokenizer(tokenizer, _description(), lower_case=False)
    assert encoder.wrap_pair([7], [8]) == ([7, 8], 1)


def test_encoder_tokenizer_refuses_post_processor_that_swaps_texts() -> None:
    tokenizer = bert_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A", pair="[CLS] $B [SEP] $A", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    with pytest.raises(ModelError, match="post-processor"):
        EncoderTokenizer(tokenizer, _description(), lower_case=False)


def _description() -> ModelDescription:
    return ModelDescription(name="m", architecture="x", config={}, max_model_len=8, end_tokens=frozenset())
