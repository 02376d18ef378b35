"""Check that the engine survives running out of GPU memory: part of `bench.gpu_check`.

Once the engine is loaded, other tensors take nearly all free memory, so that large steps fail: long prompts, and
prompts whose log-probabilities are wanted, with a row of 150,000 logits per token.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import torch

from bench.gpu_check import Log, count_unlikely_tokens
from bench.gpu_models import build_model
from bench.gpu_workloads import make_request
from syringa.engine.loading.loaded_model import LoadedModel
from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.engine.worker.core import EngineCore
from syringa.types import EngineRequest

MIB = 1 << 20
LIMITS = SchedulerLimits(step_tokens=8192, max_running=64)
FREE_MIB = (None, 160, 48)  # memory left for steps; None: all


@dataclass
class OomRunResult:
    outputs: dict[str, list[int]]
    scored: dict[str, int] = field(default_factory=dict)  # prompt tokens by request
    errors: int = 0
    failures: int = 0  # steps that ran out of memory
    smallest: int = LIMITS.step_tokens  # lowest token limit of a step
    lost: int = 0  # blocks neither free nor cached at the end


def make_requests(count: int = 72) -> list[EngineRequest]:
    rng = random.Random(17)
    requests = [make_request(rng, i, rng.randint(20, 1_500), rng.randint(2, 40), 0.0) for i in range(count)]
    return [msgspec.structs.replace(each, prompt_logprobs=2) if i % 6 == 0 else each for i, each in enumerate(requests)]


def occupy_memory(free_mib: int) -> list[torch.Tensor]:
    """Allocate all free memory but `free_mib` MiB, in pieces of decreasing size."""
    torch.cuda.empty_cache()
    taken = []
    size = 1 << 33
    while size >= 2 * MIB:
        free, _ = torch.cuda.mem_get_info()
        if free - free_mib * MIB < size:
            size //= 2
            continue
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return taken


def run(loaded: LoadedModel, requests: list[EngineRequest], free_mib: int | None) -> OomRunResult:
    core = EngineCore(loaded, LIMITS, kv_cache_tokens=60_000)
    assert core.runner
    result = OomRunResult({each.id: [] for each in requests})
    occupied = occupy_memory(free_mib) if free_mib is not None else []
    for request in requests:
        core.submit(request)
    while core.busy:
        for _, delta in core.step():
            result.outputs[delta.request_id] += delta.tokens
            result.errors += delta.error is not None
            if delta.prompt_logprobs is not None:
                result.scored[delta.request_id] = len(delta.prompt_logprobs)
        result.failures += core.executor.out_of_memory
        result.smallest = min(result.smallest, core.scheduler.oom_backoff.limit)
    occupied.clear()
    stats = core.stats()
    result.lost = stats.blocks_total - stats.blocks_free - stats.blocks_cached
    core.close()
    torch.cuda.empty_cache()
    return result


def check_oom(log: Log) -> bool:
    loaded = build_model("qwen3-0.6b", torch.device("cuda"), length=2048, num_hidden_layers=3)
    requests = make_requests()
    passed, expected = True, None
    for free_mib in FREE_MIB:
        result = run(loaded, requests, free_mib)
        expected = expected or result
        alike = sum(result.outputs[each.id] == expected.outputs[each.id] for each in requests)
        whole = all(len(result.outputs[each.id]) == each.stopping.max_tokens for each in requests)
        scored = all(
            result.scored[each.id] == len(each.prompt) for each in requests if each.prompt_logprobs is not None
        )
        unlikely = count_unlikely_tokens(loaded, requests, result.outputs, 0.06)
        fine = whole and scored and unlikely == 0 and not result.errors and not result.lost
        passed &= fine and (free_mib is None) == (result.failures == 0)
        log(
            f"  {'all memory' if free_mib is None else f'{free_mib} MiB'}: {result.failures} steps failed, steps of "
            f"{result.smallest} tokens at least, {result.errors} errors, {result.lost} blocks lost; "
            f"{alike} of {len(requests)} outputs as with all memory, {unlikely} tokens unlikely for the reference"
            f"{'' if fine else ' WRONG'}"
        )
    return passed
