"""A tokenizer for llguidance in which no text is tokenized as a special token.

llguidance tokenizes the text that a grammar forces like the model's tokenizer. That would read `<|im_end|>` in a string
as the special token, which the grammar does not allow. So special tokens get random names here, and grammars refer to
them by id.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

import msgspec
from llguidance import LLTokenizer

_ANGLE_BRACKETS = re.compile("<.*>", re.DOTALL)


def build_grammar_tokenizer(
    tokenizer_json: str, vocab_size: int | None, eos_tokens: list[int]
) -> tuple[LLTokenizer, dict[str, int]]:
    """Return llguidance's tokenizer, and the ids of the special tokens by their real names.

    `vocab_size` is the number of tokens that masks cover; None: that of the tokenizer.
    """
    renamed, special_ids = rename_special_tokens(tokenizer_json)
    return LLTokenizer(renamed, n_vocab=vocab_size, eos_token=eos_tokens), special_ids


def rename_special_tokens(tokenizer_json: str) -> tuple[str, dict[str, int]]:
    """Return the tokenizer with random names for its special tokens, and their ids by their real names."""
    whole: dict[str, Any] = msgspec.json.decode(tokenizer_json)
    model = whole["model"]
    prefix = secrets.token_hex(16)
    ids: dict[str, int] = {}
    names: dict[str, str] = {}
    for added in whole.get("added_tokens") or ():
        # These are special to llguidance.
        if added["special"] or _ANGLE_BRACKETS.fullmatch(added["content"]):
            ids[added["content"]] = added["id"]
            names[added["content"]] = added["content"] = f"<{prefix}-{added['id']}>"
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): id_ for token, id_ in vocab.items()}
    elif isinstance(vocab, list):  # with scores
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if model.get("merges"):
        model["merges"] = [merge for merge in model["merges"] if not _involves(merge, names)]
    return msgspec.json.encode(whole).decode(), ids


def _involves(merge: str | list[str], names: dict[str, str]) -> bool:
    """Return whether a merge has a special token as input or output."""
    first, _, second = merge.partition(" ") if isinstance(merge, str) else (merge[0], "", merge[1])
    return first + second in names or first in names or second in names
