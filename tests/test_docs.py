"""The tables in docs/ are what the code says. `python -m tests.test_docs` writes them anew."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from syringa import config
from syringa.api.fields.schema import IGNORED, REFUSED
from syringa.api.openapi.document import request_fields
from syringa.config.specs import INHERITED
from syringa.config.validation import base_type
from syringa.fleet.pools import PoolSpec
from syringa.fleet.schedule import DAYS, PoolWindow
from syringa.http.endpoints import PUBLISHED

DOCS = Path(__file__).parents[1] / "docs"


def settings_table() -> str:
    lines = ["| setting | flag and variable | default | what it does |", "| --- | --- | --- | --- |"]
    for name, field in config.FIELDS.items():
        kind: Any = config.setting_type(name)
        choices = " ".join(f"`{each}`" for each in get_args(kind)) if "Literal" in str(kind) else ""
        default = field.default
        shown = "none" if default in ((), "") else f"`{str(default).lower() if isinstance(default, bool) else default}`"
        flag = f"`--{name.replace('_', '-')}` `{config.variable(name)}`"
        lines.append(f"| `{name}` | {flag} | {shown} | {config.describe(name)} {choices} |".replace("  |", " |"))
    return "\n".join(lines)


def models_table() -> str:
    """What may be said of each of several models."""
    lines = ["| key | default | what it is |", "| --- | --- | --- |"]
    hints = get_type_hints(config.ModelSpec, include_extras=True)
    for field in msgspec.structs.fields(config.ModelSpec):
        told = next(text for each in hints[field.name].__metadata__ if (text := each.description))
        default = field.default
        if field.name in INHERITED:
            shown = f"the setting `{field.name}`"
        else:
            shown = (
                "required" if field.required else "none" if default in (None, (), msgspec.NODEFAULT) else f"`{default}`"
            )
        lines.append(f"| `{field.name}` | {shown} | {told} |")
    return "\n".join(lines)


def pools_table(kind: type[msgspec.Struct] = PoolSpec, path: str = "") -> str:
    """What may be said of a pool, with the keys of inner tables."""
    lines = [] if path else ["| key | default | what it is |", "| --- | --- | --- |"]
    hints = get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        inner, name = base_type(hints[field.name]), path + field.name
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            lines.append(pools_table(inner, f"{name}."))
            continue
        told = next(text for each in hints[field.name].__metadata__ if (text := each.description))
        default = field.default
        shown = f"`{default:g}`" if isinstance(default, float) else f"`{default}`"
        if field.required or default in (DAYS, (), msgspec.NODEFAULT):
            shown = "required" if field.required else "all" if default == DAYS else "none"
        lines.append(f"| `{name}` | {shown} | {told} |")
        if field.name == "windows":
            lines.append(pools_table(PoolWindow, f"{name}[]."))
    return "\n".join(lines)


def parameters_tables() -> str:
    """Every field of every body, by endpoint. Endpoints that take the same body share a table."""
    paths: dict[type[msgspec.Struct], list[str]] = {}
    for each in PUBLISHED:
        if each.operation.request is not None:
            paths.setdefault(each.operation.request, []).append(f"`{each.method.upper()} {each.path}`")
    parts = []
    for wire, where in paths.items():
        rows = ["| parameter | | type | default | |", "| --- | --- | --- | --- | --- |"]
        rows += [row for name, schema in request_fields(wire).items() for row in parameter_rows(name, schema)]
        parts.append(f"## {', '.join(where)}\n\n" + "\n".join(rows))
    return "\n\n".join(parts)


def parameter_rows(name: str, schema: dict[str, Any]) -> Iterator[str]:
    word = "refused" if schema.get(REFUSED) else "ignored" if schema.get(IGNORED) else "honored"
    default = f"`{json.dumps(schema['default'])}`" if "default" in schema else ""
    cells = [f"`{name}`", word, type_text(schema), default, schema["description"]]
    yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    for inner, each in schema.get("properties", {}).items():
        yield from parameter_rows(f"{name}.{inner}", each)


def type_text(schema: dict[str, Any]) -> str:
    """A schema in a few words; that null is allowed goes without saying."""
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"`{json.dumps(value)}`" for value in values if value is not None)
    if "anyOf" in schema:
        return ", or ".join(dict.fromkeys(type_text(each) for each in schema["anyOf"] if each != {"type": "null"}))
    given = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    text = " or ".join(kind for kind in given if kind != "null")
    if text == "array":
        text = f"array of ({type_text(schema['items'])})"
    elif isinstance(schema.get("additionalProperties"), dict):
        text = f"object of ({type_text(schema['additionalProperties'])})"
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, most = schema.get("maximum"), schema.get("maxItems")
    bounds = [f"≥ {low}" * (low is not None), f"> {above}" * (above is not None), f"≤ {high}" * (high is not None)]
    return ", ".join([text, *filter(None, bounds), *([f"at most {most}"] if most is not None else [])])


TABLES: dict[str, Callable[[], str]] = {
    "configuration.md": settings_table,
    "models.md": models_table,
    "parameters.md": parameters_tables,
    "pools.md": pools_table,
}


def with_table(text: str, table: str) -> str:
    """The page with whatever stands between its two marks replaced."""
    before, _, rest = text.partition("<!-- table -->\n")
    _, _, after = rest.partition("<!-- end -->")
    return f"{before}<!-- table -->\n{table}\n<!-- end -->{after}"


@pytest.mark.parametrize("page", TABLES)
def test_tables_are_current(page: str) -> None:
    text = (DOCS / page).read_text()
    assert text == with_table(text, TABLES[page]()), "run: python -m tests.test_docs"


PAGES = sorted(DOCS.rglob("*.md")) + [DOCS.parent / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_in_docs_exist(page: Path) -> None:
    text = page.read_text()
    root = DOCS.parent
    missing = [
        link for link in re.findall(r"\]\((?!https?:)([^)#]+)", text) if not (page.parent / link).exists()
    ]  # fmt: skip
    for path in re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]*(?:\.py|\.md)?)`", text):
        if path.split("/")[0] not in (
            "syringa",
            "tests",
            "bench",
            "docs",
            *(each.name for each in (root / "syringa").iterdir()),
        ):
            continue  # not a path of the repository
        if not any((folder / path).exists() for folder in (root, root / "syringa")):
            missing.append(path)
    assert not missing


if __name__ == "__main__":
    for page, table in TABLES.items():
        path = DOCS / page
        path.write_text(with_table(path.read_text(), table()))
