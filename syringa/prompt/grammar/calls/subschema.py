"""Parts of a schema as schemas of their own: their references lead to the whole, which comes along."""

from __future__ import annotations

import json
from typing import Any

from syringa.prompt.grammar.calls.section import json_value
from syringa.schema_types import Types

_HOME = "#/$defs/arguments"


class Subschemas:
    """Of one schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._moved: Any = None

    def of(self, schema: Any, types: Types | None) -> Any:
        """A part of the root as a schema, held to some types."""
        if types is not None:
            schema = {"type": sorted(types), "allOf": [schema]}
        if '"$ref"' not in json.dumps(schema):
            return schema
        if self._moved is None:
            self._moved = _moved(self._root)
        return {**_moved(schema), "$defs": {"arguments": self._moved}}

    @staticmethod
    def lark(schema: Any) -> str:
        return json_value(schema)


def _moved(schema: Any) -> Any:
    """With references to where the root will be."""
    if isinstance(schema, list):
        return [_moved(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(each) for key, each in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = _HOME + reference[1:]
    return moved
