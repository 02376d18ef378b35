"""Measure what structured output costs, with the real model: `python -m bench.structured`.

First over HTTP: tokens per second of 16 streams with 16 different schemas, and of 16 unconstrained streams, alternating
on one server. Then the engine alone: the time of a decode step with and without token masks, and of compiling a schema
for the first and the second time.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

from syringa.bench.load import run_load
from syringa.bench.processes import start
from syringa.bench.runner import syringa_server
from syringa.bench.workload import PromptGenerator
from syringa.engine.loading.loaded_model import LoadOptions
from syringa.engine.loading.loader import load_model
from syringa.engine.worker.core import EngineCore
from syringa.errors import StartupError
from syringa.modelfiles import load_tokenizer, locate
from syringa.types import EngineRequest, Grammar, SamplingParams, StopConditions

STREAMS, TOKENS, PROMPT_TOKENS, ROUNDS = 16, 96, 100, 5


def schema(number: int) -> dict[str, Any]:
    """Return a distinct schema whose answer is longer than `TOKENS`, so that both sides generate the same number."""
    properties: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 24 + number},
        {"type": "integer", "minimum": -number, "maximum": 1000 * (number + 1)},
        {"enum": [f"color {number}", "red", "green", None]},
        {"anyOf": [{"type": "boolean"}, {"type": "number"}]},
        {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 5},
        {"type": "string", "pattern": "^[0-9]{4}-[01][0-9]-[0-3][0-9]$"},
    ]
    names = [f"field_{number}_{index}" for index in range(len(properties))]
    entry = {"type": "object", "properties": dict(zip(names, properties, strict=True)), "required": names}
    return {"type": "array", "items": {**entry, "additionalProperties": False}, "minItems": 50, "maxItems": 60}


SCHEMAS = [schema(number) for number in range(STREAMS)]


def measure_throughput() -> None:
    generator = PromptGenerator("structured")
    formats = [{"response_format": {"type": "json_schema", "json_schema": {"schema": each}}} for each in SCHEMAS]
    found: dict[str, list[float]] = {"free": [], "structured": []}
    with start(syringa_server(), STREAMS) as server:
        for round_number in range(ROUNDS + 1):
            for name, per_request in (("free", []), ("structured", formats)):
                prompts = [generator.text(PROMPT_TOKENS) for _ in range(2 * STREAMS)]
                load = run_load(
                    server.url,
                    prompts,
                    model="default",
                    max_tokens=TOKENS,
                    streams=STREAMS,
                    ignore_eos=True,
                    per_request=per_request,
                )
                if load.errors or load.output_tokens != len(prompts) * TOKENS:
                    raise StartupError(load.errors[0] if load.errors else f"got {load.output_tokens} tokens")
                if round_number:  # the first round warms up and compiles
                    found[name].append(load.tokens_per_second)
    for name, rates in found.items():
        print(f"{name:>11}: {statistics.median(rates):.0f} tokens/s ({min(rates):.0f} to {max(rates):.0f})")
    ratios = [constrained / free for free, constrained in zip(found["free"], found["structured"], strict=True)]
    print(f"structured ÷ free: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)


def measure_steps() -> None:
    tokenizer = load_tokenizer(locate("default"))
    core = EngineCore(load_model(LoadOptions(model="default")), prefix_caching=False, tokenizer_json=tokenizer.to_str)
    prompt = list(tokenizer.encode("Some examples, in JSON:").ids)
    grammars = [Grammar("json_schema", json.dumps(each)) for each in SCHEMAS]
    sets: dict[str, list[Grammar | None]] = {"free": [None] * STREAMS, "with masks": list(grammars)}
    found: dict[str, list[float]] = {name: [] for name in sets}
    for round_number in range(ROUNDS + 1):
        for name, each in sets.items():
            times, waited = _decode_steps(core, prompt, each)
            if round_number:
                found[name].append(statistics.median(times))
            if each[0] is not None and round_number < 2:
                print(f"{STREAMS} schemas, {'again' if round_number else 'first'}: queued after {waited:.1f} ms")
    core.close()
    for name, medians in found.items():
        print(f"decode step, {name}: {statistics.median(medians):.2f} ms ({min(medians):.2f} to {max(medians):.2f})")
    shares = [constrained / free - 1 for free, constrained in zip(found["free"], found["with masks"], strict=True)]
    print(f"masks cost {statistics.median(shares):+.1%} of a step ({min(shares):+.1%} to {max(shares):+.1%})")


def _decode_steps(core: EngineCore, prompt: list[int], grammars: list[Grammar | None]) -> tuple[list[float], float]:
    """Return the milliseconds of each step in which all streams decode, and those until all were queued."""
    started = time.perf_counter()
    for index, grammar in enumerate(grammars):
        sampling = SamplingParams(seed=index, temperature=1.0, grammar=grammar)
        stopping = StopConditions(max_tokens=TOKENS, ignore_eos=True)
        core.submit(EngineRequest(id=str(index), prompt=prompt, sampling=sampling, stopping=stopping))
    while len(core.pending):
        core.step()
    waited = 1000 * (time.perf_counter() - started)
    times = []
    while core.stats().running or core.stats().waiting:
        started = time.perf_counter()
        if len(core.step()) == len(grammars):
            times.append(1000 * (time.perf_counter() - started))
    return times, waited


if __name__ == "__main__":
    try:
        measure_throughput()
        measure_steps()
    except StartupError as error:
        sys.exit(f"error: {error.message}")
