"""The table of the benchmark with a larger model, from measurements that are made up."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import larger_model
from bench.larger_model import LargerModelRun, read_bandwidth, summarize_rows, weight_bytes, write_page
from syringa.bench.report import LoadSample, ServerRun, Spread
from tests.modelfiles.gguf_builder import gguf, llama


def sample(streams: int, rate: float, between: float = 0.05) -> LoadSample:
    return LoadSample(
        streams=streams,
        requests=streams,
        output_tokens=64 * streams,
        seconds=64 * streams / rate,
        tokens_per_second=rate,
        first_token_median=0.5,
        first_token_max=0.6,
        between_tokens_median=between,
        client_cpu_share=0.02,
    )


def measured(server: str, number: int, *, between: float, rate: float, starts: list[float]) -> LargerModelRun:
    run = ServerRun(
        server=server,
        version="",
        precision="",
        round=number,
        samples=[sample(1, 20, between), sample(8, rate), sample(16, rate)],
        starts=starts,
        long_first_token=[100 / rate],
        memory_bytes=int(rate * 2**20),
        resident_bytes=int(rate * 2**20),
        filled_memory_bytes=int((rate + 5) * 2**20) if number == 1 else None,
    )
    return LargerModelRun(run=run, bandwidth=20e9, bytes_per_token=1_000_000_000)


RUNS = [
    measured("syringa", 1, between=0.05, rate=40, starts=[3.0, 4.0, 5.0]),
    measured("llama.cpp", 1, between=0.05, rate=10, starts=[2.0]),
    measured("syringa", 2, between=0.06, rate=44, starts=[3.0, 7.0, 3.0]),
    measured("llama.cpp", 2, between=0.04, rate=12, starts=[2.0]),
]


def test_summarize_rows_compares_medians_with_targets() -> None:
    rows = {row.key: row for row in summarize_rows(RUNS)}
    assert rows["ready"].values["syringa"] == Spread(3.5, 3.0, 7.0, 6)
    assert rows["ready"].met is False  # one start took more than 6 s
    assert rows["token_time"].ratio == pytest.approx(55 / 45)
    assert rows["token_time"].met is False
    assert rows["bandwidth_share"].values["syringa"].median == pytest.approx(100 * (1 + 1 / 1.2) / 2)
    assert rows["bandwidth_share"].met is True
    assert rows["streams_8"].ratio == pytest.approx(42 / 11)
    assert rows["streams_16"].met is True
    assert rows["first_token_1000"].met is True
    assert rows["memory"].met is False
    assert rows["filled_memory"].values == {
        "syringa": Spread(45.0, 45.0, 45.0, 1),
        "llama.cpp": Spread(15.0, 15.0, 15.0, 1),
    }
    assert (rows["filled_memory"].ratio, rows["filled_memory"].met) == (3.0, False)
    assert rows["first_token_100"].met is None
    assert rows["bandwidth"].ratio is None


def test_read_bandwidth_counts_the_bytes_of_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 0.5)
    monkeypatch.setattr(larger_model, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert read_bandwidth(2, size=2**21) == 2 * 2**21 / 0.5


def test_summarize_rows_keeps_figures_of_one_server_if_the_other_failed() -> None:
    failed = LargerModelRun(
        run=ServerRun(server="llama.cpp", version="", precision="", round=1, error="no"),
        bandwidth=20e9,
        bytes_per_token=1,
    )
    rows = {row.key: row for row in summarize_rows([RUNS[0], failed])}
    assert rows["token_time"].ratio is None
    assert rows["token_time"].met is None
    assert rows["ready"].met is True


def test_write_page_replaces_the_table_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- larger model -->\nold\n<!-- end of larger model -->\nafter\n")
    write_page("measured today", summarize_rows(RUNS), ["llama.cpp, round 1: died\ntrace"], page)
    text = page.read_text()
    assert text.startswith("before\n<!-- larger model -->\nmeasured today\n\n| |")
    assert text.endswith("<!-- end of larger model -->\nafter\n")
    assert "| 8 streams, tok/s | 42.0 (40.0–44.0) | 11.0 (10.0–12.0) | 3.82 × | ≥ 3 × | yes |" in text
    assert "FAILED: llama.cpp, round 1: died\n" in text
    assert "old" not in text
    assert "trace" not in text


def test_weight_bytes_counts_embeddings_only_if_they_are_the_output_layer(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    tensors = {"token_embd.weight": (8, 6), "blk.0.attn_q.weight": (8, 8)}
    path.write_bytes(gguf(llama(), tensors))
    assert weight_bytes(path) == 4 * (8 * 6 + 8 * 8)
    path.write_bytes(gguf(llama(), tensors | {"output.weight": (8, 6)}))
    assert weight_bytes(path) == 4 * (8 * 8 + 8 * 6)
