"""A small embedding model and a cross-encoder for tests of the API, with a token per letter."""

from __future__ import annotations

import json
import string
import struct
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from syringa.api.models.served_model import Encoder, ServedModel
from syringa.modelfiles import EmbeddingSpec, ModelDescription
from syringa.prompt.tokens.encoder_tokenizer import EncoderTokenizer
from syringa.types import EmbeddingRequest, EmbeddingResult
from tests.fake_engine import FakeEngine

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CHARACTERS = string.ascii_lowercase + string.digits + string.punctuation
VOCAB = {token: id_ for id_, token in enumerate([*SPECIAL, *CHARACTERS, *(f"##{each}" for each in CHARACTERS)])}
UNKNOWN, CLS, SEP = VOCAB["[UNK]"], VOCAB["[CLS]"], VOCAB["[SEP]"]
MAX_LENGTH = 16


def bert_tokenizer() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(VOCAB, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def encoder_tokenizer(*, lower_case: bool = False) -> EncoderTokenizer:
    description = ModelDescription(
        name="tiny", architecture="BertModel", config={}, max_model_len=MAX_LENGTH, end_tokens=frozenset()
    )
    return EncoderTokenizer(bert_tokenizer(), description, lower_case=lower_case)


def tokens_of(text: str) -> list[int]:
    """Return the tokens of a word without special tokens: one for each letter."""
    return [VOCAB[text[0]], *(VOCAB[f"##{each}"] for each in text[1:])]


def embedding_model(id: str = "tiny", max_request_tokens: int = 1000, **spec: Any) -> ServedModel:
    """Return a model with vectors of 4 values, as the fake engine makes them."""
    given: dict[str, Any] = {"kind": "embed", "architecture": "BertModel", "max_length": MAX_LENGTH, "dimensions": 4}
    tokenizer = encoder_tokenizer()
    return ServedModel(
        id=id,
        tokenizer=tokenizer,
        max_model_len=MAX_LENGTH,
        end_tokens=frozenset(),
        encoder=Encoder(
            spec=EmbeddingSpec(**(given | {"normalize": True} | spec)),
            tokenizer=tokenizer,
            max_request_tokens=max_request_tokens,
        ),
    )


def scoring_model(id: str = "ranker", **spec: Any) -> ServedModel:
    known: dict[str, Any] = {"kind": "score", "dimensions": 1, "normalize": False, "activation": "sigmoid"}
    return embedding_model(id, **(known | spec))


class ScoringEngine(FakeEngine):
    """Scores pairs by the number of tokens of the second text."""

    async def embed(self, request: EmbeddingRequest) -> EmbeddingResult:
        await super().embed(request)
        scores = [len(tokens) - second for tokens, second in zip(request.inputs, request.second, strict=True)]
        return EmbeddingResult(request.id, 1, struct.pack(f"<{len(scores)}f", *scores))


def write_embedding_folder(path: Path, **config: Any) -> str:
    """Write a folder of sentence-transformers without weights, and return its path."""
    known = {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 4, "max_position_embeddings": 64}
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(known | config))
    (path / "tokenizer.json").write_text(bert_tokenizer().to_str())
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": MAX_LENGTH}))
    (path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return str(path)
