"""The content of messages and tool outputs: a text, or parts. Converted for the chat template and for storage."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from syringa.api.chat.content import Content, has_images
from syringa.api.decoding import convert
from syringa.errors import InvalidRequest
from syringa.prompt.images.loader import ImageSource


class TextPartField(msgspec.Struct, kw_only=True):
    """`input_text`, `output_text`, `summary_text` and `reasoning_text`."""

    type: str
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []
    prompt_cache_breakpoint: Any = None


class RefusalPartField(msgspec.Struct, kw_only=True):
    type: str
    refusal: str


class ImagePartField(msgspec.Struct, kw_only=True):
    type: str
    image_url: str | None = None
    detail: Literal["auto", "low", "high"] = "auto"
    file_id: Any = None


_SUPPORTED = {
    "assistant": ("output_text", "input_text", "refusal"),
    "output": ("input_text", "output_text"),
    "user": ("input_text", "input_image", "output_text"),
}
_TEXTS = ("input_text", "output_text", "text")


class ContentPartReader:
    """Reads the parts of one item, and collects their images in order.

    `role` is that of the message, or `output` for the output of a tool.
    """

    def __init__(self, role: str, *, supports_images: bool, ignored: list[str]) -> None:
        self.images: list[ImageSource] = []
        self._role, self._supports_images, self._ignored = role, supports_images, ignored

    def read(self, given: Any, path: str) -> tuple[Content, list[dict[str, Any]]]:
        """Return the content for the chat template, and the parts as they are stored."""
        if isinstance(given, str):
            return given, [self._text_part(given)]
        if not isinstance(given, list) or not given:
            raise InvalidRequest(f"{path}: expected a string or a non-empty array of parts.", param=path)
        converted = [self._part(part, f"{path}[{index}]") for index, part in enumerate(given)]
        parts = [part for part, _ in converted]
        content = parts if has_images(parts) else "\n".join(part["text"] for part in parts)
        return content, [stored for _, stored in converted]

    def _text_part(self, text: str) -> dict[str, Any]:
        if self._role == "assistant":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"type": "input_text", "text": text}

    def _part(self, given: Any, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
        if not isinstance(given, dict):
            raise InvalidRequest(f"{path}: expected an object.", param=path)
        kind = given.get("type")
        supported = _SUPPORTED.get(self._role, ("input_text", "output_text"))
        if kind in _TEXTS:
            text = convert(given, TextPartField, path=path, ignored=self._ignored)
            if text.prompt_cache_breakpoint is not None:
                self._ignored.append(f"{path}.prompt_cache_breakpoint")
            return {"type": "text", "text": text.text}, self._text_part(text.text)
        if kind == "refusal" and kind in supported:
            refusal = convert(given, RefusalPartField, path=path, ignored=self._ignored).refusal
            return {"type": "text", "text": refusal}, {"type": "refusal", "refusal": refusal}
        if kind == "input_image" and kind in supported:
            return self._image(given, path)
        owner = "tool outputs" if self._role == "output" else f"{self._role} messages"
        raise InvalidRequest(
            f"{path}.type: supported parts of {owner} are {', '.join(supported)}, not {kind!r}.", param=f"{path}.type"
        )

    def _image(self, given: dict[str, Any], path: str) -> tuple[dict[str, Any], dict[str, Any]]:
        if given.get("file_id") is not None:
            raise InvalidRequest(
                f"{path}.file_id: uploaded files are not supported; send image_url.", param=f"{path}.file_id"
            )
        image = convert(given, ImagePartField, path=path, ignored=self._ignored)
        path = f"{path}.image_url"
        if image.image_url is None:
            raise InvalidRequest(f"{path}: expected a URL or a data URI.", param=path)
        if not self._supports_images:
            raise InvalidRequest(f"{path}: this model does not support images.", param=path)
        self.images.append(ImageSource(url=image.image_url, detail=image.detail, param=path))
        return {"type": "image"}, {"type": "input_image", "image_url": image.image_url, "detail": image.detail}


def read_text_parts(given: Any, kind: str, path: str, ignored: list[str]) -> list[dict[str, Any]]:
    """Read the text parts of a reasoning item, which all have the type `kind`."""
    if given is None:
        return []
    if not isinstance(given, list):
        raise InvalidRequest(f"{path}: expected an array.", param=path)
    found = []
    for index, each in enumerate(given):
        at = f"{path}[{index}]"
        text = convert(each, TextPartField, path=at, ignored=ignored)
        if text.type != kind:
            raise InvalidRequest(f"{at}.type: expected {kind}, not {text.type!r}.", param=f"{at}.type")
        found.append({"type": kind, "text": text.text})
    return found
