"""Results of the perplexity benchmark: what is kept of an interrupted run, and the table."""

from pathlib import Path

import msgspec
import pytest

from bench import perplexity
from bench.pages import replace_section
from bench.perplexity import PerplexityResults, TextPerplexity, kernels_fingerprint, load_results, render_markdown
from syringa.errors import ConfigError
from syringa.modelfiles import ModelFiles

PROMPTS = {"article": [1, 2, 3], "manual": [4, 5]}


def results() -> PerplexityResults:
    texts = [
        TextPerplexity(text="article", tokens=3, values={"fp32": 10.0, "gguf": 10.05}),
        TextPerplexity(text="manual", tokens=2, values={"fp32": 20.0, "gguf": 19.9}),
    ]
    return PerplexityResults(model="m", day="2026-01-02", texts=texts, kernels=perplexity.kernels_fingerprint())


def test_load_results_keeps_measurements_of_same_model_and_lengths_only(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert load_results(path, "m", PROMPTS) is None
    path.write_bytes(msgspec.json.encode(results()))
    assert load_results(path, "m", PROMPTS) == results()
    assert load_results(path, "another", PROMPTS) is None
    assert load_results(path, "m", PROMPTS | {"manual": [4]}) is None


def test_load_results_refuses_measurements_of_other_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    old = msgspec.to_builtins(results())
    del old["kernels"]  # as before the fingerprint was recorded
    path.write_bytes(msgspec.json.encode(old))
    with pytest.raises(ConfigError, match=r"with other kernels \(not recorded, and these are .*: leave out --resume"):
        load_results(path, "m", PROMPTS)
    path.write_bytes(msgspec.json.encode(results()))
    monkeypatch.setattr(perplexity, "kernel_variant", lambda: "another")
    with pytest.raises(ConfigError, match="with other kernels"):
        load_results(path, "m", PROMPTS)
    assert load_results(path, "another", PROMPTS) is None  # nothing of it is kept


def test_resume_across_kernels_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(results(), kernels="old")))
    monkeypatch.setattr(perplexity, "locate", lambda model: ModelFiles("m", "m.gguf", "gguf"))
    monkeypatch.setattr(perplexity, "_prompts", lambda files, limit: PROMPTS)
    assert perplexity.main(["--resume", "--output", str(path)]) == 1
    assert "leave out --resume" in " ".join(capsys.readouterr().out.split())


def test_kernels_fingerprint_changes_with_each_source(tmp_path: Path) -> None:
    (tmp_path / "native").mkdir()
    found = set()
    sources = ["native/a.h", "native/a.h", "native/kernels.cpp", "linear.py", "linear.py"]
    for number, name in enumerate(sources):
        (tmp_path / name).write_text(str(number))
        found.add(kernels_fingerprint(tmp_path))
    assert len(found) == 5
    (tmp_path / "native" / "kernels_avx2.so").write_bytes(b"built")
    assert kernels_fingerprint(tmp_path) in found


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
