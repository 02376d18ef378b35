"""The dashboard and the documentation refer to existing metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from syringa.errors import RateLimited
from syringa.fleet.status import FleetStatus, NodeStatus, PoolStatus
from syringa.service.metrics.engine_metrics import EngineReport
from syringa.service.metrics.metrics import Metrics
from syringa.types import EngineStats
from tests.service.metrics.test_metrics import accounting, parsed, refused

DOCS = Path(__file__).parents[3] / "docs"
DASHBOARD: dict[str, Any] = json.loads((DOCS / "grafana.json").read_text())
PREFIX = "syringa_"
FLEET = FleetStatus([NodeStatus("n", "ready", "p")], [PoolStatus("p", "active")], {"capacity": 1})
ADDED = {"instance", "job"}  # labels added by Prometheus

PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
QUERIES = [each["query"]["query"] for each in VARIABLES.values() if each["type"] == "query"]


@pytest.fixture(scope="module")
def rendered() -> dict[str, set[str]]:
    """All metric names with their labels."""
    metrics = Metrics(PREFIX)
    metrics.observe(accounting())
    metrics.observe(refused(RateLimited("slower")))
    metrics.count_route("qwen", True)
    metrics.count_line(failed=False)
    found: dict[str, set[str]] = {}
    for name, labels in parsed(metrics._text({"qwen": EngineReport(EngineStats())}, FLEET)):
        found.setdefault(name, set()).update(dict(labels))
    return found


@pytest.mark.parametrize("expression", [*EXPRESSIONS, *QUERIES])
def test_dashboard_queries_existing_metrics(expression: str, rendered: dict[str, set[str]]) -> None:
    text = expression.replace("${prefix}", PREFIX)
    names = re.findall(r"\b(?:syringa|process)_\w+", text)
    assert names
    assert set(names) <= rendered.keys()
    for name, selectors in re.findall(r"\b((?:syringa|process)_\w+)\{([^}]*)\}", text):
        assert set(re.findall(r"(\w+)(?:=~|!=|=)\"", selectors)) <= rendered[name] | ADDED
    labels = {each.strip() for group in re.findall(r"(?:by|on) \(([^)]*)\)", text) for each in group.split(",")}
    assert labels <= set.union(*(rendered[name] for name in names)) | ADDED
    unknown = set(re.findall(r"\$\{?(\w+)", expression)) - VARIABLES.keys() - {"__rate_interval"}
    assert not unknown


def test_panels_do_not_overlap() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert {target["datasource"]["uid"] for panel in PANELS for target in panel["targets"]} == {"${datasource}"}
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        mine = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not mine & cells, panel["title"]
        assert at["x"] + at["w"] <= 24
        cells |= mine


def test_dashboard_rows() -> None:
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == [
        *("Traffic", "Latency", "Tokens", "Cache", "Engine", "Errors and limits", "Models and processes"),
    ]
    assert DASHBOARD["schemaVersion"] >= 39
    assert VARIABLES["prefix"]["current"]["value"] == PREFIX


def test_every_metric_is_documented(rendered: dict[str, set[str]]) -> None:
    page = (DOCS / "observability.md").read_text()
    documented = set(re.findall(r"`(\w+)`", page))
    bare = {re.sub(r"_(bucket|sum|count)$", "", name.removeprefix(PREFIX)) for name in rendered}
    assert bare <= documented
    assert set(re.findall(r"\bsyringa_\w+", page)) - {PREFIX} <= rendered.keys()
