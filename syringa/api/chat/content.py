"""The content of a message: a string, or parts of text, images and refusals."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from syringa.api.decoding import convert
from syringa.api.fields.annotations import nullable, record
from syringa.errors import InvalidRequest
from syringa.prompt.images.images import ImageSource

Content = str | list[dict[str, Any]]

_TEXT_PART = record(("type", "text"), type={"const": "text"}, text={"type": "string"})
_REFUSAL_PART = record(("type", "refusal"), type={"const": "refusal"}, refusal={"type": "string"})
_IMAGE_PART = record(
    ("type", "image_url"),
    type={"const": "image_url"},
    image_url=record(
        ("url",),
        url={"type": "string", "description": "An http(s) address, or a `data:` URI in base64."},
        detail={"enum": ["auto", "low", "high", None]},
    ),
)


def _content(*parts: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    items = {"anyOf": list(parts)} if len(parts) > 1 else parts[0]
    return {"type": "string"}, {"type": "array", "items": items, "minItems": 1}


TEXT_CONTENT = {"anyOf": [*_content(_TEXT_PART)]}
USER_CONTENT = {"anyOf": [*_content(_TEXT_PART, _IMAGE_PART)]}
ASSISTANT_CONTENT = nullable(*_content(_TEXT_PART, _REFUSAL_PART))


class TextPart(msgspec.Struct, kw_only=True):
    type: str
    text: str


class RefusalPart(msgspec.Struct, kw_only=True):
    type: str
    refusal: str


class ImagePart(msgspec.Struct, kw_only=True):
    type: str
    image_url: Any = None


class ImageUrl(msgspec.Struct, kw_only=True):
    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class ContentReader:
    """Reads contents, and keeps the images that they show in their order."""

    def __init__(self, *, sees_images: bool, ignored: list[str]) -> None:
        self.images: list[ImageSource] = []
        self._sees_images = sees_images
        self._ignored = ignored

    def read(self, given: Any, path: str, role: str) -> Content:
        """Content for a template: parts where there is an image, else one text."""
        if isinstance(given, str):
            return given
        if not isinstance(given, list) or not given:
            said = "expected a string or an array of parts that is not empty"
            raise InvalidRequest(f"{path}: {said}.", param=path)
        parts = [self._part(part, f"{path}[{index}]", role) for index, part in enumerate(given)]
        return parts if has_images(parts) else "\n".join(part["text"] for part in parts)

    def _part(self, given: Any, path: str, role: str) -> dict[str, Any]:
        kind = given.get("type") if isinstance(given, dict) else None
        if kind == "image_url" and role == "user":
            return self._image(given, path)
        if kind == "refusal" and role == "assistant":
            return {"type": "text", "text": convert(given, RefusalPart, path=path, ignored=self._ignored).refusal}
        if kind == "text":
            return {"type": "text", "text": convert(given, TextPart, path=path, ignored=self._ignored).text}
        if not isinstance(given, dict):
            raise InvalidRequest(f"{path}: expected an object.", param=path)
        known = {"user": "text and image_url", "assistant": "text and refusal"}.get(role, "text")
        raise InvalidRequest(
            f"{path}.type: parts of a {role} message are {known} here, not {kind!r}.", param=f"{path}.type"
        )

    def _image(self, given: Any, path: str) -> dict[str, Any]:
        part = convert(given, ImagePart, path=path, ignored=self._ignored)
        image = convert(part.image_url, ImageUrl, path=f"{path}.image_url", ignored=self._ignored)
        if not self._sees_images:
            raise InvalidRequest(f"{path}: this model reads text alone, and cannot see images.", param=path)
        self.images.append(ImageSource(url=image.url, detail=image.detail, param=f"{path}.image_url.url"))
        return {"type": "image"}


def has_images(content: Content | None) -> bool:
    return isinstance(content, list) and any(part["type"] == "image" for part in content)


def characters(content: Content | None) -> int:
    """How much text there is."""
    if isinstance(content, list):
        return sum(len(part.get("text", "")) for part in content)
    return len(content or "")
