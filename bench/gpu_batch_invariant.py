"""Check `--deterministic` on a GPU and measure its cost: `python -m bench.gpu_batch_invariant [--model …]`.

Requests of every kind are answered one at a time, then batched, beside others, with and without cached prefixes, in
steps of other sizes, and with so little cache that they are preempted: tokens and log-probabilities must be identical
to the bit. The engine without the option does the same for comparison. Then both are timed on `bench.gpu`'s workloads.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
from typing import Any

import torch

from bench.gpu_models import build_model
from bench.gpu_workloads import log, make_request, run_requests, workload
from syringa.engine.gpu.batch_invariant_check import check_batch_invariance
from syringa.engine.loading.loaded_model import LoadedModel
from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.engine.worker.core import EngineCore
from syringa.types import EngineRequest, SamplingParams, StopConditions

SAMPLING_VARIANTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 40, "min_p": 0.02},
    {"temperature": 1.0, "repetition_penalty": 1.2},
    {"temperature": 0.9, "dry_multiplier": 0.8, "frequency_penalty": 0.3},
]
BACKGROUND_REQUESTS = 40
LARGE_CACHE_TOKENS, SMALL_CACHE_TOKENS, THROUGHPUT_CACHE_TOKENS = 100_000, 4_000, 400_000
MIN_SHARED_PREFIX = 64  # tokens
Outputs = dict[str, list[Any]]  # by request and choice: tokens, log-probabilities, prompt log-probabilities


def make_requests(vocabulary: int) -> list[EngineRequest]:
    rng = random.Random(5)
    common = [rng.randrange(vocabulary) for _ in range(300)]
    requests = []
    for i in range(24):
        begin = common[: rng.randint(MIN_SHARED_PREFIX, 300)] if i % 3 == 0 else []
        prompt = [*begin, *(rng.randrange(vocabulary) for _ in range(rng.choice([1, 2, 17, 60, 250, 700])))]
        requests.append(
            EngineRequest(
                id=str(i),
                prompt=prompt,
                sampling=SamplingParams(seed=i, **SAMPLING_VARIANTS[i % len(SAMPLING_VARIANTS)]),
                stopping=StopConditions(max_tokens=rng.randint(20, 150), ignore_eos=True),
                choices=3 if i % 8 == 5 else 1,
                logprobs=5 if i % 2 else None,
                prompt_logprobs=2 if i % 6 == 4 else None,
            )
        )
    return requests


def generate(core: EngineCore, requests: list[EngineRequest], background: list[EngineRequest] | None = None) -> Outputs:
    """Run requests to completion and return the merged deltas of each choice of `requests`."""
    outputs: Outputs = {f"{r.id}/{choice}": [[], [], None] for r in requests for choice in range(r.choices)}
    for request in [*(background or []), *requests]:
        core.submit(request)
    while core.busy:
        for _, delta in core.step():
            if delta.error:
                raise RuntimeError(delta.error)
            if output := outputs.get(f"{delta.request_id}/{delta.choice}"):
                output[0] += delta.tokens
                output[1] += delta.logprobs
                output[2] = delta.prompt_logprobs or output[2]
    return outputs


def check_all_settings(loaded: LoadedModel, requests: list[EngineRequest]) -> bool:
    """Return whether all settings give the outputs of requests served one at a time. Logs the matches of each."""

    def engine(
        tokens: int = LARGE_CACHE_TOKENS, step: int = 8192, running: int = 64, caching: bool = True
    ) -> EngineCore:
        limits = SchedulerLimits(step_tokens=step, max_running=running, max_queue=4096)
        return EngineCore(loaded, limits, kv_cache_tokens=tokens, prefix_caching=caching)

    rng = random.Random(8)
    background = [
        make_request(rng, 1000 + i, rng.randint(1, 900), rng.randint(20, 200)) for i in range(BACKGROUND_REQUESTS)
    ]
    core = engine(caching=False)
    alone: Outputs = {}
    for request in requests:
        alone |= generate(core, [request])
    core.close()
    passed = True
    settings: list[tuple[str, dict[str, int], list[EngineRequest]]] = [
        ("batched", {}, []),
        ("with background load", {}, background),
        ("small steps", {"step": 97, "running": 16}, background),
        ("small cache", {"tokens": SMALL_CACHE_TOKENS, "step": 256}, background),
    ]
    for name, setting, others in settings:
        core = engine(**setting)
        outputs = generate(core, requests, others)
        again = generate(core, requests)  # prompts are in the prefix cache now
        stats = core.stats()
        core.close()
        same, reused = (sum(each[key] == alone[key] for key in alone) for each in (outputs, again))
        log(f"  {name}: {same} of {len(alone)} equal, {reused} with cached prefixes; {stats.preemptions} preemptions")
        passed = passed and same == reused == len(alone) and (stats.preemptions > 0) == ("tokens" in setting)
    return passed


def measure_throughput(loaded: LoadedModel, names: list[str], runs: int) -> dict[str, float]:
    limits = SchedulerLimits(step_tokens=8192, max_running=256, max_queue=4096)
    core = EngineCore(loaded, limits, kv_cache_tokens=THROUGHPUT_CACHE_TOKENS, prefix_caching=False)
    found = {}
    for name in names:
        best = 0.0
        for _ in range(runs):
            requests = workload(name, False)
            seconds, tokens, _ = run_requests(core, requests)
            best = max(best, (sum(len(r.prompt) for r in requests) if name == "prefill" else tokens) / seconds)
        found[name] = best
    core.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--workloads", default="decode_b1,decode_b64,nano256,prefill", help="empty: no timing")
    options = parser.parse_args()
    passed, results = True, []
    for deterministic in (True, False):
        loaded = build_model(options.model, torch.device("cuda"), deterministic=deterministic)
        log(f"{options.model}, {'--deterministic' if deterministic else 'without it'}")
        if deterministic:
            check_batch_invariance(loaded)
            log("  matmul and attention kernels are batch-invariant")
        identical = check_all_settings(loaded, make_requests(100_000))
        passed = passed and (identical or not deterministic)
        results.append(
            measure_throughput(loaded, options.workloads.split(","), options.runs) if options.workloads else {}
        )
        del loaded
        gc.collect()
        torch.cuda.empty_cache()
    for name, rate in results[0].items():
        log(f"  {name}: {rate:,.0f} tok/s, without it {results[1][name]:,.0f}: {rate / results[1][name]:.2f}")
    log("ok" if passed else "WRONG")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
