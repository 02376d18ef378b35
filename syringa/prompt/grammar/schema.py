"""JSON schemas on their way into a grammar: what llguidance cannot enforce is found, named, and left out.

The tables say what llguidance 1.9 was seen to do; `tests/prompt/test_schema.py` tries each entry on the installed one.
Two things depend on more than a keyword, and are found here by compiling: patterns, and whether the alternatives of a
`oneOf` can overlap.
"""

from __future__ import annotations

import json
import re
from collections import deque
from typing import Any

from syringa.errors import InvalidRequest
from syringa.prompt.grammar.schema_overlap import check_overlap
from syringa.prompt.grammar.schema_path import ROOT, SchemaPath, resolve
from syringa.prompt.grammar.validation import validate_grammar
from syringa.types import Grammar

# Each keyword with the type of value that it binds; None: any.
UNENFORCED: dict[str, str | None] = {
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
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
# Keywords that llguidance enforces, or that bind nothing. Any other word in a schema is one that nobody knows.
KNOWN = frozenset(
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

_WORDS = KNOWN | UNENFORCED.keys()
_NAMED = ("properties", "patternProperties")  # objects whose values are schemas
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("additionalProperties", "items", "additionalItems")
_DEFINED = ("$defs", "definitions")
# Patterns that may hold what the regex engine refuses: look-around, word boundaries, references back, anchors inside.
_SUSPECT = re.compile(r"\(\?<?[=!]|\\[bBkG1-9]|.\^|\$.", re.DOTALL)
_BEYOND_REGEX = ("look-around", "lookarounds", "backreferences")
# Compiling takes some 0.1 ms. Past this many, a suspect is taken for what it looks like.
_MOST_TRIES = 64
_MOST_TRIED = 50_000  # parts, in all tries of a whole schema
MOST_NODES = 5_000  # schemas in one
MOST_OPTIONAL = 400  # properties of one object; llguidance keeps them all in mind, and gives up near 500
_MOST_UNKNOWN = 1_000
_DEEPEST = 128  # as deep as llguidance reads JSON
_OPTIONS = "x-guidance"  # llguidance's own options, which could loosen the schema


def enforceable_schema(schema: Any) -> tuple[Any, list[str], list[str]]:
    """A copy without what cannot be enforced; the paths of that; and the paths of keywords that nobody knows.

    Raises `InvalidRequest`, with a path in the schema as `param`, for one that would be too much to compile.
    """
    walk = _Walk(schema)
    walk.run()
    check_overlap(walk.root)
    walk.loosen()
    return walk.root, walk.left_out, walk.unknown


class _Walk:
    """Goes through every schema that the root reaches, and only those: an unused definition binds nothing."""

    def __init__(self, schema: Any) -> None:
        try:
            self.root = json.loads(json.dumps(schema, allow_nan=False))
        except (ValueError, RecursionError):
            raise InvalidRequest(
                "the schema is nested too deeply, or has a number that is too large.", param=""
            ) from None
        self.left_out: list[str] = []
        self.unknown: list[str] = []
        self._one_ofs: list[tuple[dict[str, Any], SchemaPath]] = []
        self._queue: deque[tuple[Any, SchemaPath]] = deque([(self.root, ROOT)])
        self._seen: set[int] = set()
        self._tries = 0

    def run(self) -> None:
        while self._queue:
            node, trail = self._queue.popleft()
            if isinstance(node, dict) and id(node) not in self._seen:
                self._seen.add(id(node))
                self._bound(node, trail)
                self._leave_out(node, trail)
                self._follow(node, trail)

    def _bound(self, node: dict[str, Any], trail: SchemaPath) -> None:
        if len(self._seen) > MOST_NODES:
            raise InvalidRequest(f"the schema has more than {MOST_NODES} parts.", param="")
        if trail.depth > _DEEPEST:
            raise InvalidRequest("the schema is nested too deeply.", param="")
        optional = len(_keys(node, "properties") - _keys(node, "required"))
        if optional > MOST_OPTIONAL:
            raise InvalidRequest(
                f"at most {MOST_OPTIONAL} properties can be optional, got {optional}.", param=f"{trail}.properties"
            )

    def _leave_out(self, node: dict[str, Any], trail: SchemaPath) -> None:
        gone = [key for key in node if key in UNENFORCED]
        self.left_out += [str(trail.to(f".{key}")) for key in gone if _binds(node, key)]
        unknown = [key for key in node if key not in _WORDS and key[:2] != "x-"]
        if len(self.unknown) + len(unknown) > _MOST_UNKNOWN:
            raise InvalidRequest(f"the schema has more than {_MOST_UNKNOWN} keywords that nobody knows.", param="")
        self.unknown += [str(trail.to(f".{key}")) for key in unknown]
        if _OPTIONS in node:
            gone.append(_OPTIONS)
            self.left_out.append(f"{trail}.{_OPTIONS}")
        form = node.get("format")
        if isinstance(form, str) and form not in FORMATS:
            gone.append("format")
            self.left_out += [f"{trail}.format"] if _applies(node, "string") else []
        if isinstance(node.get("pattern"), str) and self._is_beyond_regex(node["pattern"]):
            gone.append("pattern")
            self.left_out += [f"{trail}.pattern"] if _applies(node, "string") else []
        by_pattern = node.get("patternProperties")
        for pattern in list(by_pattern) if isinstance(by_pattern, dict) else []:
            if self._is_beyond_regex(pattern):
                del node["patternProperties"][pattern]
                self.left_out.append(str(trail.to(".patternProperties").to(f".{pattern}")))
        # llguidance counts properties only where none of the named ones is optional.
        if not _keys(node, "properties") <= _keys(node, "required"):
            for key in ("minProperties", "maxProperties"):
                if key in node:
                    gone.append(key)
                    self.left_out.append(f"{trail}.{key}")
        for key in gone:
            del node[key]

    def _follow(self, node: dict[str, Any], trail: SchemaPath) -> None:
        for key in _NAMED:
            if isinstance(node.get(key), dict):
                inner = trail.to(f".{key}")
                self._queue += [(each, inner.to(f".{name}")) for name, each in node[key].items()]
        for key in (*_LISTED, "items"):
            if isinstance(node.get(key), list):
                self._queue += [(each, trail.to(f".{key}[{index}]")) for index, each in enumerate(node[key])]
        self._queue += [(node[key], trail.to(f".{key}")) for key in _SINGLE if key in node]
        if isinstance(node.get("oneOf"), list) and len(node["oneOf"]) > 1:
            self._one_ofs.append((node, trail))
        if isinstance(node.get("$ref"), str):
            self._follow_reference(node["$ref"])

    def _follow_reference(self, reference: str) -> None:
        if reference == "#":
            return
        if reference.startswith("#/"):
            self._queue.append(resolve(self.root, reference))
            return
        # By an anchor or an address: it could be any of the definitions.
        for key in _DEFINED:
            if isinstance(self.root, dict) and isinstance(self.root.get(key), dict):
                self._queue += [(each, ROOT.to(f".{key}.{name}")) for name, each in self.root[key].items()]

    def _is_beyond_regex(self, pattern: str) -> bool:
        if not _SUSPECT.search(pattern):
            return False
        self._tries += 1
        if self._tries > _MOST_TRIES:
            return True
        said = _complaint({"type": "string", "pattern": pattern})
        return any(each in said for each in _BEYOND_REGEX)

    def loosen(self) -> None:
        """A `oneOf` whose alternatives may overlap becomes an `anyOf`."""
        if not self._one_ofs or "oneOf" not in _complaint(self.root):
            return
        tries = len(self._one_ofs)
        few = self._one_ofs if tries <= _MOST_TRIES and tries * len(self._seen) <= _MOST_TRIED else []
        for node, trail in [each for each in few if self._overlaps(each[0])] or self._one_ofs:
            _to_any_of(node)
            self.left_out.append(f"{trail}.oneOf")

    def _overlaps(self, node: dict[str, Any]) -> bool:
        """Whether llguidance refuses this `oneOf` when it is the only one."""
        others = [(each, dict(each)) for each, _ in self._one_ofs if each is not node]
        for each, _ in others:
            _to_any_of(each)
        refused = "oneOf" in _complaint(self.root)
        for each, before in others:
            each.clear()
            each.update(before)
        return refused


def _binds(node: dict[str, Any], key: str) -> bool:
    """Whether leaving the keyword out would let through what the schema forbids."""
    kind, value = UNENFORCED[key], node[key]
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


def _complaint(schema: Any) -> str:
    try:
        validate_grammar(Grammar("json_schema", json.dumps(schema)))
    except InvalidRequest as error:
        return error.message
    return ""
