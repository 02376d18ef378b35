"""Compare embeddings on this machine's CPU with sentence-transformers and onnxruntime: `python -m bench.embeddings`.

    python -m bench.embeddings --python VENV/bin/python --onnx FOLDER
    python -m bench.embeddings … --write           write the table to docs/performance.md as well
    python -m bench.embeddings … --quick           a short run, which only shows that everything works

VENV is an environment with sentence-transformers and onnxruntime. The model of Syringa and sentence-transformers is
all-MiniLM-L6-v2, of `syringa pull embedding`; FOLDER has the same model for onnxruntime, in int8. Every engine gets the
same texts of mixed lengths and returns vectors, tokenizing included. One computes at a time; rounds are interleaved.
The cost of padding is the time of a batch of mixed lengths over that of the same words in texts of equal length. The
vectors of 500 texts are compared with those of sentence-transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from bench.pages import replace_section
from syringa.bench.processes import cores, cpu_name
from syringa.bench.report import make_spread, spread_text
from syringa.engine.cpu.native import kernel_variant

ROOT = Path(__file__).resolve().parents[1]
TEXTS = sorted((ROOT / "tests" / "data" / "texts").glob("*.txt"))
RESULTS = ROOT / "bench" / "results" / "embeddings.json"
PAGE = ROOT / "docs" / "performance.md"
RUNNER = ROOT / "bench" / "embedding_runner.py"
ENGINES = ("syringa", "sentence-transformers", "onnxruntime")
REFERENCE = "sentence-transformers"
BATCHES = {1: 64, 64: 256}  # texts of a round by the size of a batch
TARGETS = {1: 1.0, 64: 1.5}  # times the best of the others
ROUNDS, REPEAT, QUICK_DIVISOR = 7, 3, 8
CHECKED_TEXTS = 500
COSINES = {"fp32": (0.9999, 0.9999), "int8": (0.999, 0.99)}  # the mean and the lowest that are wanted
# Words of a text, and how many of a hundred texts have so many: questions, paragraphs and pages.
WORDS = (((3, 12), 40), ((20, 60), 40), ((80, 160), 20))


def make_texts(count: int, seed: int = 5) -> list[str]:
    """Return pieces of the texts of the tests, of mixed lengths."""
    draw = random.Random(seed)
    words = [path.read_text(encoding="utf-8").split() for path in TEXTS]
    ranges = draw.choices([each for each, _ in WORDS], [weight for _, weight in WORDS], k=count)
    texts = []
    for index, (least, most) in enumerate(ranges):
        source, length = words[index % len(words)], draw.randint(least, most)
        begin = draw.randrange(max(1, len(source) - length))
        texts.append(" ".join(source[begin : begin + length]))
    return texts


def even_texts(texts: Sequence[str]) -> list[str]:
    """Return the words of texts in as many texts of equal length."""
    words = [word for text in texts for word in text.split()]
    ends = [len(words) * number // len(texts) for number in range(len(texts) + 1)]
    return [" ".join(words[begin:end]) for begin, end in itertools.pairwise(ends)]


class Runner:
    """The process of an engine."""

    def __init__(self, engine: str, python: str, model: str, threads: int, onnx: str) -> None:
        command = [python, str(RUNNER), engine, model, str(threads), onnx]
        environment = {**os.environ, "PYTHONPATH": str(ROOT) if engine.startswith("syringa") else ""}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        self._read()

    def run(self, texts: Sequence[str], batch: int, *, repeat: int = 1, vectors: bool = False) -> dict[str, Any]:
        assert self._process.stdin is not None
        task = {"texts": list(texts), "batch": batch, "repeat": repeat, "vectors": vectors}
        print(json.dumps(task), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"an engine ended with status {self._process.wait()}; its messages are above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def runners(options: argparse.Namespace, names: Sequence[str]) -> Iterator[dict[str, Runner]]:
    made: dict[str, Runner] = {}
    try:
        for name in names:
            python = sys.executable if name.startswith("syringa") else options.python
            made[name] = Runner(name, python, options.model, options.threads, options.onnx)
        yield made
    finally:
        for runner in made.values():
            runner.close()


def measure(
    engines: Mapping[str, Runner], rounds: int, report: Console, *, quick: bool = False
) -> dict[str, dict[str, list[float]]]:
    """Return the texts per second of each round by the size of a batch and engine."""
    found: dict[str, dict[str, list[float]]] = {str(batch): {name: [] for name in engines} for batch in BATCHES}
    for number in range(1, rounds + 1):
        for batch, texts_of_round in BATCHES.items():
            count = max(batch, texts_of_round // QUICK_DIVISOR) if quick else texts_of_round
            texts = make_texts(count, seed=number)
            for name, runner in engines.items():
                seconds = min(runner.run(texts, batch, repeat=1 if quick else REPEAT)["seconds"])
                found[str(batch)][name].append(count / seconds)
                report.print(f"round {number}  batch {batch:2}  {name:22} {count / seconds:8.1f} texts/s")
    return found


def measure_padding(engines: Mapping[str, Runner], rounds: int, report: Console) -> dict[str, list[float]]:
    """Return the time of batches of mixed lengths relative to that of equal lengths, by engine."""
    batch = max(BATCHES)
    found: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(1, rounds + 1):
        # Batch by batch, so that both have the same number of tokens in each call.
        texts = make_texts(batch, seed=100 + number)
        for name, runner in engines.items():
            mixed, even = (
                min(runner.run(each, batch, repeat=REPEAT)["seconds"]) for each in (texts, even_texts(texts))
            )
            found[name].append(mixed / even)
            report.print(f"round {number}  mixed / equal lengths  {name:22} {mixed / even:.2f}")
    return found


def compare_vectors(options: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Return the mean and the lowest cosine with the vectors of sentence-transformers: of each dtype, and of ONNX's."""
    import numpy as np

    texts = make_texts(CHECKED_TEXTS // QUICK_DIVISOR if options.quick else CHECKED_TEXTS, seed=0)
    vectors: dict[str, Any] = {}
    compared = {"fp32": "syringa-fp32", "int8": "syringa-int8", "onnxruntime": "onnxruntime"}
    for name in (REFERENCE, *compared.values()):
        with runners(options, [name]) as engines:
            rows = np.array(engines[name].run(texts, 64, vectors=True)["vectors"])
            vectors[name] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    found = {}
    for label, name in compared.items():
        cosines = (vectors[name] * vectors[REFERENCE]).sum(1)
        found[label] = (float(cosines.mean()), float(cosines.min()))
    return found


def ratio(batch: int, found: Mapping[str, Mapping[str, Sequence[float]]]) -> float:
    """Return Syringa's median relative to the best of the others."""
    medians = {name: statistics.median(values) for name, values in found[str(batch)].items()}
    return medians["syringa"] / max(value for name, value in medians.items() if name != "syringa")


def table_rows(found: Mapping[str, Mapping[str, Sequence[float]]]) -> list[list[str]]:
    rows = []
    for batch, target in TARGETS.items():
        own = found[str(batch)]
        best = ratio(batch, found)
        texts = [spread_text(make_spread(own[name])) for name in ENGINES]
        rows.append([str(batch), *texts, f"{best:.2f} ×", f"≥ {target:g} ×", "yes" if best >= target else "no"])
    return rows


HEADER = ("batch", "Syringa, int8", "sentence-transformers", "onnxruntime, int8", "of the best", "target", "met")


def accuracy_text(cosines: Mapping[str, tuple[float, float]]) -> str:
    parts = [f"{dtype}: mean {mean:.6f}, lowest {least:.6f}" for dtype, (mean, least) in cosines.items()]
    return f"Cosine with sentence-transformers' vectors of {CHECKED_TEXTS} texts: {'; '.join(parts)}."


def is_accurate(cosines: Mapping[str, tuple[float, float]]) -> bool:
    wanted = {dtype: least for dtype, least in COSINES.items() if dtype in cosines}
    return all(found >= least for dtype in wanted for found, least in zip(cosines[dtype], wanted[dtype], strict=True))


def padding_text(padding: Mapping[str, Sequence[float]]) -> str:
    parts = [f"{name} {statistics.median(values):.2f} ×" for name, values in padding.items()]
    what = f"A batch of {max(BATCHES)} texts of mixed lengths takes, of the time of texts of equal length"
    return f"{what}: {', '.join(parts)}."


def write_page(
    about: str, found: Mapping[str, Mapping[str, Sequence[float]]], notes: Sequence[str], page: Path = PAGE
) -> None:
    """Replace the table and the notes below it, between markers. Raises `ValueError` if they are missing."""
    lines = [about, "", "| " + " | ".join(HEADER) + " |", "| ---: | ---: | ---: | ---: | ---: | ---: | --- |"]
    lines += ["| " + " | ".join(row) + " |" for row in table_rows(found)]
    replace_section(page, "embeddings", [*lines, *(line for note in notes for line in ("", *textwrap.wrap(note, 100)))])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.embeddings", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="interpreter with sentence-transformers and onnxruntime")
    parser.add_argument("--onnx", required=True, help="folder with the model for onnxruntime")
    parser.add_argument("--model", default="embedding", help="model id or folder (default: embedding)")
    parser.add_argument("--threads", type=int, default=cores(), help="of every engine (default: all cores)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"(default: {ROUNDS})")
    parser.add_argument("--quick", action="store_true", help="one short round, of which nothing is written")
    parser.add_argument("--write", action="store_true", help="write the table to docs/performance.md as well")
    options = parser.parse_args(arguments)
    options.model = _folder(options.model)
    console = Console(highlight=False)
    if (load := os.getloadavg()[0]) > 0.5:
        console.print(f"[yellow]this machine is busy (load {load:.1f}): the ratios will not be fair[/]")
    if options.quick:
        options.rounds = 1
    with runners(options, ENGINES) as engines:
        found = measure(engines, options.rounds, console, quick=options.quick)
        padding = measure_padding(engines, options.rounds, console)
    cosines = compare_vectors(options)
    notes = [padding_text(padding), accuracy_text(cosines)]
    about = (
        f"{datetime.date.today()}, {cpu_name()} ({kernel_variant()}), {options.threads} threads, texts per second, "
        f"{options.rounds} interleaved rounds."
    )
    table = Table(*HEADER, title=about, title_justify="left")
    for row in table_rows(found):
        table.add_row(*row)
    console.print(table)
    for note in notes:
        console.print(note)
    passed = all(ratio(batch, found) >= target for batch, target in TARGETS.items()) and is_accurate(cosines)
    if options.quick:
        console.print("A quick run only shows that everything works; its figures are not written.")
        return 0
    if options.rounds >= ROUNDS:
        document = {
            "about": about,
            "passed": passed,
            "texts_per_second": found,
            "mixed_over_equal_lengths": padding,
            "cosines": cosines,
        }
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
        console.print(f"written: {os.path.relpath(RESULTS)}")
    if options.write:
        write_page(about, found, notes)
        console.print(f"written: {os.path.relpath(PAGE)}")
    return 0 if passed else 1


def _folder(model: str) -> str:
    """Return the folder of a model: the other engines do not know our names."""
    from syringa.modelfiles import locate

    return locate(model).path


if __name__ == "__main__":
    sys.exit(main())
