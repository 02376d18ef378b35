"""Check that the engine computes correctly on a GPU: `python -m bench.gpu_check [check_engine,…]`.

The decoder on the kernels is compared with the same decoder on their references, in bf16 on the same GPU, for small
models of every kind. Then the whole engine runs, with CUDA graphs and overlapped steps, and each greedy token is looked
up in the reference's logits for the sequence that it continues, also with a cache so small that sequences are
preempted. Models on transformers' definitions are compared with transformers (`gpu_hf_check.py`), including those that
read images (`gpu_images.py`). The engine runs out of GPU memory (`gpu_oom.py`). The sampler is compared with the CPU's.
`bench.gpu --check` runs all of this first.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from bench.gpu_models import build_model
from bench.gpu_workloads import log, make_request
from syringa.engine.execution.batch import build_step_tensors, locate_states
from syringa.engine.gpu.ops.base import ReferenceOps
from syringa.engine.gpu.ops.quantized_linear import quantized_matmul
from syringa.engine.gpu.packed_weight import pack_fp8, unpack_weight
from syringa.engine.loading.gpu_model import with_cache_dtype
from syringa.engine.loading.loaded_model import LoadedModel
from syringa.engine.sampling.sampler import Sampler
from syringa.engine.sampling.sampler_input import SamplerState, SamplingRow
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE
from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.engine.worker.core import EngineCore
from syringa.errors import ConfigError
from syringa.types import EngineRequest, SamplingParams

SMALL = {"num_hidden_layers": 3, "vocab_size": 1_000, "hidden_size": 512, "intermediate_size": 768}
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "biases, windows": {
        "model_type": "qwen2",
        "head_dim": 64,
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 1,
    },
    "one kv head, no rotary": {
        "model_type": "smollm3",
        "no_rope_layers": [1, 0, 1],
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 96,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 40},
    # Sinks, windows, biases; sizes that are no multiple of the tiles, as gpt-oss's 2880.
    "gpt-oss": {
        "model_type": "gpt_oss",
        "hidden_size": 576,
        "intermediate_size": 576,
        "head_dim": 64,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "sliding_window": 40,
        "swiglu_limit": 2.0,
    },
    "glm-4.5": {
        "model_type": "glm4_moe",
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 384,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
    },
}
MAX_ERROR = 0.03  # relative, by norm: bf16 rounds at other places
SMALL_CACHE_TOKENS = 640  # two dozen requests of up to 150 tokens do not fit
Log = Callable[[str], None]


def logits_of(loaded: LoadedModel, prompts: list[list[int]], chunk: int) -> list[torch.Tensor]:
    """Return the logits of every token, computed `chunk` tokens of each prompt at a time."""
    needed = [-(-len(prompt) // BLOCK_SIZE) for prompt in prompts]
    states = loaded.cache.states.allocate(len(prompts)) if loaded.cache.states is not None else None
    cache: Any = loaded.cache.allocate(sum(needed), states)
    order = torch.randperm(sum(needed)).tolist()
    sequences = [
        SimpleNamespace(tokens=p, block_table=[order.pop() for _ in range(n)], state_slot=slot)
        for slot, (p, n) in enumerate(zip(prompts, needed, strict=True))
    ]
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    done = 0
    while left := [(i, s) for i, s in enumerate(sequences) if len(s.tokens) > done]:
        items: Any = [
            SimpleNamespace(sequence=s, start=done, count=min(chunk, len(s.tokens) - done), snapshot=None)
            for _, s in left
        ]
        counts = [item.count for item in items]
        step = build_step_tensors(items, range(sum(counts)))
        step.states = locate_states(items) if states is not None else None
        logits = loaded.model.forward(step, cache)
        for (i, _), part in zip(left, logits.split(counts), strict=True):
            found[i].append(part.clone())
        done += chunk
    return [torch.cat(parts) for parts in found]


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error by norm, infinite if a value is not finite."""
    a, b = got.double(), expected.double()
    return float((a - b).norm() / b.norm()) if bool(a.isfinite().all()) else float("inf")


