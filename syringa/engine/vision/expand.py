"""Puts pictures in the places of their placeholders, token for token as `transformers`' processors would.

They write text into the prompt's text before it is cut into tokens, while here the prompt comes as tokens. That makes a
difference only where an image brings text of its own at its ends, as with Gemma: a new line before it may form one
token with the one that ended the text. So the text beside such an image, up to the next special token, is cut again.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from syringa.engine.vision.images import Picture, Pictures, Run, plane_positions


class Expander:
    def __init__(self, tokenizer: Tokenizer, placeholder: int, *, joint: bool, planar: bool) -> None:
        self.tokenizer = tokenizer
        self.placeholder = placeholder
        self.joint = joint
        self.planar = planar
        added = tokenizer.get_added_tokens_decoder()
        self.special = {id_ for id_, token in added.items() if token.special} | {placeholder}

    def expand(self, prompt: Sequence[int], pictures: Sequence[Picture]) -> tuple[list[int], Pictures]:
        """There is a picture for each placeholder."""
        tokens: list[int] = []
        runs: list[Run] = []
        grids: list[tuple[int, tuple[int, int]]] = []
        texts = _split(prompt, self.placeholder)
        for i, picture in enumerate(pictures):
            tokens += self._join(texts[i], pictures[i - 1].tail if i else "", picture.lead)
            runs += _placed(picture, len(tokens))
            grids += [(run.begin, picture.grid) for run in runs[-len(picture.runs) :] if picture.grid]
            tokens += picture.tokens
        tokens += self._join(texts[-1], pictures[-1].tail, "")
        if not self.planar:
            return tokens, Pictures(pictures, runs, self.joint)
        positions, shift = plane_positions(len(tokens), grids)
        return tokens, Pictures(pictures, runs, self.joint, positions, shift)

    def _join(self, text: list[int], before: str, after: str) -> list[int]:
        """The tokens of a text with more text at its ends."""
        if not before and not after:
            return text
        inner = [i for i, token in enumerate(text) if token in self.special]
        if not inner:
            return self._cut(before, text, after)
        first, last = inner[0], inner[-1] + 1
        return self._cut(before, text[:first], "") + text[first:last] + self._cut("", text[last:], after)

    def _cut(self, before: str, text: list[int], after: str) -> list[int]:
        if not before and not after:
            return text
        plain = self.tokenizer.decode(text, skip_special_tokens=False) if text else ""
        if self._encode(plain) != text:  # not cut as this tokenizer does: it is left as it came
            return self._encode(before) + text + self._encode(after)
        return self._encode(before + plain + after)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _split(prompt: Sequence[int], placeholder: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token in prompt:
        if token == placeholder:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _placed(picture: Picture, start: int) -> list[Run]:
    runs, row = [], 0
    for begin, end in picture.runs:
        rows = picture.rows[row : row + end - begin]
        runs.append(Run(start + begin, start + end, picture.key, rows))
        row += end - begin
    return runs
