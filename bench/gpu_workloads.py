"""The workloads of the GPU benchmarks, and how they are run and logged."""

from __future__ import annotations

import random
import time

import torch

from syringa.engine.worker.core import EngineCore
from syringa.types import EngineRequest, SamplingParams, StopConditions

STEP_TOKENS = 8192
MAX_RUNNING = 256
PROMPT_TOKENS = 150_000  # prompts have token ids below this, and below the model's vocabulary

began = time.perf_counter()


def log(text: str) -> None:
    print(f"[{time.perf_counter() - began:6.1f} s] {text}", flush=True)


def make_request(
    rng: random.Random,
    number: int,
    prompt: int,
    output: int,
    temperature: float = 0.6,
    *,
    vocabulary: int = PROMPT_TOKENS,
) -> EngineRequest:
    return EngineRequest(
        id=str(number),
        prompt=[rng.randrange(100, PROMPT_TOKENS) % vocabulary for _ in range(prompt)],
        sampling=SamplingParams(seed=number, temperature=temperature),
        stopping=StopConditions(max_tokens=output, ignore_eos=True),
        use_cache=False,
    )


def workload(name: str, quick: bool, vocabulary: int = PROMPT_TOKENS) -> list[EngineRequest]:
    rng = random.Random(7)
    shapes: list[tuple[int, int]]
    match name:
        case "decode_b1":
            shapes = [(128, 256)]
        case "decode_b64":
            shapes = [(128, 256)] * 64
        case "nano256":
            shapes = [(rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(256)]
            shapes = [(prompt, output // 4) for prompt, output in shapes] if quick else shapes
        case "prefill":
            shapes = [(2000, 1)] * (16 if quick else 64)
        case _:
            raise ValueError(name)
    return [make_request(rng, i, *shape, vocabulary=vocabulary) for i, shape in enumerate(shapes)]


def run_requests(core: EngineCore, requests: list[EngineRequest]) -> tuple[float, int, int]:
    """Run requests to completion. Return seconds from the first arrival to the last token, output tokens, and steps."""
    steps = core.stats().steps
    torch.cuda.synchronize()
    start = time.perf_counter()
    for request in requests:
        core.submit(request)
    tokens = 0
    while core.busy:
        for _, delta in core.step():
            tokens += len(delta.tokens)
            if delta.error:
                raise RuntimeError(delta.error)
    seconds = time.perf_counter() - start
    expected = sum(request.stopping.max_tokens for request in requests)
    if tokens != expected:
        raise RuntimeError(f"expected {expected} tokens, got {tokens}")
    return seconds, tokens, core.stats().steps - steps
