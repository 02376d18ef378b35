"""What a wire type says of its fields beyond their types: the published schema and docs/parameters.md come from it."""

from __future__ import annotations

from typing import Any

from msgspec import Meta

DEFAULT = "x-default"
REFUSED = "x-syringa-refused"
IGNORED = "x-syringa-ignored"


def says(text: str, default: Any = None, **schema: Any) -> Meta:
    """A field's description, and the default that an absent one has. `schema` is more JSON schema."""
    extra = schema if default is None else schema | {DEFAULT: default}
    return Meta(description=text, extra_json_schema=extra or None)


def refused(text: str, **schema: Any) -> Meta:
    """The description of a field that gets a 400 wherever it would change the answer."""
    return says(text, **{REFUSED: True}, **schema)


def unheeded(text: str, **schema: Any) -> Meta:
    """The description of a field that is known and makes no difference: where it asks for one, the answer names it."""
    return says(text, **{IGNORED: True}, **schema)


def nullable(*alternatives: dict[str, Any]) -> dict[str, Any]:
    """The schema of a field whose type is checked by hand: any of these, or null."""
    return {"anyOf": [*alternatives, {"type": "null"}]}


def record(required: tuple[str, ...] = (), **properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object."""
    return {"type": "object", "properties": properties} | ({"required": list(required)} if required else {})
