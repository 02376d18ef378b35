import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from syringa.bench.chart import axis_scale, render_chart
from syringa.bench.report import (
    LoadSample,
    ServerRun,
    Spread,
    format_number,
    make_spread,
    render_markdown,
    render_table,
    summarize,
)
from syringa.bench.report import write_json as write


def run(server: str, round_number: int, rate: float, **fields: object) -> ServerRun:
    sample = LoadSample(
        streams=16,
        requests=16,
        output_tokens=1000,
        seconds=1000 / rate,
        tokens_per_second=rate,
        first_token_median=0.5,
        first_token_max=0.6,
        between_tokens_median=0.01,
        client_cpu_share=0.02,
        server_cpu_seconds=10.0,
    )
    return ServerRun(server=server, version="v1", precision="int8", round=round_number, samples=[sample], **fields)  # type: ignore[arg-type]


RUNS = [
    run("ours", 1, 500.0, memory_bytes=2**30, long_first_token=[0.2, 0.4]),
    run("peer", 1, 100.0, long_first_token=[4.0]),
    run("ours", 2, 600.0, long_first_token=[0.3]),
    run("peer", 2, 90.0),
    run("ours", 3, 100.0),
    run("peer", 3, 110.0, error="killed <by> someone [/red]"),
]


def test_make_spread_returns_median_and_range() -> None:
    assert make_spread([3.0, 1.0, 10.0]) == Spread(3.0, 1.0, 10.0, 3)
    assert make_spread([]) is None


def test_summarize_computes_medians_and_ratios_of_medians() -> None:
    figures = {figure.key: figure for figure in summarize(RUNS).figures}
    rate = figures["tokens_per_second_16"]
    assert rate.values["ours"] == Spread(500.0, 100.0, 600.0, 3)
    assert rate.ratio("ours", "peer") == pytest.approx(5.0)
    assert figures["long_first_token"].values["ours"].median == pytest.approx(300.0)
    assert figures["long_first_token"].ratio("ours", "peer") == pytest.approx(0.075)
    assert figures["server_cpu_16"].values["peer"].median == pytest.approx(10.0)
    assert figures["memory"].values["ours"].median == 1024
    assert figures["memory"].ratio("ours", "peer") is None
    assert "start" not in figures


def test_renderings_list_failures(tmp_path: Path) -> None:
    summary = summarize(RUNS)
    assert summary.failures == ["peer, round 3: killed <by> someone [/red]"]
    console = Console(width=200, record=True, file=(tmp_path / "out").open("w"))
    console.print(render_table(summary))
    markdown = render_markdown(summary, "heading")
    for text in (console.export_text(), markdown):
        assert "FAILED: peer, round 3: killed <by> someone [/red]" in text
        assert "5.00 ×" in text
        assert "500 (100–600)" in text
    write(tmp_path / "deep" / "out.json", RUNS, day="today")
    document = json.loads((tmp_path / "deep" / "out.json").read_text())
    assert document["day"] == "today"
    assert len(document["runs"]) == 6
    assert document["summary"]["failures"] == summary.failures


def test_markdown_has_empty_column_for_server_that_never_started() -> None:
    runs = [*RUNS, ServerRun(server="absent", version="", precision="", round=0, error="no wheel")]
    rows = [
        line for line in render_markdown(summarize(runs), "heading").splitlines() if line.startswith("| 16 streams")
    ]
    assert rows[0].count("—") == 1


def test_renderings_without_measurements() -> None:
    summary = summarize([ServerRun(server="absent", version="", precision="", round=0, error="no wheel")])
    assert "FAILED: absent" in render_markdown(summary, "heading")
    ElementTree.fromstring(render_chart(summary, "title"))


def test_chart_is_well_formed_and_shows_every_value() -> None:
    root = ElementTree.fromstring(render_chart(summarize(RUNS), "a <title> & more", "below"))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a <title> & more", "500", "100", "16 streams", "ours (int8)"} <= set(texts)


@pytest.mark.parametrize("highest", [0.3, 1.0, 9.9, 10.0, 63.0, 99.0, 512.0, 6999.0, 7001.0])
def test_chart_scale_ends_above_highest_bar(highest: float) -> None:
    top, step = axis_scale(highest)
    assert highest < top <= (highest + step) * 1.001
    assert 2 <= round(top / step) <= 10


@pytest.mark.parametrize(("value", "text"), [(1234.5, "1,234"), (99.96, "100.0"), (12.34, "12.3"), (0.123, "0.12")])
def test_format_number(value: float, text: str) -> None:
    assert format_number(value) == text
