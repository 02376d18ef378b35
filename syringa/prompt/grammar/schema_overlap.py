"""What of a JSON schema holds at one place at once: found before llguidance compiles it, since it has no bound there.

Regular expressions that one string has to match are intersected, and the cost of that grows threefold with each. A
place is a set of schemas that all hold for one value: a schema, what it refers to, its `allOf`, and one alternative of
each `anyOf` and `oneOf`. From a place, a property or an item leads to the set of what all of these say of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

from syringa.errors import InvalidRequest
from syringa.prompt.grammar.schema_path import ROOT, SchemaPath, resolve

MOST_PATTERNS = 6  # with formats, for one string
MOST_KEY_PATTERNS = 32  # for one object; llguidance compares each with each
_MOST_WORK = 100_000  # steps of this search
_MOST_ALTERNATIVES = 256  # that are told apart, where several `anyOf` hold at once
_ALTERNATIVES = ("anyOf", "oneOf")

Place = frozenset[int]  # the ids of schemas, which live as long as their root


def check_overlap(root: Any) -> None:
    """Raises `InvalidRequest`, with the path as `param`, for a schema with too many patterns at one place, and for one
    that nothing can fit because it needs itself."""
    try:
        _Search(root).run()
    except RecursionError:
        raise InvalidRequest("the schema is nested too deeply.", param="") from None


class _Search:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._nodes: dict[int, dict[str, Any]] = {}
        self._expanded: dict[int, list[Place]] = {}
        self._open: list[int] = []
        self._trails: dict[Place, SchemaPath] = {}
        # Of each place, the places that one of its alternatives cannot do without.
        self._needs: dict[Place, list[list[Place]]] = {}
        self._work = 0

    def run(self) -> None:
        if _has_far_references(self._root):
            self._check_all_together()
        queue: deque[Place] = deque()
        start = self._place([self._root], ROOT, queue)
        while queue:
            place = queue.popleft()
            trail = self._trails[place]
            alternatives = self._alternatives(place)
            if not alternatives:
                raise InvalidRequest("the schema refers to itself, and to nothing else.", param=str(trail))
            self._needs[place] = [self._visit(each, trail, queue) for each in alternatives]
        self._check_ends(start)

    def _place(self, schemas: Iterable[Any], trail: SchemaPath, queue: deque[Place]) -> Place:
        """The place where these hold, put into the queue if it is new."""
        found = [schema for schema in schemas if isinstance(schema, dict)]
        self._nodes.update((id(each), each) for each in found)
        place = frozenset(map(id, found))
        if place not in self._trails:
            self._trails[place] = trail
            queue.append(place)
        return place

    def _alternatives(self, place: Place) -> list[Place]:
        return self._crossed([self._expand(self._nodes[each])[0] for each in place])

    def _expand(self, node: Any) -> tuple[list[Place], bool]:
        """The sets of schemas of which one holds where `node` does; none if it only leads back to itself. And whether
        all was found: not if it leads to a schema that is being expanded."""
        if not isinstance(node, dict):
            return [frozenset()], True
        key = id(node)
        self._nodes[key] = node
        if key in self._expanded:
            return self._expanded[key], True
        if key in self._open:
            return [], False
        self._count()
        self._open.append(key)
        whole = True
        groups: list[list[Place]] = [[frozenset((key,))]]
        for choices in self._parts(node):
            group: list[Place] = []
            for each in choices:
                found, complete = self._expand(each)
                group += found
                whole = whole and complete
            groups.append(group)
        self._open.pop()
        result = self._crossed(groups)
        if whole or not self._open:
            self._expanded[key] = result
        return result, whole

    def _parts(self, node: dict[str, Any]) -> Iterator[list[Any]]:
        """What holds with a schema: lists, of each of which one does."""
        yield from ([each] for each in _listed(node, "allOf"))
        yield from (group for key in _ALTERNATIVES if (group := _listed(node, key)))
        reference = node.get("$ref")
        if reference == "#":
            yield [self._root]
        elif isinstance(reference, str) and reference.startswith("#/"):
            yield [resolve(self._root, reference)[0]]

    def _crossed(self, groups: list[list[Place]]) -> list[Place]:
        count = 1
        for group in groups:
            count *= len(group)
        if count > _MOST_ALTERNATIVES and sum(len(group) > 1 for group in groups) > 1:
            return [frozenset().union(*(each for group in groups for each in group))]
        self._count(count)
        return list(dict.fromkeys(frozenset().union(*each) for each in product(*groups)))

    def _visit(self, together: Place, trail: SchemaPath, queue: deque[Place]) -> list[Place]:
        """Checks schemas that hold at once, and finds the places below; returns those that there have to be."""
        self._count(len(together))
        nodes = [self._nodes[each] for each in together]
        if len(_texts(nodes)) > MOST_PATTERNS:
            raise InvalidRequest(
                f"at most {MOST_PATTERNS} patterns and formats can hold for one string at once, got "
                f"{len(_texts(nodes))}.",
                param=str(trail),
            )
        keys = {key for node in nodes for key in _mapped(node, "patternProperties")}
        if len(keys) > MOST_KEY_PATTERNS:
            raise InvalidRequest(
                f"at most {MOST_KEY_PATTERNS} patternProperties can hold for one object at once, got {len(keys)}.",
                param=str(trail),
            )
        needed = []
        required = _required(nodes)
        for name in dict.fromkeys(name for node in nodes for name in _mapped(node, "properties")):
            self._count(len(nodes))
            said = (each for node in nodes for each in _of_property(node, name))
            place = self._place(said, trail.to(".properties").to(f".{name}"), queue)
            needed += [place] if name in required else []
        for key in keys:
            said = (each for node in nodes for each in _of_pattern(node, key, alone=len(nodes) == 1))
            self._place(said, trail.to(".patternProperties").to(f".{key}"), queue)
        if any("additionalProperties" in node for node in nodes):
            self._place(map(_additional, nodes), trail.to(".additionalProperties"), queue)
        listed, least = max(map(len, map(_prefix, nodes)), default=0), _least(nodes)
        for index in range(listed + 1):
            self._count(len(nodes))
            step = f".prefixItems[{index}]" if index < listed else ".items"
            place = self._place((_item(node, index) for node in nodes), trail.to(step), queue)
            needed += [place] if index < least else []
        return needed

    def _check_ends(self, start: Place) -> None:
        """That there is a value of finite size."""
        finite: set[Place] = set()
        users: dict[Place, list[Place]] = {}
        for place, alternatives in self._needs.items():
            for each in alternatives:
                for need in each:
                    users.setdefault(need, []).append(place)
        todo = list(self._needs)
        while todo:
            place = todo.pop()
            if place not in finite and any(all(need in finite for need in each) for each in self._needs[place]):
                finite.add(place)
                todo += users.get(place, ())
        seen: set[Place] = set()
        place = start
        while place not in finite and place not in seen:
            seen.add(place)
            place = next(need for need in self._needs[place][0] if need not in finite)
        if place not in finite:
            raise InvalidRequest("the schema refers to itself without end.", param=str(self._trails[place]))

    def _check_all_together(self) -> None:
        """References by anchors and addresses are not followed here: they could lead to any part."""
        nodes = list(_dictionaries(self._root))
        if len(_texts(nodes)) > MOST_PATTERNS:
            raise InvalidRequest(
                f"a schema with more than {MOST_PATTERNS} patterns and formats can refer to its parts only as in "
                "#/$defs/name.",
                param="",
            )

    def _count(self, work: int = 1) -> None:
        self._work += work
        if self._work > _MOST_WORK:
            raise InvalidRequest("the schema has too many combinations.", param="")


def _texts(nodes: Iterable[dict[str, Any]]) -> set[tuple[str, str]]:
    """The different patterns and formats."""
    return {(key, node[key]) for node in nodes for key in ("pattern", "format") if isinstance(node.get(key), str)}


def _of_property(node: dict[str, Any], name: str) -> list[Any]:
    """What a schema says of a property: its name may be like any of the patterns."""
    named = _mapped(node, "properties")
    patterns = list(_mapped(node, "patternProperties").values())
    return [named[name], *patterns] if name in named else [_additional(node), *patterns]


def _of_pattern(node: dict[str, Any], key: str, *, alone: bool) -> list[Any]:
    patterns = _mapped(node, "patternProperties")
    if key in patterns and alone:
        return [patterns[key]]  # those of one schema are apart, or llguidance refuses it
    return [*patterns.values(), _additional(node)]


def _additional(node: dict[str, Any]) -> Any:
    return node.get("additionalProperties")


def _prefix(node: dict[str, Any]) -> list[Any]:
    return _listed(node, "prefixItems") or _listed(node, "items")


def _item(node: dict[str, Any], index: int) -> Any:
    prefix = _prefix(node)
    if index < len(prefix):
        return prefix[index]
    return node.get("additionalItems") if isinstance(node.get("items"), list) else node.get("items")


def _required(nodes: list[dict[str, Any]]) -> set[str]:
    """The properties that a value has to have, if it has to be an object."""
    if not any(_is_only(node, "object") for node in nodes):
        return set()
    return {name for node in nodes for name in _listed(node, "required") if isinstance(name, str)}


def _least(nodes: list[dict[str, Any]]) -> int:
    """How many items a value has to have, if it has to be an array."""
    if not any(_is_only(node, "array") for node in nodes):
        return 0
    return max((node["minItems"] for node in nodes if type(node.get("minItems")) is int), default=0)


def _is_only(node: dict[str, Any], kind: str) -> bool:
    return node.get("type") in (kind, [kind])


def _has_far_references(root: Any) -> bool:
    """Whether some reference is more than a pointer into the root."""
    old = isinstance(root, dict) and "draft-04" in str(root.get("$schema", ""))
    for node in _dictionaries(root):
        reference = node.get("$ref")
        if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
            return True
        # Pointers inside a part with an address of its own begin there.
        if node is not root and isinstance(node.get("id" if old else "$id"), str):
            return True
    return False


def _dictionaries(root: Any) -> Iterator[dict[str, Any]]:
    todo = [root]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            yield node
            todo += node.values()
        elif isinstance(node, list):
            todo += node


def _mapped(node: dict[str, Any], key: str) -> dict[str, Any]:
    found = node.get(key)
    return found if isinstance(found, dict) else {}


def _listed(node: dict[str, Any], key: str) -> list[Any]:
    found = node.get(key)
    return found if isinstance(found, list) else []
