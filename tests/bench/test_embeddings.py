from __future__ import annotations

from pathlib import Path

from bench.embeddings import (
    accuracy_text,
    even_texts,
    is_accurate,
    make_texts,
    padding_text,
    table_rows,
    write_page,
)

FOUND = {
    "1": {"syringa": [90.0, 100.0, 110.0], "sentence-transformers": [50.0], "onnxruntime": [100.0]},
    "64": {"syringa": [140.0], "sentence-transformers": [100.0], "onnxruntime": [80.0]},
}


def test_table_compares_with_the_best_of_the_others(tmp_path: Path) -> None:
    assert [row[-3:] for row in table_rows(FOUND)] == [["1.00 ×", "≥ 1 ×", "yes"], ["1.40 ×", "≥ 1.5 ×", "no"]]
    assert table_rows(FOUND)[0][:2] == ["1", "100 (90.0–110)"]
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- embeddings -->\nold\n<!-- end of embeddings -->\nafter\n")
    notes = [padding_text({"syringa": [1.1, 1.0, 1.2]}), accuracy_text({"int8": (0.9995, 0.996)})]
    write_page("3 rounds.", FOUND, notes, page)
    text = page.read_text()
    assert max(len(line) for line in text.splitlines() if not line.startswith("|")) <= 100
    text = text.replace("\n", " ")
    assert text.startswith("before <!-- embeddings --> 3 rounds.  | batch |")
    assert "of the time of texts of equal length: syringa 1.10 ×.  Cosine" in text
    assert "int8: mean 0.999500, lowest 0.996000. <!-- end of embeddings --> after " in text
    assert "old" not in text


def test_texts_have_mixed_lengths_and_are_the_same_for_every_engine() -> None:
    texts = make_texts(100, seed=3)
    lengths = [len(text.split()) for text in texts]
    assert texts == make_texts(100, seed=3)
    assert min(lengths) <= 12
    assert max(lengths) >= 80


def test_even_texts_have_the_same_words() -> None:
    texts = make_texts(64, seed=1)
    even = even_texts(texts)
    assert " ".join(even).split() == " ".join(texts).split()
    lengths = [len(text.split()) for text in even]
    assert len(even) == 64
    assert max(lengths) - min(lengths) <= 1


def test_accuracy_is_that_of_the_mean_and_of_the_lowest() -> None:
    assert is_accurate({"fp32": (0.99995, 0.9999), "int8": (0.9995, 0.991)})
    assert not is_accurate({"fp32": (0.9999, 0.9998)})
    assert not is_accurate({"int8": (0.9989, 0.991)})
    assert not is_accurate({"int8": (0.9995, 0.98)})
