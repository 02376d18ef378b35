"""Decode image files and run the model's image processor on them. Runs outside the step loop.

Only the image processor of `transformers` is used, with its Pillow backend: the combined processors need torchvision
for video. The text they insert into prompts is reproduced in `family.py`.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from syringa.engine.models.hf.attention import UnsupportedModel
from syringa.engine.vision.decode_memory import DecodeMemory
from syringa.engine.vision.family import ImageTokens, TowerInputs, VisionFamily
from syringa.errors import InvalidRequest
from syringa.modelfiles import ModelFiles, load_tokenizer
from syringa.types import Image

LOW_DETAIL_SIZE = 512, 512
MAX_PIXELS = 64_000_000  # protects against decompression bombs
DECODE_BYTES = 1 << 30  # of all images that are decoded at the same time
BYTES_PER_PIXEL = 12  # Pillow takes four, and turning and converting an image make copies
PROCESSOR_FILES = "preprocessor_config.json", "processor_config.json"


@dataclass
class ProcessedImage:
    """An image ready for the vision tower. Fields as in `EncodedImage`."""

    tokens: list[int]
    ranges: list[tuple[int, int]]
    text_before: str
    text_after: str
    grid: tuple[int, int] | None
    tower_inputs: list[TowerInputs]


class ImageReader:
    def __init__(self, files: ModelFiles, family: VisionFamily, config: Any) -> None:
        """Raise `UnsupportedModel` if the model's image processor or image tokens are missing."""
        self.family = family
        self.config = config
        self.processor = _image_processor(files)
        self.tokenizer: Tokenizer = load_tokenizer(files)
        self.placeholder: int = getattr(config, family.placeholder)
        self.image_tokens = self._image_tokens()
        self._memory = DecodeMemory(DECODE_BYTES)

    def decode(self, image: Image) -> Any:
        """Return the upright RGB pixels of an image file. Raise `InvalidRequest` if it cannot be decoded."""
        with self._memory.reserve(_decoded_bytes(image)):
            return self._decode(image)

    def _decode(self, image: Image) -> Any:
        from PIL import Image as Pillow
        from PIL import ImageOps

        try:
            with Pillow.open(io.BytesIO(image.data)) as opened:
                pixels = ImageOps.exif_transpose(opened).convert("RGB")
        except Exception as error:  # decoders raise errors of any type on malformed files
            raise _undecodable(error) from None
        if image.detail == "low":
            pixels.thumbnail(LOW_DETAIL_SIZE, Pillow.Resampling.BICUBIC)
        return pixels

    def read(self, image: Image) -> ProcessedImage:
        """Decode and process an image. Raise `InvalidRequest` if that is impossible."""
        family = self.family
        options = dict(family.options) | (dict(family.low_detail_options) if image.detail == "low" else {})
        try:
            with self._memory.reserve(_decoded_bytes(image)):
                output = self.processor(self._decode(image), return_tensors="pt", **options)
        except ValueError as error:  # for example an extreme aspect ratio
            raise InvalidRequest(f"An image cannot be used: {_first_line(error)}", param="messages") from None
        text = family.expand(self.config, output, self.image_tokens)
        begin, end = 0, len(text)
        if begin_token := self.image_tokens.begin:
            end_token = self.image_tokens.end
            begin, end = text.index(begin_token), text.rindex(end_token) + len(end_token)
        tokens = self.tokenizer.encode(text[begin:end], add_special_tokens=False).ids
        grid = _grid(self.config, output) if family.mrope else None
        tower_inputs = list(family.tower_inputs(output))
        return ProcessedImage(tokens, self._ranges(tokens), text[:begin], text[end:], grid, tower_inputs)

    def _ranges(self, tokens: list[int]) -> list[tuple[int, int]]:
        """Return the half-open ranges of image tokens."""
        ranges, index = [], 0
        for token, group in groupby(tokens):
            begin, index = index, index + len(list(group))
            if token == self.config.image_token_id:
                ranges.append((begin, index))
        return ranges

    def _image_tokens(self) -> ImageTokens:
        names = ["image_token_id"]
        if self.family.placeholder == "boi_token_id":
            names += ["boi_token_id", "eoi_token_id"]
        return ImageTokens(*(self._token_text(name) for name in names))

    def _token_text(self, name: str) -> str:
        id_ = getattr(self.config, name)
        text = self.tokenizer.id_to_token(id_)
        if text is None or self.tokenizer.encode(text, add_special_tokens=False).ids != [id_]:
            raise UnsupportedModel(f"its tokenizer has no token of its own for the {name} {id_}")
        return text


def _decoded_bytes(image: Image) -> int:
    """Return the memory that decoding an image takes, from the header of its file. Raise `InvalidRequest`."""
    from PIL import Image as Pillow

    try:
        with Pillow.open(io.BytesIO(image.data)) as opened:
            width, height = opened.size
    except Exception as error:  # decoders raise errors of any type on malformed files
        raise _undecodable(error) from None
    if width * height > MAX_PIXELS:
        raise InvalidRequest(f"An image has {width} x {height} pixels; {MAX_PIXELS:,} is the most.", param="messages")
    return width * height * BYTES_PER_PIXEL


def _undecodable(error: Exception) -> InvalidRequest:
    return InvalidRequest(f"An image cannot be decoded: {_first_line(error)}", param="messages")


def _grid(config: Any, output: Any) -> tuple[int, int]:
    _, height, width = output["image_grid_thw"][0].tolist()
    merge = config.vision_config.spatial_merge_size
    return height // merge, width // merge


def _image_processor(files: ModelFiles) -> Any:
    if not any((Path(files.path) / name).is_file() for name in PROCESSOR_FILES):
        raise UnsupportedModel(f"its folder has no {' or '.join(PROCESSOR_FILES)}, which say how images are prepared")
    try:
        import PIL  # noqa: F401
        from transformers import AutoImageProcessor
    except ImportError:
        raise UnsupportedModel("reading images needs Pillow: pip install pillow") from None
    try:
        return AutoImageProcessor.from_pretrained(
            files.path, backend="pil", local_files_only=True, trust_remote_code=False
        )
    except (ValueError, OSError, ImportError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedModel(f"its image processor cannot be created: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
