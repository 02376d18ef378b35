"""Expand image placeholders to image tokens, token for token as `transformers`' processors do.

Those processors insert text before the prompt is tokenized; here the prompt arrives as tokens. The two differ only if
an image brings text of its own (Gemma), because a newline before it may merge with the end of the preceding text. The
text next to such an image is therefore tokenized again, up to the next special token.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from syringa.engine.vision.prompt_images import EncodedImage, PlaceholderRange, PromptImages, mrope_positions


class PlaceholderExpander:
    def __init__(self, tokenizer: Tokenizer, placeholder: int, *, bidirectional: bool, mrope: bool) -> None:
        self.tokenizer = tokenizer
        self.placeholder = placeholder
        self.bidirectional = bidirectional
        self.mrope = mrope
        added = tokenizer.get_added_tokens_decoder()
        self.special = {id_ for id_, token in added.items() if token.special} | {placeholder}

    def expand(self, prompt: Sequence[int], images: Sequence[EncodedImage]) -> tuple[list[int], PromptImages]:
        """Replace each placeholder of `prompt` by the tokens of its image. There must be one image per placeholder."""
        tokens: list[int] = []
        ranges: list[PlaceholderRange] = []
        grids: list[tuple[int, tuple[int, int]]] = []
        texts = _split(prompt, self.placeholder)
        for i, image in enumerate(images):
            tokens += self._surround(texts[i], images[i - 1].text_after if i else "", image.text_before)
            ranges += _placeholder_ranges(image, len(tokens))
            grids += [(each.begin, image.grid) for each in ranges[-len(image.ranges) :] if image.grid]
            tokens += image.tokens
        tokens += self._surround(texts[-1], images[-1].text_after, "")
        if not self.mrope:
            return tokens, PromptImages(images, ranges, self.bidirectional)
        positions, delta = mrope_positions(len(tokens), grids)
        return tokens, PromptImages(images, ranges, self.bidirectional, positions, delta)

    def _surround(self, text: list[int], before: str, after: str) -> list[int]:
        """Return the tokens of `text` with strings added at its ends."""
        if not before and not after:
            return text
        special = [i for i, token in enumerate(text) if token in self.special]
        if not special:
            return self._retokenize(before, text, after)
        first, last = special[0], special[-1] + 1
        return self._retokenize(before, text[:first], "") + text[first:last] + self._retokenize("", text[last:], after)

    def _retokenize(self, before: str, text: list[int], after: str) -> list[int]:
        if not before and not after:
            return text
        plain = self.tokenizer.decode(text, skip_special_tokens=False) if text else ""
        if self._encode(plain) != text:  # the client tokenized it differently: keep its tokens
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


def _placeholder_ranges(image: EncodedImage, start: int) -> list[PlaceholderRange]:
    """Return the ranges of an image whose tokens begin at position `start`."""
    ranges, row = [], 0
    for begin, end in image.ranges:
        embeddings = image.embeddings[row : row + end - begin]
        ranges.append(PlaceholderRange(start + begin, start + end, image.image_hash, embeddings))
        row += end - begin
    return ranges
