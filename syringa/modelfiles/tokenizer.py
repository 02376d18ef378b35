"""Build a model's tokenizer from tokenizer.json or from GGUF metadata."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from syringa.errors import ModelError
from syringa.modelfiles.gguf import quoted, read_metadata
from syringa.modelfiles.locate import ModelFiles, read_json
from syringa.modelfiles.pretokenizers import PRETOKENIZERS

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6

_SPACE = "▁"  # a space in SentencePiece
_MAX_TOKEN = 4096  # characters; the time for `_merges_by_score` grows with their square


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Return the tokenizer of a model. Raise `ModelError` if it cannot be built."""
    if files.kind == "folder":
        return _from_folder(Path(files.path))
    return tokenizer_from_gguf(read_metadata(files.path), files.path)


def tokenizer_from_gguf(metadata: dict[str, Any], path: str = "the GGUF file") -> Tokenizer:
    """Return a tokenizer with the same token ids as llama.cpp."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _list(metadata, "tokenizer.ggml.tokens", str, path)
    types = metadata.get("tokenizer.ggml.token_type")
    types = [_NORMAL] * len(tokens) if types is None else _list(metadata, "tokenizer.ggml.token_type", int, path)
    if len(types) != len(tokens):
        raise ModelError(f"{path}: {len(tokens)} tokens have {len(types)} types; convert the model again")
    if max(map(len, tokens)) > _MAX_TOKEN:
        raise ModelError(f"{path}: a token has {max(map(len, tokens))} characters; fetch the file again")
    vocab = {token: id_ for id_, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelError(f"{path}: tokens occur twice in the vocabulary; convert the model again")
    try:
        if kind == "gpt2":
            tokenizer = _byte_level(metadata, vocab, path)
        elif kind == "llama":
            tokenizer = _sentencepiece(metadata, tokens, types, vocab, path)
        else:
            raise ModelError(f"{path}: a tokenizer of the kind {quoted(kind)} is not supported; gpt2 and llama are")
        tokenizer.add_special_tokens(
            [_added(token) for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL]
        )
        user = [_added(token, False) for token, type_ in zip(tokens, types, strict=True) if type_ == _USER_DEFINED]
        tokenizer.add_tokens(user)
    except ModelError:
        raise
    except Exception as error:
        # tokenizers raises plain `Exception` for inconsistent vocabularies.
        raise ModelError(f"{path}: its tokenizer cannot be built: {quoted(str(error))}") from error
    return tokenizer


def _added(token: str, special: bool = True) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)


def _byte_level(metadata: dict[str, Any], vocab: dict[str, int], path: str) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    pre = PRETOKENIZERS.get(name)
    if pre is None:
        raise ModelError(
            f"{path}: the pre-tokenizer {quoted(name)} is not known, and another would give wrong tokens; "
            "use the model's Hugging Face folder"
        )
    merges = []
    for merge in _list(metadata, "tokenizer.ggml.merges", str, path):
        left, space, right = merge.partition(" ")
        if not space:
            raise ModelError(f"{path}: {quoted(merge)} is not a merge of two tokens; convert the model again")
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre.ignore_merges))
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in pre.splits]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    metadata: dict[str, Any], tokens: list[str], types: list[int], vocab: dict[str, int], path: str
) -> Tokenizer:
    scores = _list(metadata, "tokenizer.ggml.scores", (int, float), path)
    if len(scores) != len(tokens):
        raise ModelError(f"{path}: {len(tokens)} tokens have {len(scores)} scores; convert the model again")
    if not all(map(math.isfinite, scores)):
        raise ModelError(f"{path}: a token's score is not a finite number; fetch the file again")
    unknown = next((token for token, type_ in zip(tokens, types, strict=True) if type_ == _UNKNOWN), None)
    byte_fallback = _BYTE in types
    merges = _merges_by_score(tokens, types, scores, vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    escape = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), escape]) if prefix else escape
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(
    tokens: list[str], types: list[int], scores: list[float], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """Return byte-pair merges equivalent to SentencePiece scores: every split of every token, best score first."""
    order = sorted(range(len(tokens)), key=lambda id_: -scores[id_])
    mergeable = {tokens[id_] for id_ in order if types[id_] in (_NORMAL, _USER_DEFINED)}
    merges = []
    for id_ in order:
        token = tokens[id_]
        if token in mergeable:
            for split in range(1, len(token)):
                left = token[:split]
                if left in mergeable and (right := token[split:]) in mergeable:
                    merges.append((left, right))
    return merges


def _list(metadata: dict[str, Any], key: str, kind: type | tuple[type, ...], path: str) -> list[Any]:
    values = metadata.get(key)
    if not isinstance(values, list) or not values or not isinstance(values[0], kind):
        raise ModelError(f"{path} has no usable {key}; convert the model again")
    return values


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    # The file may contain truncation and padding settings of the training run.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _add_missing(tokenizer, read_json(folder / "tokenizer_config.json").get("added_tokens_decoder"))
    return tokenizer


def _add_missing(tokenizer: Tokenizer, stated: Any) -> None:
    """Add tokens that only tokenizer_config.json lists, to the end of the vocabulary as transformers does."""
    if not isinstance(stated, dict):
        return
    present = tokenizer.get_added_tokens_decoder()
    for id_, token in sorted(((int(key), value) for key, value in stated.items() if key.isdigit())):
        if id_ in present or not isinstance(token, dict) or "content" not in token:
            continue
        flags = {
            name: bool(token.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
        }
        tokenizer.add_tokens([AddedToken(token["content"], **flags)])
