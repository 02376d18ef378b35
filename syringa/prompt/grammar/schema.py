"""Preparation of JSON schemas for grammars: what llguidance cannot enforce is reported and removed.

The tables describe llguidance 1.9; `tests/prompt/grammar/test_schema.py` checks each entry against the installed
version. Whether a schema can be compiled within the server's limits is found out by the grammar probe, not here.
"""

from __future__ import annotations

import json
import re
from collections import deque
from typing import Any

from syringa.errors import InvalidRequest
from syringa.prompt.grammar.schema_disjoint import DisjointChecker
from syringa.prompt.grammar.schema_path import ROOT, SchemaPath, resolve_pointer
from syringa.prompt.grammar.schema_recursion import check_recursion
from syringa.prompt.grammar.validation import validate_grammar
from syringa.types import Grammar

# Keywords with the type of value that they constrain; None: any.
UNENFORCED_KEYWORDS: dict[str, str | None] = {
    "uniqueItems": "array",
    "contains": "array",
    "minContains": "array",
    "maxContains": "array",
    "unevaluatedItems": "array",
    "propertyNames": "object",
    "dependentRequired": "object",
    "dependentSchemas": "object",
    "dependencies": "object",
    "unevaluatedProperties": "object",
    "not": None,
    "if": None,
    "then": None,
    "else": None,
    "$dynamicRef": None,
    "$recursiveRef": None,
    "$dynamicAnchor": None,
    "$recursiveAnchor": None,
}
ENFORCED_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
# Keywords that llguidance enforces, or that constrain nothing. All others are unknown.
SUPPORTED_KEYWORDS = frozenset(
    re.findall(
        r"\S+",
        """
        $schema $id id $ref $anchor $defs definitions $comment $vocabulary
        type enum const allOf anyOf oneOf
        properties patternProperties additionalProperties required minProperties maxProperties
        items prefixItems additionalItems minItems maxItems
        pattern format minLength maxLength minimum maximum exclusiveMinimum exclusiveMaximum multipleOf
        title description default examples example deprecated readOnly writeOnly discriminator
        contentEncoding contentMediaType contentSchema
        """,
    )
)

_ALL_KEYWORDS = SUPPORTED_KEYWORDS | UNENFORCED_KEYWORDS.keys()
_MAPS_OF_SCHEMAS = ("properties", "patternProperties")  # objects whose values are schemas
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE_SCHEMAS = ("additionalProperties", "items", "additionalItems")
_DEFINITIONS = ("$defs", "definitions")
# What the regex engine may reject: look-around, word boundaries, back-references, inner anchors.
_SUSPECT_PATTERN = re.compile(r"\(\?<?[=!]|\\[bBkG1-9]|.\^|\$.", re.DOTALL)
_REGEX_ERRORS = ("look-around", "lookarounds", "backreferences")
# Suspect patterns are parsed, which takes up to 0.1 ms a character. Beyond these bounds they count as unsupported.
_MAX_PARSED_PATTERNS = 64
_MAX_PARSED_CHARACTERS = 4_000
MAX_NODES = 5_000  # subschemas
MAX_OPTIONAL_PROPERTIES = 400  # properties of one object; llguidance tracks them all, and fails near 500
_MAX_UNKNOWN = 1_000
_MAX_DEPTH = 128  # the depth limit of llguidance's JSON parser
_GUIDANCE_OPTIONS = "x-guidance"  # options of llguidance, which could weaken the schema


def enforceable_schema(schema: Any) -> tuple[Any, list[str], list[str]]:
    """Return a copy without what cannot be enforced, the paths of what was removed, and the paths of unknown keywords.

    Raises `InvalidRequest`, with a path in the schema as `param`, for a schema that is too large, or refers to itself
    without end.
    """
    sanitizer = _SchemaSanitizer(schema)
    sanitizer.run()
    check_recursion(sanitizer.root)
    sanitizer.replace_one_ofs()
    return sanitizer.root, sanitizer.removed, sanitizer.unknown


