"""Bounds on the subschemas of a JSON schema that apply to one value together, which llguidance does not have.

llguidance intersects the regular expressions that apply to one string, and the cost triples with each. A schema set
contains the subschemas that apply to one value: a schema, the target of its `$ref`, its `allOf`, and one alternative of
each `anyOf` and `oneOf`. Each property and item of a set leads to the set of what they all require of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

from syringa.errors import InvalidRequest
from syringa.prompt.grammar.schema_path import ROOT, SchemaPath, resolve_pointer

MAX_PATTERNS = 6  # and formats, for one string
MAX_KEY_PATTERNS = 32  # for one object; llguidance compares all pairs
_MAX_WORK = 100_000  # steps of this search
_MAX_ALTERNATIVES = 256  # of several `anyOf` that are kept separate
_ALTERNATIVES = ("anyOf", "oneOf")

SchemaSet = frozenset[int]  # ids of the schema objects, which live as long as their root


def check_overlap(root: Any) -> None:
    """Raise `InvalidRequest`, with the path as `param`, for too many patterns on one value or endless recursion."""
    try:
        _OverlapChecker(root).run()
    except RecursionError:
        raise InvalidRequest("the schema is nested too deeply.", param="") from None


class _OverlapChecker:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._nodes: dict[int, dict[str, Any]] = {}
        self._expanded: dict[int, list[SchemaSet]] = {}
        self._open: list[int] = []
        self._paths: dict[SchemaSet, SchemaPath] = {}
        # For each set, and each of its alternatives, the sets of required properties and items.
        self._needs: dict[SchemaSet, list[list[SchemaSet]]] = {}
        self._work = 0

    def run(self) -> None:
        if _has_external_references(self._root):
            self._check_all_patterns()
        queue: deque[SchemaSet] = deque()
        start = self._schema_set([self._root], ROOT, queue)
        while queue:
            schema_set = queue.popleft()
            path = self._paths[schema_set]
            alternatives = self._alternatives(schema_set)
            if not alternatives:
                raise InvalidRequest("the schema refers to itself, and to nothing else.", param=str(path))
            self._needs[schema_set] = [self._visit(each, path, queue) for each in alternatives]
        self._check_finite(start)

    def _schema_set(self, schemas: Iterable[Any], path: SchemaPath, queue: deque[SchemaSet]) -> SchemaSet:
        """Return the set of these schemas, and queue it if it is new."""
        found = [schema for schema in schemas if isinstance(schema, dict)]
        self._nodes.update((id(each), each) for each in found)
        schema_set = frozenset(map(id, found))
        if schema_set not in self._paths:
            self._paths[schema_set] = path
            queue.append(schema_set)
        return schema_set

    def _alternatives(self, schema_set: SchemaSet) -> list[SchemaSet]:
        return self._cross([self._expand(self._nodes[each])[0] for each in schema_set])

    def _expand(self, node: Any) -> tuple[list[SchemaSet], bool]:
        """Return the alternative sets of a schema, and whether they are complete.

        There are none if it only leads back to itself. They are incomplete while a schema is being expanded.
        """
        if not isinstance(node, dict):
            return [frozenset()], True
        key = id(node)
        self._nodes[key] = node
        if key in self._expanded:
            return self._expanded[key], True
        if key in self._open:
            return [], False
        self._charge()
        self._open.append(key)
        complete_so_far = True
        groups: list[list[SchemaSet]] = [[frozenset((key,))]]
        for choices in self._parts(node):
            group: list[SchemaSet] = []
            for each in choices:
                found, complete = self._expand(each)
                group += found
                complete_so_far = complete_so_far and complete
            groups.append(group)
        self._open.pop()
        result = self._cross(groups)
        if complete_so_far or not self._open:
            self._expanded[key] = result
        return result, complete_so_far

    def _parts(self, node: dict[str, Any]) -> Iterator[list[Any]]:
        """Yield the groups of schemas that apply with a schema; of each group, one alternative applies."""
        yield from ([each] for each in _list_at(node, "allOf"))
        yield from (group for key in _ALTERNATIVES if (group := _list_at(node, key)))
        reference = node.get("$ref")
        if reference == "#":
            yield [self._root]
        elif isinstance(reference, str) and reference.startswith("#/"):
            yield [resolve_pointer(self._root, reference)[0]]

    def _cross(self, groups: list[list[SchemaSet]]) -> list[SchemaSet]:
        count = 1
        for group in groups:
            count *= len(group)
        if count > _MAX_ALTERNATIVES and sum(len(group) > 1 for group in groups) > 1:
            return [frozenset().union(*(each for group in groups for each in group))]
        self._charge(count)
        return list(dict.fromkeys(frozenset().union(*each) for each in product(*groups)))

    def _visit(self, together: SchemaSet, path: SchemaPath, queue: deque[SchemaSet]) -> list[SchemaSet]:
        """Check schemas that apply together, queue the sets below, and return those that are required."""
        self._charge(len(together))
        nodes = [self._nodes[each] for each in together]
        if len(_patterns_and_formats(nodes)) > MAX_PATTERNS:
            raise InvalidRequest(
                f"at most {MAX_PATTERNS} patterns and formats can apply to one string, got "
                f"{len(_patterns_and_formats(nodes))}.",
                param=str(path),
            )
        keys = {key for node in nodes for key in _dict_at(node, "patternProperties")}
        if len(keys) > MAX_KEY_PATTERNS:
            raise InvalidRequest(
                f"at most {MAX_KEY_PATTERNS} patternProperties can apply to one object, got {len(keys)}.",
                param=str(path),
            )
        needed = []
        required = _required(nodes)
        for name in dict.fromkeys(name for node in nodes for name in _dict_at(node, "properties")):
            self._charge(len(nodes))
            schemas = (each for node in nodes for each in _of_property(node, name))
            schema_set = self._schema_set(schemas, path.child(".properties").child(f".{name}"), queue)
            needed += [schema_set] if name in required else []
        for key in keys:
            schemas = (each for node in nodes for each in _of_pattern(node, key, alone=len(nodes) == 1))
            self._schema_set(schemas, path.child(".patternProperties").child(f".{key}"), queue)
        if any("additionalProperties" in node for node in nodes):
            self._schema_set(map(_additional, nodes), path.child(".additionalProperties"), queue)
        listed, least = max(map(len, map(_prefix, nodes)), default=0), _min_items(nodes)
        for index in range(listed + 1):
            self._charge(len(nodes))
            step = f".prefixItems[{index}]" if index < listed else ".items"
            schema_set = self._schema_set((_item(node, index) for node in nodes), path.child(step), queue)
            needed += [schema_set] if index < least else []
        return needed

    def _check_finite(self, start: SchemaSet) -> None:
        """Check that a value of finite size exists."""
        finite: set[SchemaSet] = set()
        users: dict[SchemaSet, list[SchemaSet]] = {}
        for schema_set, alternatives in self._needs.items():
            for each in alternatives:
                for need in each:
                    users.setdefault(need, []).append(schema_set)
        stack = list(self._needs)
        while stack:
            schema_set = stack.pop()
            if schema_set not in finite and any(
                all(need in finite for need in each) for each in self._needs[schema_set]
            ):
                finite.add(schema_set)
                stack += users.get(schema_set, ())
        seen: set[SchemaSet] = set()
        schema_set = start
        while schema_set not in finite and schema_set not in seen:
            seen.add(schema_set)
            schema_set = next(need for need in self._needs[schema_set][0] if need not in finite)
        if schema_set not in finite:
            raise InvalidRequest("the schema refers to itself without end.", param=str(self._paths[schema_set]))

    def _check_all_patterns(self) -> None:
        """Check all patterns together: references by anchor or URI are not followed and may lead to any part."""
        nodes = list(_dictionaries(self._root))
        if len(_patterns_and_formats(nodes)) > MAX_PATTERNS:
            raise InvalidRequest(
                f"a schema with more than {MAX_PATTERNS} patterns and formats can refer to its parts only as in "
                "#/$defs/name.",
                param="",
            )

    def _charge(self, work: int = 1) -> None:
        self._work += work
        if self._work > _MAX_WORK:
            raise InvalidRequest("the schema has too many combinations.", param="")


def _patterns_and_formats(nodes: Iterable[dict[str, Any]]) -> set[tuple[str, str]]:
    """Return the distinct patterns and formats."""
    return {(key, node[key]) for node in nodes for key in ("pattern", "format") if isinstance(node.get(key), str)}


def _of_property(node: dict[str, Any], name: str) -> list[Any]:
    """Return what a schema may require of a property, whose name may match any of the patterns."""
    named = _dict_at(node, "properties")
    patterns = list(_dict_at(node, "patternProperties").values())
    return [named[name], *patterns] if name in named else [_additional(node), *patterns]


def _of_pattern(node: dict[str, Any], key: str, *, alone: bool) -> list[Any]:
    patterns = _dict_at(node, "patternProperties")
    if key in patterns and alone:
        return [patterns[key]]  # patterns of one schema are disjoint, or llguidance rejects it
    return [*patterns.values(), _additional(node)]


def _additional(node: dict[str, Any]) -> Any:
    return node.get("additionalProperties")


def _prefix(node: dict[str, Any]) -> list[Any]:
    return _list_at(node, "prefixItems") or _list_at(node, "items")


def _item(node: dict[str, Any], index: int) -> Any:
    prefix = _prefix(node)
    if index < len(prefix):
        return prefix[index]
    return node.get("additionalItems") if isinstance(node.get("items"), list) else node.get("items")


def _required(nodes: list[dict[str, Any]]) -> set[str]:
    """Return the required properties, if the value must be an object."""
    if not any(_is_only(node, "object") for node in nodes):
        return set()
    return {name for node in nodes for name in _list_at(node, "required") if isinstance(name, str)}


def _min_items(nodes: list[dict[str, Any]]) -> int:
    """Return the minimum number of items, if the value must be an array."""
    if not any(_is_only(node, "array") for node in nodes):
        return 0
    return max((node["minItems"] for node in nodes if type(node.get("minItems")) is int), default=0)


def _is_only(node: dict[str, Any], kind: str) -> bool:
    return node.get("type") in (kind, [kind])


def _has_external_references(root: Any) -> bool:
    """Return whether some reference is not a pointer into the root."""
    old = isinstance(root, dict) and "draft-04" in str(root.get("$schema", ""))
    for node in _dictionaries(root):
        reference = node.get("$ref")
        if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
            return True
        # Pointers in a subschema with a URI of its own start there.
        if node is not root and isinstance(node.get("id" if old else "$id"), str):
            return True
    return False


def _dictionaries(root: Any) -> Iterator[dict[str, Any]]:
    stack = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            yield node
            stack += node.values()
        elif isinstance(node, list):
            stack += node


def _dict_at(node: dict[str, Any], key: str) -> dict[str, Any]:
    found = node.get(key)
    return found if isinstance(found, dict) else {}


def _list_at(node: dict[str, Any], key: str) -> list[Any]:
    found = node.get(key)
    return found if isinstance(found, list) else []
