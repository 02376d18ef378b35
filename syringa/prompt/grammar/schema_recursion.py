"""JSON schemas that refer to themselves without end, which no value of finite size can match."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from syringa.errors import InvalidRequest
from syringa.prompt.grammar.schema_path import ROOT, SchemaPath, resolve_pointer


class _Need(NamedTuple):
    """Schemas one of which must have a value if another one is to have one."""

    choices: Sequence[Any]
    step: SchemaPath | None = None  # path of a required part of the value; None: the schemas apply to the value itself


def check_recursion(root: Any) -> None:
    """Raise `InvalidRequest`, with the path as `param`, if the schema or a part of it only leads back to itself.

    Schemas that contradict each other are not found here, but when the grammar is compiled.
    """
    nodes = list(_subschemas(root))
    own = {id(node): _own_needs(node, root) for node, _ in nodes}
    defined = _satisfiable(own)
    for node, path in nodes:
        if id(node) not in defined:
            raise InvalidRequest("the schema refers to itself, and to nothing else.", param=str(path))
    needs = {id(node): own[id(node)] + _part_needs(node, path) for node, path in nodes}
    finite = _satisfiable(needs)
    at, path, seen = id(root), ROOT, set[int]()
    while at in needs and at not in finite and at not in seen:
        seen.add(at)
        need = next(need for need in needs[at] if not _is_met(need, finite, needs))
        at, path = id(need.choices[0]), need.step or path
    if at in seen:
        raise InvalidRequest("the schema refers to itself without end.", param=str(path))


def _subschemas(root: Any) -> Iterator[tuple[dict[str, Any], SchemaPath]]:
    """Yield all subschemas that are reachable from the root, the nearest first."""
    queue: deque[tuple[Any, SchemaPath]] = deque([(root, ROOT)])
    seen: set[int] = set()
    while queue:
        node, path = queue.popleft()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        yield node, path
        for key in ("properties", "patternProperties"):
            inner = path.child(f".{key}")
            queue += [(each, inner.child(f".{name}")) for name, each in dict_at(node, key).items()]
        for key in ("allOf", "anyOf", "oneOf", "prefixItems", "items"):
            queue += [(each, path.child(f".{key}[{index}]")) for index, each in enumerate(list_at(node, key))]
        queue += [
            (node.get(key), path.child(f".{key}")) for key in ("additionalProperties", "items", "additionalItems")
        ]
        reference = node.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            queue.append(resolve_pointer(root, reference))


def _satisfiable(needs: dict[int, list[_Need]]) -> set[int]:
    """Return the schemas whose needs are met by schemas that do not depend on themselves."""
    users: dict[int, list[int]] = {}
    for node, own in needs.items():
        for need in own:
            for choice in need.choices:
                users.setdefault(id(choice), []).append(node)
    met: set[int] = set()
    stack = list(needs)
    while stack:
        node = stack.pop()
        if node not in met and all(_is_met(need, met, needs) for need in needs[node]):
            met.add(node)
            stack += users.get(node, ())
    return met


def _is_met(need: _Need, met: set[int], known: dict[int, list[_Need]]) -> bool:
    return any(id(choice) in met or id(choice) not in known for choice in need.choices)


def _own_needs(node: dict[str, Any], root: Any) -> list[_Need]:
    """Return the needs of a schema among those that apply to the same value."""
    needs = [_Need([each]) for each in list_at(node, "allOf")]
    needs += [_Need(group) for key in ("anyOf", "oneOf") if (group := list_at(node, key))]
    if (target := referenced(node, root)) is not None:
        needs.append(_Need([target]))
    return needs


def _part_needs(node: dict[str, Any], path: SchemaPath) -> list[_Need]:
    """Return the needs of a schema among its properties and items."""
    needs = []
    if node.get("type") in ("object", ["object"]):
        properties = dict_at(node, "properties")
        inner = path.child(".properties")
        for name in list_at(node, "required"):
            if isinstance(name, str) and name in properties:
                needs.append(_Need([properties[name]], inner.child(f".{name}")))
    if node.get("type") in ("array", ["array"]) and isinstance(node.get("minItems"), int):
        prefix = list_at(node, "prefixItems")
        least = node["minItems"]
        for index, each in enumerate(prefix[: max(0, least)]):
            needs.append(_Need([each], path.child(f".prefixItems[{index}]")))
        if least > len(prefix) and isinstance(node.get("items"), dict):
            needs.append(_Need([node["items"]], path.child(".items")))
    return needs


def referenced(node: dict[str, Any], root: Any) -> Any:
    """Return the target of a reference within the root; None for another one, or none."""
    reference = node.get("$ref")
    if reference == "#":
        return root
    if isinstance(reference, str) and reference.startswith("#/"):
        return resolve_pointer(root, reference)[0]
    return None


def dict_at(node: dict[str, Any], key: str) -> dict[str, Any]:
    found = node.get(key)
    return found if isinstance(found, dict) else {}


def list_at(node: dict[str, Any], key: str) -> list[Any]:
    found = node.get(key)
    return found if isinstance(found, list) else []
