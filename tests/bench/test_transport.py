from __future__ import annotations

from pathlib import Path

import pytest

from bench.transport import TransportRun, summarize, write_page


def run(transport: str, tokens_per_second: float, *first_token_ms: float) -> TransportRun:
    return TransportRun(transport=transport, tokens_per_second=tokens_per_second, first_token_ms=[*first_token_ms])


def test_summary_compares_the_transports_pair_by_pair() -> None:
    """The machine's pace varies between pairs: the second is half as fast, and its ratio is the same."""
    runs = [
        run("unix", 200.0, 10.0, 30.0, 20.0), run("tls", 196.0, 21.0, 21.0, 90.0),
        run("tls", 98.0, 41.5), run("unix", 100.0, 40.0),
        run("unix", 100.0, 40.0), run("tls", 120.0, 39.0),
    ]  # fmt: skip
    summary = summarize(runs)
    assert summary["ratio"] == pytest.approx(0.98)
    assert summary["ratio_min"] == pytest.approx(0.98)
    assert summary["ratio_max"] == pytest.approx(1.2)
    assert summary["added_first_token_ms"] == pytest.approx(1.0)
    assert summary["added_first_token_ms_max"] == pytest.approx(1.5)
    assert summary["unix_tokens_per_second"] == 100.0


def test_table_compares_the_transports_and_says_whether_the_targets_are_met(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- transport -->\n<!-- end of transport -->\n")
    write_page("1 pair.", summarize([run("unix", 200.0, 10.0), run("tls", 190.0, 11.5)]), page)
    text = page.read_text()
    assert "| 16 streams, tok/s | 200 | 190 | 0.950 × (0.950–0.950) | ≥ 0.97 × | no |" in text
    assert "| 10.0 | 11.5 | +1.50 ms (+1.50 to +1.50) | ≤ +2 ms | yes |" in text
