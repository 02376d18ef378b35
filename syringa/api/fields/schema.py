"""Annotations of wire types beyond their Python types. /openapi.json and docs/parameters.md are generated from them."""

from __future__ import annotations

from typing import Any

from msgspec import Meta

DEFAULT = "x-default"
REFUSED = "x-syringa-refused"
IGNORED = "x-syringa-ignored"


def doc(text: str, default: Any = None, **schema: Any) -> Meta:
    """Annotate a field with its description and its effective default. `schema` is merged into its JSON schema."""
    extra = schema if default is None else schema | {DEFAULT: default}
    return Meta(description=text, extra_json_schema=extra or None)


def refused_field(text: str, **schema: Any) -> Meta:
    """Annotate a field that is refused with a 400 wherever it would change the output."""
    return doc(text, **{REFUSED: True}, **schema)


def ignored_field(text: str, **schema: Any) -> Meta:
    """Annotate a field that is accepted and has no effect; a value that asks for one is reported as ignored."""
    return doc(text, **{IGNORED: True}, **schema)


def nullable(*alternatives: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a field that is validated by hand: any of the alternatives, or null."""
    return {"anyOf": [*alternatives, {"type": "null"}]}


def object_schema(required: tuple[str, ...] = (), **properties: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of an object with these properties."""
    return {"type": "object", "properties": properties} | ({"required": list(required)} if required else {})
