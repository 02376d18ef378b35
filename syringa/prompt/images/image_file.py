"""Validation of image files, with bounds on memory and without trusting their headers."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

from syringa.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL import Image

MAX_SIDE = 16_384
MAX_ASPECT_RATIO = 200

_SIGNATURES = {
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"\xff\xd8\xff": "JPEG",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
}


def check_image(
    data: bytes, max_pixels: int, max_side: int = MAX_SIDE, spend: Callable[[int], None] | None = None
) -> None:
    """Raise `InvalidRequest` unless the data is a complete PNG, JPEG, WebP or GIF file within these limits.

    `max_side` is that of the width and the height. `spend` is called with the number of pixels before decoding, and may
    raise too. Of an animation only the first frame counts, which is the one that models see.
    """
    if not data:
        raise InvalidRequest("it is empty.", code="empty_image_file")
    kind = _kind(data)
    if kind is None:
        raise InvalidRequest("it is not a PNG, JPEG, WebP or GIF image.", code="invalid_image_format")
    # Pillow allocates the whole image when it opens a WebP file, so the header is read here first.
    if kind == "WEBP":
        _check_size(_webp_size(data), max_pixels, max_side)

    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data), formats=[kind])
    except Image.DecompressionBombError:
        raise _too_many(max_pixels) from None
    except Exception:
        raise _broken() from None
    _check_size(image.size, max_pixels, max_side)
    if spend is not None:
        spend(image.size[0] * image.size[1])
    _load(image)


def _kind(data: bytes) -> str | None:
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WEBP"
    return next((kind for signature, kind in _SIGNATURES.items() if data.startswith(signature)), None)


def _webp_size(data: bytes) -> tuple[int, int]:
    """Return the size from the header of the first chunk, which has one of three layouts."""
    chunk, head = data[12:16], data[20:30]
    if len(head) < 10 or chunk not in (b"VP8X", b"VP8L", b"VP8 "):
        raise _broken()
    if chunk == b"VP8X":
        return 1 + int.from_bytes(head[4:7], "little"), 1 + int.from_bytes(head[7:10], "little")
    if chunk == b"VP8L":
        packed = int.from_bytes(head[1:5], "little")
        return 1 + (packed & 0x3FFF), 1 + (packed >> 14 & 0x3FFF)
    return int.from_bytes(head[6:8], "little") & 0x3FFF, int.from_bytes(head[8:10], "little") & 0x3FFF


def _load(image: Image.Image) -> None:
    try:
        # Decoding a JPEG at an eighth of its size reads the whole file with a fraction of the memory.
        image.draft("RGB", (1, 1))
        image.load()
    except Exception:
        # Pillow's parsers raise many types: OSError, SyntaxError, ValueError, struct.error.
        raise _broken() from None
    finally:
        image.close()


def _check_size(size: tuple[int, int], max_pixels: int, max_side: int) -> None:
    short, long = sorted(size)
    if short * long > max_pixels:
        raise _too_many(max_pixels)
    if long > max_side:
        raise InvalidRequest(
            f"it has {size[0]} x {size[1]} pixels; {max_side} is the most for one side.", code="image_too_large"
        )
    # Image processors scale such an image up to the size of the short side, or refuse it.
    if long > MAX_ASPECT_RATIO * short:
        raise InvalidRequest(
            f"it has {size[0]} x {size[1]} pixels; one side may be {MAX_ASPECT_RATIO} times the other at most.",
            code="invalid_image",
        )


def _too_many(max_pixels: int) -> InvalidRequest:
    return InvalidRequest(f"it has more than {max_pixels} pixels, which is the most allowed.", code="image_too_large")


def _broken() -> InvalidRequest:
    return InvalidRequest("it is damaged or cut off, and cannot be decoded.", code="image_parse_error")
