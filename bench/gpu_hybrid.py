"""Check hybrid models (gated delta nets) on a GPU, and time their kernels: `python -m bench.gpu_hybrid`.

`bench.gpu_check check_hybrid` runs the checks: the decoder on the kernels against the same decoder on their references,
for small models, and the delta net alone at the sizes of Qwen3.5; then the engine with CUDA graphs, preemption, reused
prefixes and several choices. Run by itself, this module also prints how long a delta net takes, and what that means in
bytes of state per second.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from bench.gpu_check import (
    MAX_ERROR,
    Log,
    check_outputs,
    distance,
    logits_of,
    make_requests,
    median_distance,
    with_reference_ops,
)
from bench.gpu_models import build_model
from bench.gpu_workloads import log
from syringa.engine.gpu.delta_net_rows import DeltaNet, DeltaNetRows
from syringa.engine.gpu.ops.base import ReferenceOps
from syringa.engine.gpu.ops.triton_ops import TritonOps
from syringa.engine.gpu.state_rows import make_state_rows
from syringa.engine.models.delta_rule import DeltaNetParameters
from syringa.engine.models.hybrid_config import DeltaNetShape
from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.engine.worker.core import EngineCore
from syringa.types import EngineRequest, SamplingParams, StopConditions

SMALL = {
    "vocab_size": 1_000,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
EXPERTS = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("qwen3.5-9b", {"intermediate_size": 768}),
    "qwen3.5-moe": ("qwen3.5-35b-a3b", EXPERTS),
}
SHAPE = DeltaNetShape(key_heads=16, value_heads=32, key_size=128, value_size=128, kernel=4)  # of Qwen3.5
DECODE_ROWS = (1, 8, 64, 256)
PREFILLS = ((8192,), (1024,) * 8, (300,) * 27)


def check_hybrid_models(log: Log) -> bool:
    # All of them run, also after one that failed.
    return all([check_delta_net(log), check_hybrid_decoders(log), check_hybrid_engine(log)])


def make_net(generator: torch.Generator) -> DeltaNet:
    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda", generator=generator)

    rate = -torch.linspace(-4, 2.5, SHAPE.value_heads, device="cuda").exp()
    parameters = DeltaNetParameters(
        0.5 * normal(SHAPE.kernel, SHAPE.channels), rate, normal(SHAPE.value_heads), 1 + 0.1 * normal(SHAPE.value_size)
    )
    return DeltaNet(parameters, SHAPE, 1e-6)


def make_states(generator: torch.Generator, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    conv = torch.randn(slots, SHAPE.kernel - 1, SHAPE.channels, device="cuda", generator=generator)
    recurrent = torch.randn(
        slots, SHAPE.value_heads, SHAPE.key_size, SHAPE.value_size, device="cuda", generator=generator
    )
    return conv, 0.1 * recurrent


def decode_rows(rows: int) -> DeltaNetRows:
    states = make_state_rows(list(range(rows)), [], [], [], torch.device("cuda"))
    return DeltaNetRows(states, torch.full((rows,), 100, dtype=torch.int32, device="cuda"), None, None)


def prefill_rows(counts: tuple[int, ...], first: int = 0) -> DeltaNetRows:
    sequences, device = len(counts), torch.device("cuda")
    snapshots = [(count // 64 * 64 - first % 64, sequences + i) for i, count in enumerate(counts)]
    states = make_state_rows(list(range(sequences)), [first] * sequences, list(counts), snapshots, device)
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=device)
    none = torch.empty(0, dtype=torch.int32, device=device)
    return DeltaNetRows(states, none, starts, torch.full((sequences,), first, dtype=torch.int32, device=device))


def check_delta_net(log: Log) -> bool:
    """Compare outputs and states with the reference, in bf16 at real sizes."""
    generator = torch.Generator("cuda").manual_seed(0)
    net, passed = make_net(generator), True
    cases = {f"{rows} decode rows": (decode_rows(rows), rows) for rows in (1, 5, 64)}
    cases |= {
        f"prompts of {counts} from {first}": (prefill_rows(counts, first), sum(counts))
        for counts, first in (((200, 70, 64), 0), ((150, 300), 40))
    }
    for name, (rows, count) in cases.items():
        projected = torch.randn(count, SHAPE.projected, device="cuda", generator=generator).bfloat16()
        states = make_states(generator, 64)
        expected_states = [state.clone() for state in states]
        expected = ReferenceOps().delta_net(projected, net, rows, *expected_states)
        got = TritonOps().delta_net(projected, net, rows, *states)
        errors = [distance(got, expected), *(distance(*pair) for pair in zip(states, expected_states, strict=True))]
        passed &= max(errors) < MAX_ERROR
        status = "" if max(errors) < MAX_ERROR else " WRONG"
        log(f"  delta net, {name}: relative errors {', '.join(f'{error:.1e}' for error in errors)}{status}")
    return passed


def check_hybrid_decoders(log: Log) -> bool:
    rng = random.Random(3)
    lengths = [80] * 70, [150, 3, 97, 16, 64, 201]
    level, mixed = ([[rng.randrange(1_000) for _ in range(n)] for n in each] for each in lengths)
    passed = True
    for name, (model, changes) in VARIANTS.items():
        loaded = build_model(model, torch.device("cuda"), length=256, **(SMALL | changes))
        for prompts, chunk in ((mixed, 1000), (mixed, 29), (level, 1), (level[:20], 1), (level[:1], 1)):
            expected = with_reference_ops(loaded, lambda loaded=loaded, p=prompts: logits_of(loaded, p, 1000))
            got = logits_of(loaded, prompts, chunk)
            if "num_experts" in changes:
                worst = median_distance(got, expected)
            else:
                worst = max(distance(a, b) for a, b in zip(got, expected, strict=True))
            passed &= worst < MAX_ERROR
            status = "" if worst < MAX_ERROR else " WRONG"
            log(f"  {name}: {len(prompts)} sequences, {chunk} at a time: relative error {worst:.1e}{status}")
    return passed


def check_hybrid_engine(log: Log) -> bool:
    model, changes = VARIANTS["qwen3.5"]
    loaded = build_model(model, torch.device("cuda"), length=512, **(SMALL | changes))
    passed = check_outputs(loaded, make_requests(1_000), log)
    core = EngineCore(loaded, SchedulerLimits(step_tokens=256, max_running=24), kv_cache_tokens=20_000)
    rng = random.Random(5)
    prompt = [rng.randrange(1_000) for _ in range(300)]
    found = []
    for i, choices in enumerate((1, 1, 4)):
        request = EngineRequest(
            id=str(i), prompt=prompt, choices=choices,
            sampling=SamplingParams(seed=1, temperature=0.0), stopping=StopConditions(max_tokens=20, ignore_eos=True),
        )  # fmt: skip
        core.submit(request)
        outputs: dict[int, list[int]] = {choice: [] for choice in range(choices)}
        cached = 0
        while core.busy:
            for _, delta in core.step():
                outputs[delta.choice] += delta.tokens
                cached += delta.cached_tokens
        found.append((outputs, cached))
    stats = core.stats()
    core.close()
    leaked = stats.state_slots - stats.state_slots_free - stats.state_snapshots
    same = all(tokens == found[0][0][0] for outputs, _ in found for tokens in outputs.values())
    log(f"  reused prompt tokens: {[cached for _, cached in found]}; equal outputs: {same}; leaked slots: {leaked}")
    return passed and leaked == 0 and found[1][1] == 256


def main() -> None:
    from triton.testing import do_bench_cudagraph

    generator = torch.Generator("cuda").manual_seed(0)
    net, ops = make_net(generator), TritonOps()
    for count in DECODE_ROWS:
        rows, states = decode_rows(count), make_states(generator, count)
        projected = torch.randn(count, SHAPE.projected, device="cuda", generator=generator).bfloat16()
        seconds = do_bench_cudagraph(lambda r=rows, s=states, p=projected: ops.delta_net(p, net, r, *s)) / 1e3
        moved = 2 * count * SHAPE.state_bytes
        log(f"decode, {count} rows: {seconds * 1e6:.1f} µs, {moved / seconds / 1e9:.0f} GB/s of states")
    for counts in PREFILLS:
        rows, states = prefill_rows(counts), make_states(generator, 2 * len(counts))
        projected = torch.randn(sum(counts), SHAPE.projected, device="cuda", generator=generator).bfloat16()
        seconds = do_bench_cudagraph(lambda r=rows, s=states, p=projected: ops.delta_net(p, net, r, *s)) / 1e3
        rate = sum(counts) / seconds / 1e6
        log(f"prompts, {len(counts)} of {counts[0]}: {seconds * 1e6:.0f} µs, {rate:.1f} M tokens/s")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing to check")
    passed = check_hybrid_models(log)
    main()
    sys.exit(not passed)
