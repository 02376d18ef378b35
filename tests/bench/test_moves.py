from __future__ import annotations

from pathlib import Path

from bench.moves import summarize_pauses, table_rows, write_page


def test_table_has_medians_and_says_whether_the_limits_are_met(tmp_path: Path) -> None:
    spreads = summarize_pauses({"drained": [0.5, 0.9, 2.0], "killed": [4.0, 3.0, 9.0], "stopped": []})
    assert table_rows(spreads) == [
        ["drained", "0.90 (0.50–2.00)", "≤ 1", "yes"],
        ["killed", "4.00 (3.00–9.00)", "≤ 3.5", "no"],
    ]
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- moves -->\nold\n<!-- end of moves -->\nafter\n")
    write_page("3 pairs.", spreads, page)
    text = page.read_text()
    assert "| killed | 4.00 (3.00–9.00) | ≤ 3.5 | no |\n<!-- end of moves -->\nafter\n" in text
    assert text.startswith("before\n<!-- moves -->\n3 pairs.\n\n| the replica is |")
    assert "old" not in text
