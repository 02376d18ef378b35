"""Results of the perplexity benchmark: what is kept of an interrupted run, and the table."""

from pathlib import Path

import msgspec
import pytest

from bench.pages import replace_section
from bench.perplexity import PerplexityResults, TextPerplexity, load_results, render_markdown

PROMPTS = {"article": [1, 2, 3], "manual": [4, 5]}


def results() -> PerplexityResults:
    texts = [
        TextPerplexity(text="article", tokens=3, values={"fp32": 10.0, "gguf": 10.05}),
        TextPerplexity(text="manual", tokens=2, values={"fp32": 20.0, "gguf": 19.9}),
    ]
    return PerplexityResults(model="m", day="2026-01-02", texts=texts)


def test_load_results_keeps_measurements_of_same_model_and_lengths_only(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert load_results(path, "m", PROMPTS) is None
    path.write_bytes(msgspec.json.encode(results()))
    assert load_results(path, "m", PROMPTS) == results()
    assert load_results(path, "another", PROMPTS) is None
    assert load_results(path, "m", PROMPTS | {"manual": [4]}) is None


def test_render_markdown_states_difference_per_text_and_mean() -> None:
    lines = render_markdown(results(), "gguf")
    assert "| article | 3 | 10.000 | 10.050 | +0.50 % |" in lines
    assert "| manual | 2 | 20.000 | 19.900 | -0.50 % |" in lines
    assert lines[-1] == "| mean |  |  |  | +0.00 % |"


def test_replace_section_replaces_only_what_is_between_the_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x -->\nold\n<!-- end of x -->\nb\n<!-- y -->\nkept\n<!-- end of y -->\n")
    replace_section(page, "x", ["new", "lines"])
    text = page.read_text()
    assert text == "a\n<!-- x -->\nnew\nlines\n<!-- end of x -->\nb\n<!-- y -->\nkept\n<!-- end of y -->\n"
    with pytest.raises(ValueError, match="no markers <!-- z --> and <!-- end of z -->"):
        replace_section(page, "z", [])
