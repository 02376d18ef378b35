"""Whether `--deterministic` keeps its promise on a GPU, and what it costs: `python -m bench.gpu_steady [--model …]`.

Requests of every kind are answered one at a time, and then together, beside others, with and without reused prefixes,
in steps of other sizes, and with so little cache that they have to give it back: tokens and log-probabilities must be
the same to the bit. The engine as it is without the switch goes through the same, for comparison. Then both are timed
on `bench.gpu`'s workloads, one after the other.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
from typing import Any

import torch

from bench.gpu import build, drain, make_request, say, workload
from syringa.engine.gpu.batch_invariant_check import check_steady
from syringa.engine.loading.loader import LoadedModel
from syringa.engine.scheduling.scheduler import Limits
from syringa.engine.worker.core import EngineCore
from syringa.types import EngineRequest, Sampling, Stopping

RULES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 40, "min_p": 0.02},
    {"temperature": 1.0, "repetition_penalty": 1.2},
    {"temperature": 0.9, "dry_multiplier": 0.8, "frequency_penalty": 0.3},
]
CROWD = 40
ROOMY, CROWDED, ENOUGH = 100_000, 4_000, 400_000  # tokens of cache
LEAST = 64  # of a prompt that others begin with
Answers = dict[str, list[Any]]


def make_requests(vocabulary: int) -> list[EngineRequest]:
    rng = random.Random(5)
    common = [rng.randrange(vocabulary) for _ in range(300)]
    found = []
    for i in range(24):
        begin = common[: rng.randint(LEAST, 300)] if i % 3 == 0 else []
        prompt = [*begin, *(rng.randrange(vocabulary) for _ in range(rng.choice([1, 2, 17, 60, 250, 700])))]
        found.append(
            EngineRequest(
                id=str(i),
                prompt=prompt,
                sampling=Sampling(seed=i, **RULES[i % len(RULES)]),
                stopping=Stopping(max_tokens=rng.randint(20, 150), ignore_eos=True),
                choices=3 if i % 8 == 5 else 1,
                logprobs=5 if i % 2 else None,
                prompt_logprobs=2 if i % 6 == 4 else None,
            )
        )
    return found


def answer(core: EngineCore, requests: list[EngineRequest], beside: list[EngineRequest] | None = None) -> Answers:
    """All that is told of each request, joined."""
    told: Answers = {f"{r.id}/{choice}": [[], [], None] for r in requests for choice in range(r.choices)}
    for request in [*(beside or []), *requests]:
        core.submit(request)
    while core.busy:
        for _, delta in core.step():
            if delta.error:
                raise RuntimeError(delta.error)
            if line := told.get(f"{delta.request}/{delta.choice}"):
                line[0] += delta.tokens
                line[1] += delta.logprobs
                line[2] = delta.prompt_logprobs or line[2]
    return told


def ways(loaded: LoadedModel, requests: list[EngineRequest]) -> bool:
    """Whether each way to be served gives the same. Says of each how many answers do."""

    def engine(tokens: int = ROOMY, step: int = 8192, running: int = 64, caching: bool = True) -> EngineCore:
        limits = Limits(step_tokens=step, max_running=running, max_queue=4096)
        return EngineCore(loaded, limits, kv_cache_tokens=tokens, prefix_caching=caching)

    rng = random.Random(8)
    crowd = [make_request(rng, 1000 + i, rng.randint(1, 900), rng.randint(20, 200)) for i in range(CROWD)]
    core = engine(caching=False)
    alone: Answers = {}
    for request in requests:
        alone |= answer(core, [request])
    core.close()
    right = True
    settings: list[tuple[str, dict[str, int], list[EngineRequest]]] = [
        ("together", {}, []),
        ("beside others", {}, crowd),
        ("in small steps", {"step": 97, "running": 16}, crowd),
        ("with little cache", {"tokens": CROWDED, "step": 256}, crowd),
    ]
    for name, setting, beside in settings:
        core = engine(**setting)
        told = answer(core, requests, beside)
        again = answer(core, requests)  # whose prompts are in the cache now
        stats = core.stats()
        core.close()
        same, reused = (sum(each[key] == alone[key] for key in alone) for each in (told, again))
        say(f"  {name}: {same} of {len(alone)} the same, {reused} once more; {stats.preemptions} preemptions")
        right = right and same == reused == len(alone) and (stats.preemptions > 0) == ("tokens" in setting)
    return right


def speeds(loaded: LoadedModel, names: list[str], runs: int) -> dict[str, float]:
    limits = Limits(step_tokens=8192, max_running=256, max_queue=4096)
    core = EngineCore(loaded, limits, kv_cache_tokens=ENOUGH, prefix_caching=False)
    found = {}
    for name in names:
        best = 0.0
        for _ in range(runs):
            requests = workload(name, False)
            seconds, tokens, _ = drain(core, requests)
            best = max(best, (sum(len(r.prompt) for r in requests) if name == "prefill" else tokens) / seconds)
        found[name] = best
    core.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--workloads", default="decode_b1,decode_b64,nano256,prefill", help="empty: no timing")
    given = parser.parse_args()
    right, found = True, []
    for deterministic in (True, False):
        loaded = build(given.model, torch.device("cuda"), deterministic=deterministic)
        say(f"{given.model}, {'--deterministic' if deterministic else 'without it'}")
        if deterministic:
            check_steady(loaded)
            say("  no bit of products and attention depends on the batch")
        kept = ways(loaded, make_requests(100_000))
        right = right and (kept or not deterministic)
        found.append(speeds(loaded, given.workloads.split(","), given.runs) if given.workloads else {})
        del loaded
        gc.collect()
        torch.cuda.empty_cache()
    for name, steady in found[0].items():
        say(f"  {name}: {steady:,.0f} tok/s, without it {found[1][name]:,.0f}: {steady / found[1][name]:.2f}")
    say("ok" if right else "WRONG")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
