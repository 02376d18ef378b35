"""Expansion of placeholders: same tokens as if the image tokens had been in the text when it was tokenized."""

from __future__ import annotations

import pytest
import torch

from syringa.engine.vision.placeholders import PlaceholderExpander
from syringa.engine.vision.prompt_images import EncodedImage
from tests.engine.vision.tiny_models import encode, id_of, tokenizer

PLACEHOLDER = id_of("<start_of_image>")
IMAGE_TOKENS = encode("gemma3", "<start_of_image><image><image><end_of_image>")


def expander() -> PlaceholderExpander:
    return PlaceholderExpander(tokenizer("gemma3"), PLACEHOLDER, bidirectional=True, mrope=False)


def encoded_image(around: str = "\n\n") -> EncodedImage:
    return EncodedImage(b"a", IMAGE_TOKENS, [(1, 3)], torch.arange(2)[:, None], around, around)


@pytest.mark.parametrize(
    "text",
    ["@", "a@b", "a\n@\nb", "<turn>\n@\n<turn>", "@@", "a\n\n@ \n@\n\nb<turn>c", "é\n@ß", "<turn>@<turn>@", "\n@\n@\n"],
)
def test_expander_retokenizes_text_next_to_image(text: str) -> None:
    whole = "\n\n<start_of_image><image><image><end_of_image>\n\n"
    count = text.count("@")
    prompt = encode("gemma3", text.replace("@", "<start_of_image>"))
    tokens, images = expander().expand(prompt, [encoded_image()] * count)
    assert tokens == encode("gemma3", text.replace("@", whole))
    assert [each.begin for each in images.ranges] == [
        i - 1 for i, t in enumerate(tokens) if tokens[i - 1 : i + 1].count(id_of("<image>")) == 2
    ]
    assert all(each.embeddings[:, 0].tolist() == [0, 1] for each in images.ranges)


def test_expander_keeps_tokens_that_do_not_round_trip() -> None:
    line = encode("gemma3", "\n")
    lines = encode("gemma3", "\n\n")
    tokens, _ = expander().expand([*line, *line, PLACEHOLDER, *line, *line], [encoded_image()])
    assert tokens == [*line, *line, *lines, *IMAGE_TOKENS, *lines, *line, *line]
