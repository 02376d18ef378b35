"""Report the request fields of vLLM that docs/parameters.md has no row for.

    python -m scripts.vllm_fields            # of the installed vLLM
    python -m scripts.vllm_fields FOLDER     # of a source tree

vLLM is parsed and not imported, so it needs neither its dependencies nor a GPU. The exit status is 1 if a field has no
row, and 2 if a class was not found.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from syringa.api.chat.request import ChatRequest
from syringa.api.completions.request import CompletionRequest
from syringa.api.openapi.document import request_fields
from syringa.api.responses import ResponseRequest
from syringa.api.tokenize import DetokenizeRequest, TokenizeRequest

# vLLM's classes, and the wire types with the same fields.
CLASSES: dict[str, type[msgspec.Struct]] = {
    "ChatCompletionRequest": ChatRequest,
    "CompletionRequest": CompletionRequest,
    "ResponsesRequest": ResponseRequest,
    "TokenizeCompletionRequest": TokenizeRequest,
    "TokenizeChatRequest": TokenizeRequest,
    "DetokenizeRequest": DetokenizeRequest,
}


def read_classes(files: Iterable[Path]) -> dict[str, ast.ClassDef]:
    """Return all classes at the top level of the files, by name."""
    found: dict[str, ast.ClassDef] = {}
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8"), str(file)).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, node)
    return found


def class_fields(name: str, classes: dict[str, ast.ClassDef]) -> list[str]:
    """Return the fields of a class, those of its bases first. Bases that were not read have none."""
    node = classes.get(name)
    if node is None:
        return []
    fields = [field for base in node.bases if isinstance(base, ast.Name) for field in class_fields(base.id, classes)]
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            field = statement.target.id
            is_class_variable = "ClassVar" in ast.unparse(statement.annotation)
            if not field.startswith("_") and field != "model_config" and not is_class_variable:
                fields.append(field)
    return list(dict.fromkeys(fields))


def missing_fields(folder: Path) -> dict[str, list[str]]:
    """Return the fields without a row, by class. Raises `LookupError` if a class is not in the source tree."""
    classes = read_classes(sorted(folder.glob("**/entrypoints/**/*protocol.py")))
    if absent := [name for name in CLASSES if name not in classes]:
        raise LookupError(f"{folder}: no class {', '.join(absent)} in entrypoints/**/protocol.py")
    return {
        name: [field for field in class_fields(name, classes) if field not in request_fields(wire)]
        for name, wire in CLASSES.items()
    }


def installed_folder() -> Path:
    """Return the folder of the installed vLLM. Raises `LookupError`."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise LookupError("vLLM is not installed: give the folder of its source")
    return Path(next(iter(spec.submodule_search_locations)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.vllm_fields", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, help="a source tree; by default, the installed vLLM")
    folder: Path | None = parser.parse_args(arguments).folder
    try:
        missing = missing_fields(installed_folder() if folder is None else folder)
    except LookupError as error:
        print(error, file=sys.stderr)
        return 2
    for name, fields in missing.items():
        for field in fields:
            print(f"{name}.{field}: no row")
    return 1 if any(missing.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
