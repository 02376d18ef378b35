"""Measure what a model's quantized products cost: perplexity against its weights in fp32.

    python -m bench.perplexity                     qwen2.5-coder-1.5b of the catalog, the four texts of the tests
    python -m bench.perplexity --tokens 1024       the beginning of each text only
    python -m bench.perplexity --resume            keep what an earlier, interrupted run has measured

One precision is in memory at a time; fp32 takes 4 bytes per weight (6 GB for 1.5B). Every text is written to the
results as soon as it is measured, with a fingerprint of the kernels: results of others are not resumed.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import hashlib
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.pages import replace_section
from syringa.engine.cpu.features import disable_broken_amx
from syringa.engine.cpu.native import kernel_variant
from syringa.errors import ConfigError, SyringaError
from syringa.modelfiles import ModelFiles, load_tokenizer, locate
from syringa.types import EngineRequest, SamplingParams, StopConditions

if TYPE_CHECKING:  # torch is imported after disable_broken_amx
    from syringa.engine.worker.core import EngineCore

ROOT = Path(__file__).resolve().parents[1]
TEXTS = sorted((ROOT / "tests" / "data" / "texts").glob("*.txt"))
RESULTS = ROOT / "bench" / "results" / "perplexity.json"
PAGE = ROOT / "docs" / "performance.md"
KERNELS = ROOT / "syringa" / "engine" / "cpu"
REFERENCE = "fp32"
LIMIT = 1.01  # of the perplexity in fp32


class TextPerplexity(msgspec.Struct):
    """The perplexity of one text by precision."""

    text: str
    tokens: int
    values: dict[str, float] = {}

    def ratio(self, dtype: str) -> float | None:
        measured, reference = self.values.get(dtype), self.values.get(REFERENCE)
        return measured / reference if measured and reference else None


class PerplexityResults(msgspec.Struct):
    """The results file."""

    model: str
    day: str
    texts: list[TextPerplexity]
    kernels: str = ""  # `kernels_fingerprint` of all of them


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    console = Console(highlight=False)
    try:
        files = locate(options.model)
        prompts = _prompts(files, options.tokens)
        results = load_results(options.output, files.name, prompts) if options.resume else None
        if results is None:
            texts = [TextPerplexity(text=name, tokens=len(tokens)) for name, tokens in prompts.items()]
            day = datetime.date.today().isoformat()
            results = PerplexityResults(model=files.name, day=day, texts=texts, kernels=kernels_fingerprint())
        for dtype in (options.dtype, REFERENCE):
            _measure(console, files, dtype, prompts, results, options.output)
    except SyringaError as error:
        console.print(f"[red]{escape(error.message)}[/]")
        return 1
    console.print(_table(results, options.dtype))
    if options.write:
        replace_section(PAGE, "perplexity", render_markdown(results, options.dtype))
    ratios = [text.ratio(options.dtype) or math.inf for text in results.texts]
    return 0 if max(ratios) <= LIMIT else 1


def _measure(
    console: Console,
    files: ModelFiles,
    dtype: str,
    prompts: dict[str, list[int]],
    results: PerplexityResults,
    output: Path,
) -> None:
    """Measure the texts that have no result in this precision, and write each to `output` at once."""
    missing = [text for text in results.texts if dtype not in text.values]
    if not missing:
        return
    disable_broken_amx(REFERENCE)
    from syringa.engine.loading.loaded_model import LoadOptions
    from syringa.engine.loading.loader import load_model
    from syringa.engine.worker.core import EngineCore

    console.print(f"loading {files.name} in {dtype} …")
    longest = max(text.tokens for text in missing)
    loaded = load_model(LoadOptions(model=files.path, dtype=dtype, max_model_len=longest + 1, device="cpu"))
    core = EngineCore(loaded, kv_cache_tokens=longest + 64, prefix_caching=False)
    try:
        for text in missing:
            begun = time.perf_counter()
            text.values[dtype] = perplexity(core, prompts[text.text])
            seconds = time.perf_counter() - begun
            console.print(f"{text.text}, {text.tokens} tokens, {dtype}: {text.values[dtype]:.4f} ({seconds:.0f} s)")
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
    finally:
        core.close()
    del core, loaded
    gc.collect()  # the next precision needs the memory


def perplexity(core: EngineCore, tokens: Sequence[int]) -> float:
    """Return the perplexity of all tokens but the first, whose probability depends on nothing."""
    request = EngineRequest(
        id="text",
        prompt=list(tokens),
        sampling=SamplingParams(seed=0),
        stopping=StopConditions(max_tokens=0),
        prompt_logprobs=0,
    )
    logprobs: list[float] = []
    core.submit(request)
    while core.busy:
        for _, delta in core.step():
            if delta.error:
                raise RuntimeError(delta.error)
            if delta.prompt_logprobs is not None:
                logprobs = [score.logprob for score in delta.prompt_logprobs if score is not None]
    if len(logprobs) != len(tokens) - 1:
        raise RuntimeError(f"{len(logprobs)} log-probabilities for {len(tokens)} tokens")
    return math.exp(-sum(logprobs) / len(logprobs))


def _prompts(files: ModelFiles, limit: int) -> dict[str, list[int]]:
    tokenizer = load_tokenizer(files)
    prompts = {path.stem: list(tokenizer.encode(path.read_text(encoding="utf-8")).ids) for path in TEXTS}
    return {name: tokens[:limit] if limit else tokens for name, tokens in prompts.items()}


def load_results(path: Path, model: str, prompts: dict[str, list[int]]) -> PerplexityResults | None:
    """Return the results of an earlier run, if it was of the same model and the same number of tokens.

    Raise `ConfigError` if it was of other kernels: half of the table would be theirs.
    """
    if not path.is_file():
        return None
    results = msgspec.json.decode(path.read_bytes(), type=PerplexityResults)
    same = {text.text: text.tokens for text in results.texts} == {name: len(each) for name, each in prompts.items()}
    if not same or results.model != model:
        return None
    if results.kernels != (current := kernels_fingerprint()):
        raise ConfigError(
            f"{path} was measured with other kernels ({results.kernels or 'not recorded'}, and these are {current}): "
            "leave out --resume"
        )
    return results


def kernels_fingerprint(folder: Path = KERNELS) -> str:
    """Return a hash of what decides about the products: the sources of kernels and layers, and the instruction set."""
    digest = hashlib.sha256((kernel_variant() or "").encode())
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".py", ".h", ".cpp"):
            digest.update(f"\0{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _rows(results: PerplexityResults, dtype: str) -> list[list[str]]:
    rows = [["text", "tokens", REFERENCE, dtype, ""]]
    for text in results.texts:
        figures = [f"{text.values[each]:.3f}" for each in (REFERENCE, dtype)]
        rows.append([text.text, f"{text.tokens:,}", *figures, _percent(text.ratio(dtype))])
    ratios = [ratio for text in results.texts if (ratio := text.ratio(dtype)) is not None]
    rows.append(["mean", "", "", "", _percent(sum(ratios) / len(ratios))])
    return rows


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * (ratio - 1):+.2f} %"


def _table(results: PerplexityResults, dtype: str) -> Table:
    header, *rows = _rows(results, dtype)
    table = Table(*header, title=f"Perplexity of {results.model}")
    for row in rows:
        table.add_row(*row)
    return table


def render_markdown(results: PerplexityResults, dtype: str) -> list[str]:
    header, *rows = _rows(results, dtype)
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return [f"{results.day}:", "", *("| " + " | ".join(line) + " |" for line in lines)]


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.perplexity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen2.5-coder-1.5b", help="name, GGUF file or folder")
    parser.add_argument("--dtype", choices=["gguf", "int8", "bf16"], default="gguf", help="(default: gguf)")
    parser.add_argument("--tokens", type=int, default=0, help="of each text at most; 0: all (default)")
    parser.add_argument(
        "--resume", action="store_true", help="keep the results of an earlier run of the same texts and kernels"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="results file (default: bench/results)")
    parser.add_argument("--write", action="store_true", help="write the table to docs/performance.md as well")
    options = parser.parse_args(arguments)
    if options.tokens < 0 or options.tokens == 1:
        parser.error("--tokens is a number from 2, or 0")
    return options


if __name__ == "__main__":
    sys.exit(main())
