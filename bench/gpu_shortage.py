"""Whether the engine gets through when a GPU's memory runs out under it: part of `bench.gpu_check`.

Another tensor takes nearly all that is free once the engine is there, so that large steps cannot be computed: long
prompts, and prompts whose own tokens are scored, which takes a row of 150,000 logits each.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import torch

from bench.gpu import build, make_request
from bench.gpu_check import Say, strangers
from syringa.engine.loading.loader import LoadedModel
from syringa.engine.scheduling.limits import Limits
from syringa.engine.worker.core import EngineCore
from syringa.types import EngineRequest

MIB = 1 << 20
LIMITS = Limits(step_tokens=8192, max_running=64)
ROOM = (None, 160, 48)  # MiB that are left to compute with


@dataclass
class Outcome:
    told: dict[str, list[int]]
    scored: dict[str, int] = field(default_factory=dict)  # prompt tokens
    errors: int = 0
    failures: int = 0  # steps
    smallest: int = LIMITS.step_tokens  # tokens of a step, as bounded
    lost: int = 0  # blocks


def make_requests(count: int = 72) -> list[EngineRequest]:
    rng = random.Random(17)
    made = [make_request(rng, i, rng.randint(20, 1_500), rng.randint(2, 40), 0.0) for i in range(count)]
    return [msgspec.structs.replace(each, prompt_logprobs=2) if i % 6 == 0 else each for i, each in enumerate(made)]


def balloon(room: int) -> list[torch.Tensor]:
    """Takes what is free but for `room` MiB, in pieces."""
    torch.cuda.empty_cache()
    taken = []
    size = 1 << 33
    while size >= 2 * MIB:
        free, _ = torch.cuda.mem_get_info()
        if free - room * MIB < size:
            size //= 2
            continue
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return taken


def run(loaded: LoadedModel, requests: list[EngineRequest], room: int | None) -> Outcome:
    core = EngineCore(loaded, LIMITS, kv_cache_tokens=60_000)
    assert core.ahead
    found = Outcome({each.id: [] for each in requests})
    held = balloon(room) if room is not None else []
    for request in requests:
        core.submit(request)
    while core.busy:
        for _, delta in core.step():
            found.told[delta.request] += delta.tokens
            found.errors += delta.error is not None
            if delta.prompt_logprobs is not None:
                found.scored[delta.request] = len(delta.prompt_logprobs)
        found.failures += core.ahead.short
        found.smallest = min(found.smallest, core.scheduler.relief.limit)
    held.clear()
    stats = core.stats()
    found.lost = stats.blocks_total - stats.blocks_free - stats.blocks_cached
    core.close()
    torch.cuda.empty_cache()
    return found


def check_shortage(say: Say) -> bool:
    loaded = build("qwen3-0.6b", torch.device("cuda"), length=2048, num_hidden_layers=3)
    requests = make_requests()
    right, expected = True, None
    for room in ROOM:
        found = run(loaded, requests, room)
        expected = expected or found
        alike = sum(found.told[each.id] == expected.told[each.id] for each in requests)
        whole = all(len(found.told[each.id]) == each.stopping.max_tokens for each in requests)
        scored = all(found.scored[each.id] == len(each.prompt) for each in requests if each.prompt_logprobs is not None)
        off = strangers(loaded, requests, found.told, 0.06)
        fine = whole and scored and off == 0 and not found.errors and not found.lost
        right &= fine and (room is None) == (found.failures == 0)
        say(
            f"  {'all memory' if room is None else f'{room} MiB'}: {found.failures} steps failed, steps of "
            f"{found.smallest} tokens at the least, {found.errors} errors, {found.lost} blocks lost; "
            f"{alike} of {len(requests)} answers as with all memory, {off} tokens that the reference would not have "
            f"chosen{'' if fine else ' WRONG'}"
        )
    return right
