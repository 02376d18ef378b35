"""A tokenizer for llguidance in which no text is ever a special token.

llguidance tokenizes text that a grammar forces as the model's own tokenizer would, and that one reads `<|im_end|>` in a
string as the token, which then does not fit. So special tokens go by names that nobody can write; grammars name them by
id.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

import msgspec

_MARK = re.compile("<.*>", re.DOTALL)


def hide_special(tokenizer_json: str) -> tuple[str, dict[str, int]]:
    """The tokenizer with its special tokens renamed, and their ids by their real names."""
    whole: dict[str, Any] = msgspec.json.decode(tokenizer_json)
    model = whole["model"]
    secret = secrets.token_hex(16)
    ids: dict[str, int] = {}
    names: dict[str, str] = {}
    for added in whole.get("added_tokens") or ():
        # Those that llguidance takes for special, and that no grammar's text may use.
        if added["special"] or _MARK.fullmatch(added["content"]):
            ids[added["content"]] = added["id"]
            names[added["content"]] = added["content"] = f"<{secret}-{added['id']}>"
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): id_ for token, id_ in vocab.items()}
    elif isinstance(vocab, list):  # with scores
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if model.get("merges"):
        model["merges"] = [each for each in model["merges"] if not _leads_to(each, names)]
    return msgspec.json.encode(whole).decode(), ids


def _leads_to(merge: str | list[str], names: dict[str, str]) -> bool:
    """Whether a pair of tokens has to do with a special one."""
    first, _, second = merge.partition(" ") if isinstance(merge, str) else (merge[0], "", merge[1])
    return first + second in names or first in names or second in names