def median_distance(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the median relative error of all tokens, infinite if a value is not finite.

    With experts, rounding changes the choice between two that are nearly tied, and with it a token and those after it:
    with random weights, for a tenth to a fifth of the tokens.
    """
    a, b = torch.cat(got).double(), torch.cat(expected).double()
    return float(((a - b).norm(dim=1) / b.norm(dim=1)).median()) if bool(a.isfinite().all()) else float("inf")


def with_reference_ops(loaded: LoadedModel, run: Callable[[], Any]) -> Any:
    """Call `run` while the model uses the reference operations."""
    assert loaded.gpu
    decoder = loaded.gpu.decoder
    kernels, decoder.ops = decoder.ops, ReferenceOps()
    try:
        return run()
    finally:
        decoder.ops = kernels


def check_decoder(log: Log) -> bool:
    rng = random.Random(3)
    lengths = [48] * 70, [150, 3, 97, 16, 64, 201]
    level, mixed = ([[rng.randrange(1_000) for _ in range(n)] for n in each] for each in lengths)
    passed = True
    for name, changes in VARIANTS.items():
        loaded = build_model("qwen3-0.6b", torch.device("cuda"), length=256, **(SMALL | changes))
        for prompts, chunk in ((mixed, 1000), (mixed, 29), (level, 1), (level[:20], 1), (level[:1], 1)):
            expected = with_reference_ops(loaded, lambda loaded=loaded, p=prompts: logits_of(loaded, p, 1000))
            got = logits_of(loaded, prompts, chunk)
            if "num_experts_per_tok" in changes:
                worst = median_distance(got, expected)
            else:
                worst = max(distance(a, b) for a, b in zip(got, expected, strict=True))
            passed &= worst < MAX_ERROR
            status = "" if worst < MAX_ERROR else " WRONG"
            log(f"  {name}: {len(prompts)} sequences, {chunk} at a time: relative error {worst:.1e}{status}")
    return passed


def check_fp8(log: Log) -> bool:
    """Compare fp8 matmuls with the same weights in fp32, and the logits of an fp8 decoder with bf16's."""
    passed = True
    for rows, limit in ((1, 6e-3), (5, 6e-3), (300, 0.04)):
        x = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)
        weight = pack_fp8(torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16))
        error = distance(quantized_matmul(x, weight, None), x.float() @ unpack_weight(weight).T)
        passed &= error < limit
        log(f"  fp8, {rows} rows: {error:.1e} from the same weights in fp32")
    rng = random.Random(5)
    prompts = [[rng.randrange(1_000) for _ in range(n)] for n in (60, 33)]
    changes = SMALL | {"hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 8}
    exact_logits = logits_of(build_model("qwen3-0.6b", torch.device("cuda"), length=256, **changes), prompts, 1000)
    loaded = build_model("qwen3-0.6b", torch.device("cuda"), "fp8", length=256, **changes)
    for chunk, few in ((1000, 2), (1, 2), (1, 1)):
        pairs = zip(logits_of(loaded, prompts[:few], chunk), exact_logits, strict=False)
        error = max(distance(a, b) for a, b in pairs)
        passed &= error < 0.3
        log(f"  fp8, 8 random layers, {few} sequences, {chunk} at a time: logits {error:.1e} from bf16's")
    return passed


def check_fp8_cache(log: Log) -> bool:
    """Compare decoders with a KV cache in FP8 on the kernels with the same on their references, then the engine."""
    rng = random.Random(7)
    prompts = [[rng.randrange(1_000) for _ in range(n)] for n in (150, 3, 97, 16)]
    passed = True
    for name, changes in VARIANTS.items():
        exact = build_model("qwen3-0.6b", torch.device("cuda"), length=256, **(SMALL | changes))
        loaded = with_cache_dtype(exact, "fp8")
        expected = with_reference_ops(loaded, lambda m=loaded: logits_of(m, prompts, 1000))
        errors = [median_distance(logits_of(loaded, prompts, chunk), expected) for chunk in (1000, 29, 1)]
        fine = max(errors) < 2 * MAX_ERROR  # a key that rounds to its neighbor differs by a sixteenth
        shown = ", ".join(f"{error:.1e}" for error in errors)
        loss = median_distance(expected, logits_of(exact, prompts, 1000))
        log(f"  {name}: whole, in chunks, token by token: {shown}; from bf16 {loss:.1e}{'' if fine else ' WRONG'}")
        passed &= fine
    loaded = with_cache_dtype(build_model("qwen3-0.6b", torch.device("cuda"), length=512, **SMALL), "fp8")
    return check_outputs(loaded, make_requests(1_000), log, tolerance=0.15) and passed


def check_quantized(log: Log) -> bool:
    """Compare decoders with quantized weights on the kernels with the same on their references."""
    rng = random.Random(6)
    prompts = [[rng.randrange(1_000) for _ in range(n)] for n in (150, 3, 97, 16)]
    passed = True
    for name, dtype, changes in (
        ("qwen3-0.6b", "fp8", SMALL),
        ("qwen3-0.6b", "fp8-block", SMALL),
        ("qwen3-0.6b", "int4", SMALL),
        ("qwen3-0.6b", "fp8-block", SMALL | VARIANTS["mixtral"]),
        ("qwen3-0.6b", "int4", SMALL | VARIANTS["mixtral"]),
        ("qwen3-0.6b", "mxfp4", SMALL | VARIANTS["gpt-oss"]),
        ("qwen3-0.6b", "fp8-block", SMALL | VARIANTS["glm-4.5"]),
    ):
        loaded = build_model(name, torch.device("cuda"), dtype, length=512, **changes)
        expected = with_reference_ops(loaded, lambda m=loaded: logits_of(m, prompts, 1000))
        errors = [median_distance(logits_of(loaded, prompts, chunk), expected) for chunk in (1000, 29, 1)]
        errors.append(median_distance(logits_of(loaded, prompts[:1], 1), expected[:1]))
        limit = MAX_ERROR
        if dtype.startswith("fp8"):  # with many rows, activations are in FP8
            limit = 0.25 if "num_experts_per_tok" in changes else 0.15
        fine = max(errors) < limit
        family = changes.get("model_type", "qwen3")
        shown = ", ".join(f"{error:.1e}" for error in errors)
        log(f"  {family} {dtype}: whole, in chunks, token by token, alone: {shown}{'' if fine else ' WRONG'}")
        passed &= fine
    return passed


def make_requests(vocabulary: int, longest: int = 90) -> list[EngineRequest]:
    rng = random.Random(9)
    requests = []
    for i in range(40):
        r = make_request(rng, i, rng.randint(1, longest), rng.randint(2, 60), 0.0)
        prompt = [token % vocabulary for token in r.prompt]
        requests.append(EngineRequest(id=r.id, prompt=prompt, sampling=r.sampling, stopping=r.stopping))
    return requests


def generate(
    loaded: LoadedModel, requests: list[EngineRequest], cache: int, log: Log
) -> tuple[dict[str, list[int]], int]:
    """Return the tokens of each request and the number of preemptions. Raises `RuntimeError` on any inconsistency."""
    core = EngineCore(loaded, SchedulerLimits(step_tokens=256, max_running=24), kv_cache_tokens=cache)
    outputs: dict[str, list[int]] = {r.id: [] for r in requests}
    for request in requests:
        core.submit(request)
    while core.busy:
        for _, delta in core.step():
            outputs[delta.request_id] += delta.tokens
            if delta.error:
                raise RuntimeError(delta.error)
    stats = core.stats()
    core.close()
    log(
        f"  {cache} tokens of cache: {stats.output_tokens} tokens, {stats.steps} steps, {stats.preemptions} preemptions"
    )
    if stats.blocks_free + stats.blocks_cached != stats.blocks_total:
        raise RuntimeError("blocks have leaked")
    if short := [r.id for r in requests if len(outputs[r.id]) != r.stopping.max_tokens]:
        raise RuntimeError(f"too few or too many tokens for {short}")
    return outputs, stats.preemptions


def count_unlikely_tokens(
    loaded: LoadedModel, requests: list[EngineRequest], outputs: dict[str, list[int]], tolerance: float
) -> int:
    """Count greedy tokens that are not nearly the best by the reference's logits, relative to their deviation."""
    unlikely = 0
    for request in requests[::4]:
        tokens = outputs[request.id]
        whole = with_reference_ops(loaded, lambda r=request, t=tokens: logits_of(loaded, [[*r.prompt, *t]], 1000))[0]
        rows = whole[len(request.prompt) - 1 : -1]
        chosen = rows.gather(1, torch.tensor(tokens, device=rows.device)[:, None])[:, 0]
        unlikely += int(((rows.amax(-1) - chosen) > tolerance * rows.std()).sum())
    return unlikely


def check_outputs(loaded: LoadedModel, requests: list[EngineRequest], log: Log, tolerance: float = 0.06) -> bool:
    """Check that greedy tokens are nearly the reference's best, with and without preemption, and reproducible."""
    (first, _), (again, _), (preempted, preemptions) = (
        generate(loaded, requests, n, log) for n in (20_000, 20_000, SMALL_CACHE_TOKENS)
    )
    unlikely = [count_unlikely_tokens(loaded, requests, outputs, tolerance) for outputs in (first, preempted)]
    alike = sum(first[r.id] == preempted[r.id] for r in requests)
    log(f"  reproducible: {first == again}; equal with preemptions: {alike} of {len(requests)} outputs")
    log(f"  tokens unlikely for the reference: {unlikely[0]}, with preemptions {unlikely[1]}")
    if not preemptions:
        log("  WRONG: no sequence was preempted")
    return first == again and preemptions > 0 and unlikely == [0, 0]


def check_engine(log: Log) -> bool:
    loaded = build_model("qwen3-0.6b", torch.device("cuda"), length=512, **SMALL)
    return check_outputs(loaded, make_requests(1_000), log) and check_oversized_cache_is_rejected(loaded, log)


def check_oversized_cache_is_rejected(loaded: LoadedModel, log: Log) -> bool:
    """Check that a cache larger than the GPU's memory is rejected with a one-line error, before it is allocated."""
    before = torch.cuda.memory_allocated()
    try:
        EngineCore(loaded, SchedulerLimits(step_tokens=256, max_running=24), kv_cache_gb=10_000)
    except ConfigError as error:
        log(f"  10,000 GB of cache: {error.message}")
        return "\n" not in error.message and torch.cuda.memory_allocated() - before < 1 << 28
    return False


def check_hf_models(log: Log) -> bool:
    from bench import gpu_hf_check

    return gpu_hf_check.check_hf_models(log)


def check_images(log: Log) -> bool:
    from bench import gpu_images  # needs the test dependencies

    return gpu_images.check_images(log)


def check_hybrid(log: Log) -> bool:
    from bench.gpu_hybrid import check_hybrid_models

    return check_hybrid_models(log)


def check_oom(log: Log) -> bool:
    from bench import gpu_oom

    return gpu_oom.check_oom(log)


def check_sampler(log: Log) -> bool:
    torch.manual_seed(1)
    logits = torch.randn(96, 5_000) * 4
    variants: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 20, "top_p": 0.9},
        {"min_p": 0.05},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"logit_bias": {7: 9.0, 11: -100.0}},
        {"dry_multiplier": 0.8},
    ]
    history = [random.Random(2).randrange(5_000) for _ in range(50)] * 2
    rows = [
        SamplingRow(
            SamplerState(SamplingParams(seed=i, **variants[i % 7]), history, history[:20]),
            0,
            i,
            3 if i % 5 == 0 else None,
            (4, 5),
        )
        for i in range(96)
    ]
    masks = torch.randint(-(2**31), 2**31 - 1, (96, -(-5_000 // 32)), dtype=torch.int32)
    masks[::3] = -1
    on_cpu = Sampler(5_000).sample(logits, rows, masks)
    on_gpu = Sampler(5_000, "cuda").sample(logits.cuda(), rows, masks)
    differ = sum(a != b for a, b in zip(on_cpu.tokens, on_gpu.tokens, strict=True))
    scores = [(a.logprob, b.logprob) for a, b in zip(on_cpu.logprobs, on_gpu.logprobs, strict=True) if a and b]
    worst = max(abs(a - b) for a, b in scores)
    log(f"  sampler: {differ} of 96 tokens differ from the CPU's, log-probabilities by {worst:.1e} at limit")
    return differ <= 1 and worst < 1e-3


def check(log: Log, only: str = "") -> bool:
    """Run the checks named in `only` (comma-separated), or all of them."""
    results = []
    parts = (
        check_decoder,
        check_engine,
        check_hf_models,
        check_images,
        check_oom,
        check_sampler,
        check_fp8,
        check_fp8_cache,
        check_quantized,
        check_hybrid,
    )
    known = [part.__name__ for part in parts]
    names = only.split(",") if only else known
    if unknown := set(names) - set(known):
        log(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        return False
    for part in [part for part in parts if part.__name__ in names]:
        log(part.__name__)
        try:
            results.append(part(log))
        except Exception as error:
            import traceback

            traceback.print_exc()
            log(f"  {part.__name__} failed: {error!r}")
            results.append(False)
    log("checks passed" if all(results) else f"CHECKS FAILED: {results}")
    return all(results)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing to check")
    sys.exit(not check(log, ",".join(sys.argv[1:])))
