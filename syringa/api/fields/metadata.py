"""`metadata`: pairs that a client keeps with what it asks for."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from syringa.errors import InvalidRequest

MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512
_SCHEMA = {
    "propertyNames": {"maxLength": MAX_KEY},
    "maxProperties": MAX_PAIRS,
    "additionalProperties": {"type": "string", "maxLength": MAX_VALUE},
}
MetadataField = Annotated[dict[str, Any], Meta(extra_json_schema=_SCHEMA)] | None


def check_metadata(given: dict[str, Any]) -> None:
    if len(given) > MAX_PAIRS:
        raise InvalidRequest(f"metadata: at most {MAX_PAIRS} pairs, got {len(given)}.", param="metadata")
    for key, value in given.items():
        param = f"metadata.{key}"
        if len(key) > MAX_KEY or not isinstance(value, str) or len(value) > MAX_VALUE:
            said = f"a key of at most {MAX_KEY} characters with a string of at most {MAX_VALUE}"
            raise InvalidRequest(f"{param}: expected {said}.", param=param)
