"""The content of messages and outputs: a text, or parts. Read twice over, for the template and for the store."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from syringa.api.chat.content import Content, has_images
from syringa.api.decoding import convert
from syringa.errors import InvalidRequest
from syringa.prompt.images.images import ImageSource


class TextField(msgspec.Struct, kw_only=True):
    """`input_text`, `output_text`, `summary_text` and `reasoning_text`."""

    type: str
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []
    prompt_cache_breakpoint: Any = None


class RefusalField(msgspec.Struct, kw_only=True):
    type: str
    refusal: str


class ImageField(msgspec.Struct, kw_only=True):
    type: str
    image_url: str | None = None
    detail: Literal["auto", "low", "high"] = "auto"
    file_id: Any = None


_KINDS = {
    "assistant": ("output_text", "input_text", "refusal"),
    "output": ("input_text", "output_text"),
    "user": ("input_text", "input_image", "output_text"),
}
_TEXTS = ("input_text", "output_text", "text")


class PartReader:
    """Reads the parts of one item, and keeps the images that they show in their order.

    `whose`: a role, or `output` for what a tool gave.
    """

    def __init__(self, whose: str, *, sees_images: bool, ignored: list[str]) -> None:
        self.images: list[ImageSource] = []
        self._whose, self._sees_images, self._ignored = whose, sees_images, ignored

    def read(self, given: Any, path: str) -> tuple[Content, list[dict[str, Any]]]:
        """The content for a template, and the parts as they are stored."""
        if isinstance(given, str):
            return given, [self._text_part(given)]
        if not isinstance(given, list) or not given:
            said = "expected a string or an array of parts that is not empty"
            raise InvalidRequest(f"{path}: {said}.", param=path)
        both = [self._part(part, f"{path}[{index}]") for index, part in enumerate(given)]
        parts = [part for part, _ in both]
        content = parts if has_images(parts) else "\n".join(part["text"] for part in parts)
        return content, [kept for _, kept in both]

    def _text_part(self, text: str) -> dict[str, Any]:
        if self._whose == "assistant":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"type": "input_text", "text": text}

    def _part(self, given: Any, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
        if not isinstance(given, dict):
            raise InvalidRequest(f"{path}: expected an object.", param=path)
        kind = given.get("type")
        served = _KINDS.get(self._whose, ("input_text", "output_text"))
        if kind in _TEXTS:
            text = convert(given, TextField, path=path, ignored=self._ignored)
            if text.prompt_cache_breakpoint is not None:
                self._ignored.append(f"{path}.prompt_cache_breakpoint")
            return {"type": "text", "text": text.text}, self._text_part(text.text)
        if kind == "refusal" and kind in served:
            refusal = convert(given, RefusalField, path=path, ignored=self._ignored).refusal
            return {"type": "text", "text": refusal}, {"type": "refusal", "refusal": refusal}
        if kind == "input_image" and kind in served:
            return self._image(given, path)
        whose = "outputs" if self._whose == "output" else f"{self._whose} messages"
        raise InvalidRequest(
            f"{path}.type: parts of {whose} are {', '.join(served)} here, not {kind!r}.", param=f"{path}.type"
        )

    def _image(self, given: dict[str, Any], path: str) -> tuple[dict[str, Any], dict[str, Any]]:
        if given.get("file_id") is not None:
            raise InvalidRequest(f"{path}.file_id: files are not kept here; send image_url.", param=f"{path}.file_id")
        image = convert(given, ImageField, path=path, ignored=self._ignored)
        path = f"{path}.image_url"
        if image.image_url is None:
            raise InvalidRequest(f"{path}: expected an address or a data URI.", param=path)
        if not self._sees_images:
            raise InvalidRequest(f"{path}: this model reads text alone, and cannot see images.", param=path)
        self.images.append(ImageSource(url=image.image_url, detail=image.detail, param=path))
        return {"type": "image"}, {"type": "input_image", "image_url": image.image_url, "detail": image.detail}


def read_texts(given: Any, kind: str, path: str, ignored: list[str]) -> list[dict[str, Any]]:
    """The texts of a thought, which are all of one kind."""
    if given is None:
        return []
    if not isinstance(given, list):
        raise InvalidRequest(f"{path}: expected an array.", param=path)
    found = []
    for index, each in enumerate(given):
        at = f"{path}[{index}]"
        text = convert(each, TextField, path=at, ignored=ignored)
        if text.type != kind:
            raise InvalidRequest(f"{at}.type: expected {kind}, not {text.type!r}.", param=f"{at}.type")
        found.append({"type": kind, "text": text.text})
    return found
