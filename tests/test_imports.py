"""Import direction: each layer lists the layers that it may import."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "syringa"

VALUES = {"types", "errors", "events", "output_formats", "ids", "version", "remote_tools"}
BASE = VALUES | {"config", "modelfiles", "grammar"}
LAYERS: dict[str, set[str]] = {
    "types": set(),
    "errors": set(),
    "output_formats": set(),
    "schema_types": set(),
    "events": {"types", "output_formats"},
    "config": {"errors", "output_formats", "fleet"},
    "ids": set(),
    "version": set(),
    "logs": set(),
    "flush_queue": set(),
    "heap": set(),
    "fair_thread_pool": set(),
    "addresses": set(),
    "remote_tools": set(),
    "cluster": {"errors", "modelfiles"},
    "grammar": {"types", "errors"},
    "modelfiles": {"types", "errors"},
    "prompt": {
        "types",
        "errors",
        "output_formats",
        "schema_types",
        "modelfiles",
        "grammar",
        "fair_thread_pool",
        "addresses",
    },
    "output": VALUES | {"schema_types", "modelfiles", "grammar"},
    "engine": {
        "types",
        "errors",
        "config",
        "logs",
        "modelfiles",
        "grammar",
        "flush_queue",
        "fair_thread_pool",
        "heap",
        "cluster",
        "fleet",
        "version",
    },
    "fleet": {"types"},
    "ray": {"errors", "logs", "cluster", "fleet", "engine"},
    "beam_search": {"types"},
    "generation": VALUES | {"engine", "output", "beam_search"},
    "api": BASE | {"prompt", "output", "heap"},
    "store": VALUES | {"config"},
    "service": VALUES | {"config", "store", "addresses", "fleet"},
    "console": set(),
    "http": BASE
    | {
        "logs",
        "flush_queue",
        "fair_thread_pool",
        "heap",
        "api",
        "prompt",
        "output",
        "generation",
        "engine",
        "service",
        "store",
        "fleet",
        "console",
    },
    "bench": {"errors"},
    "cli": BASE
    | {
        "http",
        "api",
        "prompt",
        "output",
        "generation",
        "engine",
        "bench",
        "service",
        "store",
        "cluster",
        "fleet",
        "ray",
        "logs",
    },
    "__main__": {"cli"},
}
# The modules of the engine that other layers may import: its interface, and how to start one.
ENGINE_ENTRY_POINTS = {
    "generation": {"syringa.engine.interface"},
    "http": {
        "syringa.engine.interface",
        "syringa.engine.processes.managed_process",
        "syringa.engine.client.engines",
        "syringa.engine.processes.supervisor",
    },
    "ray": {
        "syringa.engine.client.protocol",
        "syringa.engine.processes.managed_process",
        "syringa.engine.processes.model_fetcher",
        "syringa.engine.processes.nvml",
        "syringa.engine.processes.replica_host",
    },
    "cli": {
        "syringa.engine.interface",
        "syringa.engine.client.local",
        "syringa.engine.processes.managed_process",
        "syringa.engine.processes.supervisor",
        "syringa.engine.processes.startup_plan",
    },
}
HEAVY = {"torch", "transformers", "torchvision"}
EXTRAS = {"mcp", "psycopg", "vllm", "ray"}


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts != ("__init__",):
            yield parts[0], path


def imports(path: Path) -> Iterator[str]:
    """The full names of what a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            assert node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_module_is_in_a_layer() -> None:
    assert {layer for layer, _ in modules()} <= set(LAYERS)


def test_imports_point_one_way() -> None:
    upward = []
    for layer, path in modules():
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "syringa" and len(parts) > 1 and parts[1] not in LAYERS[layer] | {layer}:
                upward.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not upward, "\n".join(upward)


def test_other_layers_import_only_entry_points_of_the_engine() -> None:
    violations = []
    for layer, path in modules():
        for name in imports(path):
            if name.startswith("syringa.engine") and layer != "engine":
                entry_points = ENGINE_ENTRY_POINTS[layer]
                if not any(name == each or name.startswith(each + ".") for each in entry_points):
                    violations.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not violations, "\n".join(violations)


def test_only_the_engine_imports_torch() -> None:
    heavy = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for layer, path in modules()
        if layer != "engine"
        for name in imports(path)
        if name.split(".")[0] in HEAVY
    ]
    assert not heavy, "\n".join(heavy)


def test_only_its_package_imports_ray() -> None:
    found = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for layer, path in modules()
        if layer != "ray"
        for name in imports(path)
        if name.split(".")[0] == "ray"
    ]
    assert not found, "\n".join(found)


def test_layers_have_no_cycle() -> None:
    left = {layer: set(below) for layer, below in LAYERS.items()}
    while left:
        free = {layer for layer, below in left.items() if not below & set(left)}
        assert free, f"a cycle among {sorted(left)}"
        left = {layer: below for layer, below in left.items() if layer not in free}


@pytest.mark.parametrize(
    "module",
    [
        "syringa.http.server.server",
        "syringa.cli.app",
        "syringa.cli.source",
        "syringa.engine.processes.supervisor",
        "syringa.engine.structured_output.probe",
    ],
)
def test_torch_and_extras_are_imported_where_they_are_used_only(module: str) -> None:
    code = f"import {module}, sys; sys.exit(bool({HEAVY | EXTRAS!r} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=PACKAGE.parent).returncode == 0


@pytest.mark.parametrize(
    ("modules", "slow"),
    [
        # What `syringa serve` imports before it starts the processes of the server.
        (
            "syringa.cli.serve, syringa.api.models.specs, syringa.http.server.listener, "
            "syringa.engine.processes.supervisor, syringa.engine.processes.startup_plan",
            {"uvicorn", "sqlalchemy", "jinja2", "llguidance", "numpy"},
        ),
        ("syringa.http.server.process", {"sqlalchemy"}),
    ],
    ids=["serve", "API server"],
)
def test_start_is_not_delayed_by_slow_imports(modules: str, slow: set[str]) -> None:
    code = f"import {modules}, sys; sys.exit(str(found) if (found := {slow!r} & sys.modules.keys()) else 0)"
    result = subprocess.run([sys.executable, "-c", code], check=False, cwd=PACKAGE.parent, capture_output=True)
    assert result.returncode == 0, result.stderr.decode()
