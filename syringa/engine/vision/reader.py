"""From an image file's bytes to what the vision tower takes and what stands in the prompt. Runs beside the step loop.

Of `transformers`' processors only the image processor is used, in its Pillow form: the whole ones want torchvision for
videos. What they write into prompts is in `family.py`.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from syringa.engine.models.hf.attention import Unsupported
from syringa.engine.vision.family import Family, Inputs, Words
from syringa.errors import InvalidRequest
from syringa.modelfiles import ModelFiles, load_tokenizer
from syringa.types import Image

LOW_DETAIL = 512, 512
# As RGB that is 192 MB, and what takes more is no photograph but an attack.
MOST_PIXELS = 64_000_000
PROCESSOR_FILES = "preprocessor_config.json", "processor_config.json"


@dataclass
class Reading:
    """An image, ready for the tower."""

    tokens: list[int]
    runs: list[tuple[int, int]]
    lead: str
    tail: str
    grid: tuple[int, int] | None
    frames: list[Inputs]


class Reader:
    def __init__(self, files: ModelFiles, family: Family, config: Any) -> None:
        self.family = family
        self.config = config
        self.processor = _image_processor(files)
        self.tokenizer: Tokenizer = load_tokenizer(files)
        self.placeholder: int = getattr(config, family.placeholder)
        self.words = self._words()

    def decode(self, image: Image) -> Any:
        """The pixels, upright and in RGB. Raises `InvalidRequest`."""
        from PIL import Image as Pillow
        from PIL import ImageOps

        try:
            with Pillow.open(io.BytesIO(image.data)) as opened:
                if opened.width * opened.height > MOST_PIXELS:
                    raise InvalidRequest(
                        f"An image has {opened.width} x {opened.height} pixels; {MOST_PIXELS:,} is the most.",
                        param="messages",
                    )
                pixels = ImageOps.exif_transpose(opened).convert("RGB")
        except InvalidRequest:
            raise
        except Exception as error:  # a decoder meets whatever a file may hold, and has errors of every kind
            raise InvalidRequest(f"An image cannot be decoded: {_brief(error)}", param="messages") from None
        if image.detail == "low":
            pixels.thumbnail(LOW_DETAIL, Pillow.Resampling.BICUBIC)
        return pixels

    def read(self, image: Image) -> Reading:
        """Raises `InvalidRequest`."""
        family = self.family
        options = dict(family.options) | (dict(family.cheap) if image.detail == "low" else {})
        try:
            prepared = self.processor(self.decode(image), return_tensors="pt", **options)
        except ValueError as error:  # such as a strip two hundred times as long as it is wide
            raise InvalidRequest(f"An image cannot be used: {_brief(error)}", param="messages") from None
        text = family.text(self.config, prepared, self.words)
        begin, end = 0, len(text)
        if self.words.begin:
            begin, end = text.index(self.words.begin), text.rindex(self.words.end) + len(self.words.end)
        tokens = self.tokenizer.encode(text[begin:end], add_special_tokens=False).ids
        grid = _grid(self.config, prepared) if family.planar else None
        return Reading(tokens, self._runs(tokens), text[:begin], text[end:], grid, list(family.frames(prepared)))

    def _runs(self, tokens: list[int]) -> list[tuple[int, int]]:
        runs, at = [], 0
        for token, group in groupby(tokens):
            begin, at = at, at + len(list(group))
            if token == self.config.image_token_id:
                runs.append((begin, at))
        return runs

    def _words(self) -> Words:
        names = ["image_token_id"]
        if self.family.placeholder == "boi_token_id":
            names += ["boi_token_id", "eoi_token_id"]
        return Words(*(self._word(name) for name in names))

    def _word(self, name: str) -> str:
        id_ = getattr(self.config, name)
        word = self.tokenizer.id_to_token(id_)
        if word is None or self.tokenizer.encode(word, add_special_tokens=False).ids != [id_]:
            raise Unsupported(f"its tokenizer has no token of its own for the {name} {id_}")
        return word


def _grid(config: Any, prepared: Any) -> tuple[int, int]:
    _, height, width = prepared["image_grid_thw"][0].tolist()
    merge = config.vision_config.spatial_merge_size
    return height // merge, width // merge


def _image_processor(files: ModelFiles) -> Any:
    if not any((Path(files.path) / name).is_file() for name in PROCESSOR_FILES):
        raise Unsupported(f"its folder has no {' or '.join(PROCESSOR_FILES)}, which say how images are prepared")
    try:
        import PIL  # noqa: F401
        from transformers import AutoImageProcessor
    except ImportError:
        raise Unsupported("reading images needs Pillow: pip install pillow") from None
    try:
        return AutoImageProcessor.from_pretrained(
            files.path, backend="pil", local_files_only=True, trust_remote_code=False
        )
    except (ValueError, OSError, ImportError, KeyError, TypeError, AttributeError) as error:
        raise Unsupported(f"its image processor cannot be made: {_brief(error)}") from None


def _brief(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
