"""Placeholders become what an image takes, and the text beside them is cut as if it had been there from the start."""

from __future__ import annotations

import pytest
import torch

from syringa.engine.vision.expand import Expander
from syringa.engine.vision.images import Picture
from tests.engine.vision.small import encode, id_of, tokenizer

PLACE = id_of("<start_of_image>")
INNER = encode("gemma3", "<start_of_image><image><image><end_of_image>")


def expander() -> Expander:
    return Expander(tokenizer("gemma3"), PLACE, joint=True, planar=False)


def picture(around: str = "\n\n") -> Picture:
    return Picture(b"a", INNER, [(1, 3)], torch.arange(2)[:, None], around, around)


@pytest.mark.parametrize(
    "text",
    ["@", "a@b", "a\n@\nb", "<turn>\n@\n<turn>", "@@", "a\n\n@ \n@\n\nb<turn>c", "é\n@ß", "<turn>@<turn>@", "\n@\n@\n"],
)
def test_text_beside_an_image_is_cut_again(text: str) -> None:
    whole = "\n\n<start_of_image><image><image><end_of_image>\n\n"
    count = text.count("@")
    prompt = encode("gemma3", text.replace("@", "<start_of_image>"))
    tokens, placed = expander().expand(prompt, [picture()] * count)
    assert tokens == encode("gemma3", text.replace("@", whole))
    assert [run.begin for run in placed.runs] == [
        i - 1 for i, t in enumerate(tokens) if tokens[i - 1 : i + 1].count(id_of("<image>")) == 2
    ]
    assert all(run.rows[:, 0].tolist() == [0, 1] for run in placed.runs)


def test_tokens_that_the_tokenizer_would_not_have_made_are_left() -> None:
    line = encode("gemma3", "\n")
    lines = encode("gemma3", "\n\n")
    tokens, _ = expander().expand([*line, *line, PLACE, *line, *line], [picture()])
    assert tokens == [*line, *line, *lines, *INNER, *lines, *line, *line]
