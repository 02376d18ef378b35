"""Content blocks that have text and images: text, images, documents and search results."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from syringa.api.anthropic.request import CacheControl
from syringa.api.decoding import convert
from syringa.errors import InvalidRequest
from syringa.prompt.images.loader import ImageSource

PART_TYPES = ("text", "image", "document", "search_result")


class TextBlockField(msgspec.Struct, kw_only=True):
    type: str
    text: str
    cache_control: Any = None
    citations: list[Any] | None = None


class ImageBlockField(msgspec.Struct, kw_only=True):
    type: str
    source: Any = None
    cache_control: Any = None


class Base64SourceField(msgspec.Struct, kw_only=True):
    type: str
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSourceField(msgspec.Struct, kw_only=True):
    type: str
    url: str


class DocumentBlockField(msgspec.Struct, kw_only=True):
    type: str
    source: Any = None
    title: str | None = None
    context: str | None = None
    citations: dict[str, Any] | None = None
    cache_control: Any = None


class TextSourceField(msgspec.Struct, kw_only=True):
    type: str
    data: str
    media_type: Literal["text/plain"] = "text/plain"


class ContentSourceField(msgspec.Struct, kw_only=True):
    type: str
    content: Any = None


class SearchResultField(msgspec.Struct, kw_only=True):
    type: str
    source: str
    title: str
    content: Any = None
    citations: dict[str, Any] | None = None
    cache_control: Any = None


class Part(msgspec.Struct, frozen=True):
    """A text, or an image: the content of messages without the wire format."""

    text: str = ""
    image: ImageSource | None = None


def block_type(given: Any, path: str) -> str:
    """Return the type of a block. Raises `InvalidRequest` if it has none."""
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(kind, str):
        raise InvalidRequest(f"{path}: expected a block with a type.", param=path)
    return kind


def read_cache_control(given: Any, path: str, ignored: list[str]) -> CacheControl | None:
    """Validate the `cache_control` of the object at `path`."""
    if given is None:
        return None
    return convert(given, CacheControl, path=f"{path}.cache_control" if path else "cache_control", ignored=ignored)


class PartReader:
    """Reads blocks with text and images."""

    def __init__(self, *, supports_images: bool, ignored: list[str]) -> None:
        self._supports_images, self.ignored = supports_images, ignored

    def read_block(
        self, given: Any, path: str, known: tuple[str, ...] = PART_TYPES
    ) -> tuple[list[Part], CacheControl | None]:
        """Read a block of one of the `known` types. Return its parts, and the last `cache_control` of blocks in it."""
        kind = block_type(given, path)
        if kind not in known:
            raise InvalidRequest(
                f"{path}.type: expected {', '.join(known[:-1])} or {known[-1]}, not {kind!r}."
                if len(known) > 1
                else f"{path}.type: expected {known[0]}, not {kind!r}.",
                param=f"{path}.type",
            )
        match kind:
            case "text":
                text = convert(given, TextBlockField, path=path, ignored=self.ignored)
                if text.citations:
                    self.ignored.append(f"{path}.citations")
                return [Part(text.text)], None
            case "image":
                source = convert(given, ImageBlockField, path=path, ignored=self.ignored).source
                return [self._image(source, path)], None
            case "document":
                return self._document(given, path)
        return self._search_result(given, path)

    def _read_list(self, given: Any, path: str, known: tuple[str, ...]) -> tuple[list[Part], CacheControl | None]:
        """Read a string, or blocks of the `known` types. Return its parts, and the last `cache_control` in it."""
        if isinstance(given, str):
            return [Part(given)], None
        if not isinstance(given, list):
            raise InvalidRequest(f"{path}: expected a string or an array of blocks.", param=path)
        parts: list[Part] = []
        control: CacheControl | None = None
        for index, each in enumerate(given):
            where = f"{path}[{index}]"
            parts += self.read_block(each, where, known)[0]  # of types that have no blocks in them
            control = read_cache_control(each.get("cache_control"), where, self.ignored) or control
        return parts, control

    def _image(self, source: Any, path: str) -> Part:
        path += ".source"
        kind = block_type(source, path)
        match kind:
            case "base64":
                data = convert(source, Base64SourceField, path=path, ignored=self.ignored)
                image = ImageSource(url=f"data:{data.media_type};base64,{data.data}", param=f"{path}.data")
            case "url":
                url = convert(source, UrlSourceField, path=path, ignored=self.ignored).url
                image = ImageSource(url=url, param=f"{path}.url")
            case _:
                raise InvalidRequest(f"{path}.type: expected base64 or url, not {kind!r}.", param=f"{path}.type")
        if not self._supports_images:
            raise InvalidRequest(f"{path}: this model does not support images.", param=path)
        return Part(image=image)

    def _document(self, given: Any, path: str) -> tuple[list[Part], CacheControl | None]:
        document = convert(given, DocumentBlockField, path=path, ignored=self.ignored)
        self._report_citations(document.citations, path)
        path += ".source"
        kind = block_type(document.source, path)
        control: CacheControl | None = None
        match kind:
            case "text":
                parts = [Part(convert(document.source, TextSourceField, path=path, ignored=self.ignored).data)]
            case "content":
                source = convert(document.source, ContentSourceField, path=path, ignored=self.ignored)
                parts, control = self._read_list(source.content, f"{path}.content", ("text", "image"))
            case _:
                raise InvalidRequest(
                    f"{path}.type: documents of type text and content are supported, not {kind!r}: send the text of a"
                    " PDF file.",
                    param=f"{path}.type",
                )
        heading = [
            f"{name}: {text}" for name, text in (("Title", document.title), ("Context", document.context)) if text
        ]
        return [Part("\n".join(["<document>", *heading])), *parts, Part("</document>")], control

    def _search_result(self, given: Any, path: str) -> tuple[list[Part], CacheControl | None]:
        found = convert(given, SearchResultField, path=path, ignored=self.ignored)
        self._report_citations(found.citations, path)
        heading = f"<search_result>\nTitle: {found.title}\nSource: {found.source}"
        parts, control = self._read_list(found.content, f"{path}.content", ("text",))
        return [Part(heading), *parts, Part("</search_result>")], control

    def _report_citations(self, citations: dict[str, Any] | None, path: str) -> None:
        if citations is not None and citations.get("enabled"):
            self.ignored.append(f"{path}.citations")
