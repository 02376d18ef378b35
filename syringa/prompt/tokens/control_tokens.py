"""Control tokens of a vocabulary, and prompts in which only the chat template may write them.

A chat template and the text of a client are rendered into one string, in which `<|im_end|>` of a message looks like
that of the template. Where client text could become a control token, it is escaped before rendering: the first and the
last character of every control token are replaced by private-use characters, one for one, so that templates still
trim, split and measure the text. In the rendered prompt, control tokens that are written out are the template's. They
are replaced by placeholders, the escaped characters are restored, and the text is encoded by a tokenizer that knows
the placeholders in place of the control tokens.
"""

from __future__ import annotations

import re
import secrets
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from syringa.errors import InvalidRequest

# Added tokens that stand for ordinary text: some vocabularies contain HTML tags.
_HTML_TAG = re.compile(r"</?(?:h[1-6]|table|caption|thead|tbody|tfoot|t[rhd]|blockquote|strong|em|[biu]|su[bp]|code)>")
_PRINTED = re.compile(r"\\u([0-9a-f]{4})")
_PRIVATE_USE = (0xE000, 0xF8FF), (0xF0000, 0xFFFFD), (0x100000, 0x10FFFD)


class ControlTokens:
    """The control tokens of a vocabulary: the added tokens that are not ordinary text. Thread-safe."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocab_size: int) -> None:
        """`vocab_size` is one more than the highest id."""
        added = tokenizer.get_added_tokens_decoder()
        control = {id_: token for id_, token in added.items() if _is_control(token)}
        self.texts = frozenset(token.content for token in control.values())
        self._edges = sorted({edge for text in map(_trim, self.texts) for edge in (text[0], text[-1])})
        self._longest = max(map(len, self.texts), default=0)
        self._prefixes = frozenset(text[:end] for text in self.texts for end in range(1, len(text)))
        self._suffixes = frozenset(text[begin:] for text in self.texts for begin in range(1, len(text)))
        self._normalizer = tokenizer.normalizer
        # A model without vocabulary: only added tokens are found, all at once.
        self._finder = tokenizers.Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        self._finder.add_tokens([AddedToken(text, normalized=False) for text in sorted(self.texts)])

        # Clients cannot guess the placeholders. The model is shared with `tokenizer`, not copied.
        secret = secrets.token_hex(8)
        self._placeholders = {token.content: f"\ue000{secret}{id_}\ue001" for id_, token in control.items()}
        self._tokenizer = tokenizers.Tokenizer(tokenizer.model)
        if tokenizer.normalizer is not None:
            self._tokenizer.normalizer = tokenizer.normalizer
        if tokenizer.pre_tokenizer is not None:
            self._tokenizer.pre_tokenizer = tokenizer.pre_tokenizer
        # New tokens are numbered from the size of the model's vocabulary: unused ones keep them above all existing ids.
        unused = vocab_size - self._tokenizer.get_vocab_size()
        self._tokenizer.add_tokens([AddedToken(f"\ue000{secret}unused{n}\ue001") for n in range(unused)])
        names = {id_: self._placeholders.get(token.content, token.content) for id_, token in added.items()}
        self._tokenizer.add_tokens([_renamed(token, names[id_]) for id_, token in added.items()])
        self._ids = {self._tokenizer.token_to_id(name): id_ for id_, name in names.items()}
        # The model may produce control tokens of its own vocabulary from characters. Its unknown token is harmless.
        unknown = self._encode("\U0010fffd")
        self._control = {id_: token.content for id_, token in control.items() if id_ not in unknown}

    def may_occur_in(self, texts: Sequence[str]) -> bool:
        """Return whether client texts contain a control token, or could complete one with the text beside them."""
        texts = [replace_surrogates(text) for text in texts]
        if self._may_occur(texts):
            return True
        if self._normalizer is None or all(text.isascii() and not self._has_edge(text) for text in texts):
            return False
        # A combining character would change the last character of a control token before it.
        if any(unicodedata.combining(text[:1]) for text in map(str.lstrip, texts) if text):
            return True
        return self._may_occur([self._normalizer.normalize_str(text) for text in texts])

    def escape(self, texts: Iterable[str]) -> ClientTextEscape:
        """Return an escape for client texts, which have to include all that it is applied to."""
        return ClientTextEscape(self._edges, "\n".join(texts))

    def encode_prompt(self, prompt: str, restore: Callable[[str], str]) -> list[int]:
        """Return the token ids of a rendered prompt with escaped client text. `restore` reverses the escape."""
        prompt = replace_surrogates(prompt)
        parts, done = [], 0
        found = self._finder.encode(prompt, add_special_tokens=False)
        for token, (begin, end) in zip(found.tokens, found.offsets, strict=True):
            if placeholder := self._placeholders.get(token):
                parts += [restore(prompt[done:begin]), placeholder]
                done = end
        return self.encode_plain("".join([*parts, restore(prompt[done:])]))

    def encode_plain(self, text: str) -> list[int]:
        """Return the token ids of a text whose control tokens are read as characters."""
        ids = self._encode(text)
        for id_ in self._control.keys() & ids:
            characters = [each for character in self._control[id_] for each in self._encode(character)]
            ids = [each for token in ids for each in (characters if token == id_ else (token,))]
        return [self._ids.get(id_, id_) for id_ in ids]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _may_occur(self, texts: Sequence[str]) -> bool:
        found = [text for text in texts if self._has_edge(text)]
        return bool(found) and (any(map(self._reaches_beyond, found)) or self._contains("\n".join(found)))

    def _has_edge(self, text: str) -> bool:
        return any(edge in text for edge in self._edges)

    def _contains(self, text: str) -> bool:
        return any(self._finder.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def _reaches_beyond(self, text: str) -> bool:
        """Return whether a text begins with the end of a control token, or ends with the beginning of one."""
        text = _trim(text)
        head, tail = text[: self._longest], text[-self._longest :]
        return any(head[:end] in self._suffixes for end in range(1, len(head) + 1)) or any(
            tail[begin:] in self._prefixes for begin in range(len(tail))
        )


class ClientTextEscape:
    """Replaces characters of client texts by private-use characters that do not occur in them, and reverses it."""

    def __init__(self, characters: Sequence[str], texts: str) -> None:
        used = {*texts, *(chr(int(code, 16)) for code in _PRINTED.findall(texts))}
        codes = chain.from_iterable(range(first, last + 1) for first, last in _PRIVATE_USE)
        free = (chr(code) for code in codes if chr(code) not in used)
        self._pairs = list(zip(characters, free, strict=False))
        if len(self._pairs) < len(characters):
            raise InvalidRequest("The text contains all private-use characters of Unicode; leave one out.")

    def escape(self, value: Any, kept: re.Pattern[str] | None = None) -> Any:
        """Return a JSON value with all of its strings escaped, apart from matches of `kept`."""
        if isinstance(value, str):
            # The pattern is one group: every other part is a match.
            parts = [value] if kept is None else kept.split(value)
            parts[::2] = [self._replace(part) for part in parts[::2]]
            return "".join(parts)
        if isinstance(value, dict):
            return {self.escape(name): self.escape(each, kept) for name, each in value.items()}
        if isinstance(value, list):
            return [self.escape(each, kept) for each in value]
        return value

    def restore(self, text: str) -> str:
        """Return a text with the original characters."""
        for character, replacement in self._pairs:
            # A template may print a value with its special characters escaped.
            text = text.replace(replacement, character).replace(f"\\u{ord(replacement):04x}", character)
        return text

    def _replace(self, text: str) -> str:
        for character, replacement in self._pairs:
            text = text.replace(character, replacement)
        return text


def strings_of(*values: Any) -> Iterator[str]:
    """Yield all strings in JSON values, including the names of object members."""
    pending = list(values)
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            pending += value.keys()
            pending += value.values()
        elif isinstance(value, list):
            pending += value


def _trim(text: str) -> str:
    """Return the text without spaces around it, including those that SentencePiece writes."""
    return text.strip().strip("▁")


def _is_control(token: AddedToken) -> bool:
    text = _trim(token.content)
    return bool(text) and (token.special or not (text.isalnum() or _HTML_TAG.fullmatch(text)))


def _renamed(token: AddedToken, content: str) -> AddedToken:
    return AddedToken(content, lstrip=token.lstrip, rstrip=token.rstrip, normalized=token.normalized, special=False)


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON can contain and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
