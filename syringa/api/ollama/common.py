"""What the endpoints of Ollama's API share: names of models, `keep_alive`, timestamps, and names of fields."""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from syringa.api.fields.schema import doc, nullable
from syringa.errors import InvalidRequest, NotFound, SyringaError

T = TypeVar("T")

VERSION = "0.14.0"  # of Ollama, whose API this is; clients compare it with the version that they need
LATEST = ":latest"

_DURATION = re.compile(r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:ns|us|µs|μs|ms|s|m|h))+|[+-]?[0-9]+(?:\.[0-9]*)?")
_MAX_DURATION = 64  # characters: the time to match grows with their square
_PART = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_SCHEMES = ("https://", "http://")
# Parts with a slash in between, and a tag. None of them is `..`, or begins like a path or a flag.
_NAME = re.compile(r"(?:\w[\w.-]*/)*\w[\w.-]*(?::\w[\w.-]*)?", re.ASCII)
_MAX_NAME = 200
# A Go template has actions such as `{{ .Prompt }}`, `{{ if`, `{{- range` and `{{ end }}`, which Jinja has not.
_GO_ACTION = re.compile(r"\{\{-?\s*(?:\.\w|\$|/\*|(?:if|range|with|end|else|block|define|template)\b)")
# Fields of other APIs under which the values of these endpoints are read, and their names here.
_FIELD_NAMES = {
    "json_schema": "format",
    "response_format": "format",
    "chat_template_kwargs.enable_thinking": "think",
    "reasoning_effort": "think",
    "chat_template": "template",
    "stop": "options.stop",
}

ModelField = Annotated[
    Annotated[str, Meta(min_length=1)], doc("A model of `/api/tags`, with or without `:latest`, or an alias of one.")
]
KeepAliveField = Annotated[
    Any,
    doc(
        "How long the model stays in memory when idle: seconds, or a duration such as `5m`; 0: unload it after the "
        "request; negative: keep it. With API keys, only an administrator's is honored, others are reported as "
        "ignored. Default: as configured.",
        **nullable(
            {"type": "number"}, {"type": "string", "pattern": f"^({_DURATION.pattern})$", "maxLength": _MAX_DURATION}
        ),
    ),
]
StreamField = Annotated[bool | None, doc("Stream the output as lines of JSON.", True)]


def parse_keep_alive(value: Any) -> float | None:
    """Return the seconds of `keep_alive`: infinite if it is negative, None if it is absent. Raises `InvalidRequest`."""
    if value is None:
        return None
    if isinstance(value, str) and len(value) <= _MAX_DURATION and _DURATION.fullmatch(value):
        parts = _PART.findall(value)
        seconds = math.fsum(float(number) * _UNITS[unit] for number, unit in parts) if parts else abs(float(value))
        negative = value.startswith("-")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        negative = value < 0
        try:
            seconds = abs(float(value))
        except OverflowError:
            seconds = math.inf
    else:
        message = f"keep_alive: expected seconds, or a duration such as 5m, not {str(value)[:40]!r}."
        raise InvalidRequest(message, param="keep_alive")
    return math.inf if negative and seconds else seconds


def timestamp(seconds: float | None = None) -> str:
    """Return a time, by default the current one, as Ollama writes it: RFC 3339 in UTC."""
    time = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return time.isoformat(timespec="microseconds")[:-6] + "Z"


def shown_name(id: str) -> str:
    """Return the name of a model in Ollama's lists, which always has a tag."""
    return id if ":" in id.rpartition("/")[2] else id + LATEST


def new_model_id(name: str, param: str = "model") -> str:
    """Return the id of a model that is added under a name of Ollama's. Raises `InvalidRequest` for an invalid name."""
    plain = next((name.removeprefix(each) for each in _SCHEMES if name.startswith(each)), name)
    if len(plain) > _MAX_NAME or ".." in plain or not _NAME.fullmatch(plain):
        raise InvalidRequest(
            f"invalid model name {_shorten(name)!r}: expected at most {_MAX_NAME} letters, digits and any of ._-, in "
            "parts with a slash in between, and a tag after a colon.",
            param=param,
        )
    return plain.removesuffix(LATEST)


def ids_of(name: str) -> tuple[str, ...]:
    """Return the ids that a name may stand for, the likeliest first: no tag means `:latest`."""
    other = name.removesuffix(LATEST) if name.endswith(LATEST) else name + LATEST
    return (name, other) if other and shown_name(name) == shown_name(other) else (name,)


async def find_model(find: Callable[[str], Awaitable[T]], name: str) -> T:
    """Return what `find` returns for the first id of a name that it knows. Raises `NotFound`."""
    for each in ids_of(name):
        try:
            return await find(each)
        except NotFound:
            continue
    raise model_not_found(name)


def model_not_found(name: str) -> NotFound:
    """Return the error for a name that no model has, in the words by which clients recognize it."""
    return NotFound(f"model '{_shorten(name)}' not found", param="model", code="model_not_found")


def check_template(source: str) -> None:
    """Raise `InvalidRequest` for a template in Go's language, which Ollama's own models have."""
    if _GO_ACTION.search(source):
        raise InvalidRequest(
            "template: this is a Go template, which is not supported: write it as a chat template in Jinja, or leave "
            "it out to use the model's own.",
            param="template",
        )


def renamed(paths: list[str]) -> Iterator[str]:
    """Return paths of fields under the names that they have in Ollama's API."""
    return map(_rename, paths)


def rename_error(error: SyringaError, names: Mapping[str, str] | None = None) -> None:
    """Give the field in an error the name that it has in Ollama's API: that in `names`, or that of all requests."""
    if error.param is None:
        return
    if (name := (names or {}).get(error.param) or _rename(error.param)) != error.param:
        error.message, error.param = error.message.replace(error.param, name, 1), name
    if name.startswith("format") and name not in error.message:  # error bodies have no field for it
        error.message = f"{name}: {error.message}"


def _shorten(name: str) -> str:
    return name if len(name) <= _MAX_NAME else name[:_MAX_NAME] + "…"


def _rename(path: str) -> str:
    for other, name in _FIELD_NAMES.items():
        if path == other or path.startswith((f"{other}.", f"{other}[")):
            return name + path[len(other) :]
    return path
