"""Measure the API process's CPU time per streamed token with the real model: `python -m bench.api_cpu`.

The model runs in a process of its own, so this covers HTTP, tokenization, text and events: the CPU time of
`syringa.http.server.process` over the tokens that its clients received.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from syringa.bench.load import run_load
from syringa.bench.processes import cpu_seconds, process_tree, start
from syringa.bench.runner import syringa_server
from syringa.bench.workload import PromptGenerator
from syringa.errors import StartupError

STREAMS, TOKENS, PROMPT_TOKENS = 16, 64, 100
REQUESTS = 8 * STREAMS  # /proc counts in 10 ms ticks: over 8,192 tokens an error below 2 µs per token
ROUNDS = 5
API = b"syringa.http.server.process"


def main() -> int:
    generator = PromptGenerator("api cpu")
    with start(syringa_server(), STREAMS) as server:
        api = _api_process(server.pid)
        _measure(server.url, api, generator, STREAMS)  # warms up
        results = []
        for _ in range(ROUNDS):
            results.append(_measure(server.url, api, generator, REQUESTS))
            print(f"{results[-1]:.1f} µs of the API process's CPU time per streamed token", flush=True)
    print(f"median {statistics.median(results):.1f} µs ({STREAMS} streams, {TOKENS} tokens each)")
    return 0


def _measure(url: str, api: int, generator: PromptGenerator, requests: int) -> float:
    """Return microseconds of API process CPU time per token."""
    prompts = [generator.text(PROMPT_TOKENS) for _ in range(requests)]
    before = cpu_seconds(api)
    load = run_load(url, prompts, model="default", max_tokens=TOKENS, streams=STREAMS, temperature=0, ignore_eos=True)
    spent = cpu_seconds(api) - before
    if load.errors or load.output_tokens != requests * TOKENS:
        raise StartupError(load.errors[0] if load.errors else f"got {load.output_tokens} tokens")
    return 1e6 * spent / load.output_tokens


def _api_process(root: int) -> int:
    (api_pid,) = (pid for pid in process_tree(root) if API in Path(f"/proc/{pid}/cmdline").read_bytes())
    return api_pid


if __name__ == "__main__":
    try:
        sys.exit(main())
    except StartupError as error:
        sys.exit(f"error: {error.message}")
