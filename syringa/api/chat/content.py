"""The content of a chat message: a string, or parts with text, images and refusals."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from syringa.api.decoding import convert
from syringa.api.fields.schema import nullable, object_schema
from syringa.errors import InvalidRequest
from syringa.prompt.images.loader import ImageSource

Content = str | list[dict[str, Any]]

_TEXT_PART = object_schema(("type", "text"), type={"const": "text"}, text={"type": "string"})
_REFUSAL_PART = object_schema(("type", "refusal"), type={"const": "refusal"}, refusal={"type": "string"})
_IMAGE_PART = object_schema(
    ("type", "image_url"),
    type={"const": "image_url"},
    image_url=object_schema(
        ("url",),
        url={"type": "string", "description": "An http(s) URL, or a base64 `data:` URI."},
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
    """Validates contents, and collects their images in order."""

    def __init__(self, *, supports_images: bool, ignored: list[str]) -> None:
        self.images: list[ImageSource] = []
        self._supports_images = supports_images
        self._ignored = ignored

    def read(self, given: Any, path: str, role: str) -> Content:
        """Return content for the chat template: parts if there is an image, otherwise one text."""
        if isinstance(given, str):
            return given
        if not isinstance(given, list) or not given:
            raise InvalidRequest(f"{path}: expected a string or a non-empty array of parts.", param=path)
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
            f"{path}.type: supported parts of a {role} message are {known}, not {kind!r}.", param=f"{path}.type"
        )

    def _image(self, given: Any, path: str) -> dict[str, Any]:
        part = convert(given, ImagePart, path=path, ignored=self._ignored)
        image = convert(part.image_url, ImageUrl, path=f"{path}.image_url", ignored=self._ignored)
        if not self._supports_images:
            raise InvalidRequest(f"{path}: this model does not support images.", param=path)
        self.images.append(ImageSource(url=image.url, detail=image.detail, param=f"{path}.image_url.url"))
        return {"type": "image"}


def has_images(content: Content | None) -> bool:
    return isinstance(content, list) and any(part["type"] == "image" for part in content)


def count_characters(content: Content | None) -> int:
    """Return the length of the text in a content."""
    if isinstance(content, list):
        return sum(len(part.get("text", "")) for part in content)
    return len(content or "")