def close_objects(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with undeclared properties forbidden in every part that declares some and not these.

    Unlike `close_schema`, this may leave no valid value: where `allOf` combines objects, none may have the properties
    of another one.
    """
    result = dict(schema)
    for key in (*_MAPS_OF_SCHEMAS, *_DEFINITIONS):
        if isinstance(schema.get(key), dict):
            result[key] = {name: _close_inner(each) for name, each in schema[key].items()}
    for key in (*_LISTS_OF_SCHEMAS, *_SINGLE_SCHEMAS):
        value = schema.get(key)
        if isinstance(value, list):
            result[key] = [_close_inner(each) for each in value]
        elif isinstance(value, dict):
            result[key] = close_objects(value)
    if any(isinstance(schema.get(key), dict) for key in _MAPS_OF_SCHEMAS):
        result.setdefault("additionalProperties", False)
    return result


def _close_inner(schema: Any) -> Any:
    return close_objects(schema) if isinstance(schema, dict) else schema


class _SchemaSanitizer:
    """Traversal of all subschemas reachable from the root; an unused definition constrains nothing."""

    def __init__(self, schema: Any) -> None:
        try:
            self.root = json.loads(json.dumps(schema, allow_nan=False))
        except (ValueError, RecursionError):
            raise InvalidRequest(
                "the schema is nested too deeply, or has a number that is too large.", param=""
            ) from None
        self.removed: list[str] = []
        self.unknown: list[str] = []
        self._one_ofs: list[tuple[dict[str, Any], SchemaPath]] = []
        self._queue: deque[tuple[Any, SchemaPath]] = deque([(self.root, ROOT)])
        self._seen: set[int] = set()
        self._parsed_patterns = self._parsed_characters = 0

    def run(self) -> None:
        while self._queue:
            node, path = self._queue.popleft()
            if isinstance(node, dict) and id(node) not in self._seen:
                self._seen.add(id(node))
                self._check_limits(node, path)
                self._remove_unenforceable(node, path)
                self._visit_children(node, path)

    def _check_limits(self, node: dict[str, Any], path: SchemaPath) -> None:
        if len(self._seen) > MAX_NODES:
            raise InvalidRequest(f"the schema has more than {MAX_NODES} parts.", param="")
        if path.depth > _MAX_DEPTH:
            raise InvalidRequest("the schema is nested too deeply.", param="")
        optional = len(_keys(node, "properties") - _keys(node, "required"))
        if optional > MAX_OPTIONAL_PROPERTIES:
            raise InvalidRequest(
                f"at most {MAX_OPTIONAL_PROPERTIES} properties can be optional, got {optional}.",
                param=f"{path}.properties",
            )

    def _remove_unenforceable(self, node: dict[str, Any], path: SchemaPath) -> None:
        unenforced = [key for key in node if key in UNENFORCED_KEYWORDS]
        self.removed += [str(path.child(f".{key}")) for key in unenforced if _constrains(node, key)]
        unknown = [key for key in node if key not in _ALL_KEYWORDS and key[:2] != "x-"]
        if len(self.unknown) + len(unknown) > _MAX_UNKNOWN:
            raise InvalidRequest(f"the schema has more than {_MAX_UNKNOWN} unknown keywords.", param="")
        self.unknown += [str(path.child(f".{key}")) for key in unknown]
        if _GUIDANCE_OPTIONS in node:
            unenforced.append(_GUIDANCE_OPTIONS)
            self.removed.append(f"{path}.{_GUIDANCE_OPTIONS}")
        form = node.get("format")
        if isinstance(form, str) and form not in ENFORCED_FORMATS:
            unenforced.append("format")
            self.removed += [f"{path}.format"] if _applies(node, "string") else []
        if isinstance(node.get("pattern"), str) and self._is_unsupported_pattern(node["pattern"]):
            unenforced.append("pattern")
            self.removed += [f"{path}.pattern"] if _applies(node, "string") else []
        by_pattern = node.get("patternProperties")
        for pattern in list(by_pattern) if isinstance(by_pattern, dict) else []:
            if self._is_unsupported_pattern(pattern):
                del node["patternProperties"][pattern]
                self.removed.append(str(path.child(".patternProperties").child(f".{pattern}")))
        # llguidance counts properties only if no named property is optional.
        if not _keys(node, "properties") <= _keys(node, "required"):
            for key in ("minProperties", "maxProperties"):
                if key in node:
                    unenforced.append(key)
                    self.removed.append(f"{path}.{key}")
        for key in unenforced:
            del node[key]

    def _visit_children(self, node: dict[str, Any], path: SchemaPath) -> None:
        for key in _MAPS_OF_SCHEMAS:
            if isinstance(node.get(key), dict):
                inner = path.child(f".{key}")
                self._queue += [(each, inner.child(f".{name}")) for name, each in node[key].items()]
        for key in (*_LISTS_OF_SCHEMAS, "items"):
            if isinstance(node.get(key), list):
                self._queue += [(each, path.child(f".{key}[{index}]")) for index, each in enumerate(node[key])]
        self._queue += [(node[key], path.child(f".{key}")) for key in _SINGLE_SCHEMAS if key in node]
        if isinstance(node.get("oneOf"), list) and node["oneOf"]:
            self._one_ofs.append((node, path))
        if isinstance(node.get("$ref"), str):
            self._visit_reference(node["$ref"])

    def _visit_reference(self, reference: str) -> None:
        if reference == "#":
            return
        if reference.startswith("#/"):
            self._queue.append(resolve_pointer(self.root, reference))
            return
        # A reference by anchor or URI may lead to any definition.
        for key in _DEFINITIONS:
            if isinstance(self.root, dict) and isinstance(self.root.get(key), dict):
                self._queue += [(each, ROOT.child(f".{key}.{name}")) for name, each in self.root[key].items()]

    def _is_unsupported_pattern(self, pattern: str) -> bool:
        if not _SUSPECT_PATTERN.search(pattern):
            return False
        self._parsed_patterns += 1
        self._parsed_characters += len(pattern)
        if self._parsed_patterns > _MAX_PARSED_PATTERNS or self._parsed_characters > _MAX_PARSED_CHARACTERS:
            return True
        message = _parse_error(pattern)
        return any(each in message for each in _REGEX_ERRORS)

    def replace_one_ofs(self) -> None:
        """Replace each `oneOf` by an `anyOf`, which is weaker only if its alternatives overlap."""
        checker = DisjointChecker(self.root)
        self.removed += [f"{path}.oneOf" for node, path in self._one_ofs if not checker.are_disjoint(node["oneOf"])]
        for node, _ in self._one_ofs:
            _to_any_of(node)


def _constrains(node: dict[str, Any], key: str) -> bool:
    """Return whether the schema is weaker without the keyword."""
    kind, value = UNENFORCED_KEYWORDS[key], node[key]
    if kind is not None and not _applies(node, kind):
        return False
    match key:
        case "uniqueItems" | "not":
            return value is not False
        case "minContains" | "maxContains":
            return "contains" in node
        case "if":
            return "then" in node or "else" in node
        case "then" | "else":
            return "if" in node
        case "$dynamicAnchor" | "$recursiveAnchor":
            return False
        case "$dynamicRef" | "$recursiveRef" | "contains":
            return True
    return value is not True and value != {}


def _applies(node: dict[str, Any], kind: str) -> bool:
    declared = node.get("type")
    return declared is None or declared == kind or (isinstance(declared, list) and kind in declared)


def _keys(node: dict[str, Any], key: str) -> set[str]:
    found = node.get(key)
    return {each for each in found if isinstance(each, str)} if isinstance(found, dict | list) else set()


def _to_any_of(node: dict[str, Any]) -> None:
    alternatives = {"anyOf": node.pop("oneOf")}
    if "anyOf" in node:
        alternatives = {"allOf": [*node.get("allOf", []), alternatives]}
    node.update(alternatives)


def _parse_error(pattern: str) -> str:
    """Return what is wrong with a pattern, or an empty string."""
    try:
        validate_grammar(Grammar("json_schema", json.dumps({"type": "string", "pattern": pattern})))
    except InvalidRequest as error:
        return error.message
    return ""
