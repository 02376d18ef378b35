"""Decoding of image files, and discovery of a model's image processor."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from syringa.types import Image
from tests.engine.vision.tiny_models import make_image, save


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def reader(model: Any) -> Any:
    return model.load().vision.reader


def file(pixels: Any, kind: str, **options: Any) -> Image:
    data = io.BytesIO()
    pixels.save(data, kind, **options)
    return Image(data=data.getvalue(), digest=b"")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "1"])
def test_decode_converts_every_format_and_mode_to_rgb(reader: Any, kind: str, mode: str) -> None:
    pixels = Pillow.new("RGB", (7, 5), (200, 30, 90)).convert(mode)
    if kind == "JPEG" and mode in ("P", "RGBA"):
        pixels = pixels.convert("RGB")
    found = reader.decode(file(pixels, kind))
    assert (found.mode, found.size) == ("RGB", (7, 5))


def test_decode_applies_exif_orientation(reader: Any) -> None:
    dots = np.zeros((4, 8, 3), dtype=np.uint8)
    dots[0, 0] = 255
    exif = Pillow.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    found = np.asarray(reader.decode(file(Pillow.fromarray(dots), "PNG", exif=exif)))
    assert found.shape == (8, 4, 3)
    assert found[0, 3].tolist() == [255, 255, 255]


def test_decode_shrinks_images_of_low_detail(reader: Any) -> None:
    assert reader.decode(make_image(1, 2000, 500, detail="low")).size == (512, 128)
    assert reader.decode(make_image(1, 200, 50, detail="low")).size == (200, 50)
    assert reader.decode(make_image(1, 2000, 500)).size == (2000, 500)


def test_reader_finds_image_processor_in_processor_config(model: Any) -> None:
    path = model.folder / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    path.unlink()
    whole = {"processor_class": "LlavaProcessor", "image_processor": settings}
    (model.folder / "processor_config.json").write_text(json.dumps(whole))
    found = model.load().vision.reader.processor
    assert (type(found).__name__, dict(found.crop_size)) == ("CLIPImageProcessorPil", {"height": 32, "width": 32})
