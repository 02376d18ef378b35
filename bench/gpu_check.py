"""Whether the engine computes on a GPU what it should: called by `bench.gpu --check`.

The decoder on the kernels is compared with the same decoder on their references, in bf16 on the same GPU, for small
models of every kind. Then the whole engine runs, with its graphs and its lookahead, and each greedy token is looked up
in the reference's logits for the sequence that it continues. The sampler draws on both devices.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from bench.gpu import build, make_request
from syringa.engine.batch import prepare
from syringa.engine.core import EngineCore
from syringa.engine.gpu.fp8 import Fp8Product
from syringa.engine.gpu.ops import ReferenceOps
from syringa.engine.kv_cache import BLOCK_SIZE
from syringa.engine.loader import LoadedModel
from syringa.engine.sampler import Sampler, SamplerState, SamplingRow
from syringa.engine.scheduler import Limits
from syringa.types import Sampling

SMALL = {"num_hidden_layers": 3, "vocab_size": 1_000, "hidden_size": 512, "intermediate_size": 768}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "biases, windows": {
        "model_type": "qwen2",
        "head_dim": 64,
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 1,
    },
    "one kv head, unturned": {
        "model_type": "smollm3",
        "no_rope_layers": [1, 0, 1],
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 96,
    },
}
MOST = 0.03  # relative, by norm: bf16 rounds at other places


def logits_of(loaded: LoadedModel, prompts: list[list[int]], chunk: int) -> list[torch.Tensor]:
    """Of every token; `chunk` tokens of each prompt at a time."""
    needed = [-(-len(prompt) // BLOCK_SIZE) for prompt in prompts]
    cache: Any = loaded.cache.allocate(sum(needed))
    order = torch.randperm(sum(needed)).tolist()
    sequences = [
        SimpleNamespace(tokens=p, blocks=[order.pop() for _ in range(n)]) for p, n in zip(prompts, needed, strict=True)
    ]
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    done = 0
    while left := [(i, s) for i, s in enumerate(sequences) if len(s.tokens) > done]:
        items: Any = [SimpleNamespace(sequence=s, start=done, count=min(chunk, len(s.tokens) - done)) for _, s in left]
        counts = [item.count for item in items]
        logits = loaded.model.forward(prepare(items, range(sum(counts))), cache)
        for (i, _), part in zip(left, logits.split(counts), strict=True):
            found[i].append(part.clone())
        done += chunk
    return [torch.cat(parts) for parts in found]


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    a, b = got.double(), expected.double()
    return float((a - b).norm() / b.norm()) if bool(a.isfinite().all()) else float("inf")


def by_reference(loaded: LoadedModel, run: Callable[[], Any]) -> Any:
    assert loaded.gpu
    decoder = loaded.gpu.decoder
    kernels, decoder.ops = decoder.ops, ReferenceOps()
    try:
        return run()
    finally:
        decoder.ops = kernels


def check_decoder(say: Callable[[str], None]) -> bool:
    rng = random.Random(3)
    lengths = [48] * 70, [150, 3, 97, 16, 64, 201]
    level, mixed = ([[rng.randrange(1_000) for _ in range(n)] for n in each] for each in lengths)
    right = True
    for name, changes in KINDS.items():
        loaded = build("qwen3-0.6b", torch.device("cuda"), length=256, **(SMALL | changes))
        for prompts, chunk in ((mixed, 1000), (mixed, 29), (level, 1), (level[:20], 1), (level[:1], 1)):
            expected = by_reference(loaded, lambda loaded=loaded, p=prompts: logits_of(loaded, p, 1000))
            got = logits_of(loaded, prompts, chunk)
            worst = max(distance(a, b) for a, b in zip(got, expected, strict=True))
            right &= worst < MOST
            verdict = "" if worst < MOST else " WRONG"
            say(f"  {name}: {len(prompts)} sequences, {chunk} at a time: relative error {worst:.1e}{verdict}")
    return right


def check_fp8(say: Callable[[str], None]) -> bool:
    """The products by themselves against the same 8-bit numbers in fp32; and what 8 bits cost a decoder, told only."""
    right = True
    for rows, most in ((1, 6e-3), (5, 0.04), (300, 0.04)):
        x = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)
        product = Fp8Product(torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16), None)
        exact = x.float() @ (product.weight.float() * product.scale.T).T
        error = distance(product(x), exact)
        right &= error < most
        say(f"  fp8, {rows} rows: {error:.1e} from the same weights in fp32")
    rng = random.Random(5)
    prompts = [[rng.randrange(1_000) for _ in range(n)] for n in (60, 33)]
    changes = SMALL | {"hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 8}
    exact_logits = logits_of(build("qwen3-0.6b", torch.device("cuda"), length=256, **changes), prompts, 1000)
    loaded = build("qwen3-0.6b", torch.device("cuda"), "fp8", length=256, **changes)
    for chunk, few in ((1000, 2), (1, 2), (1, 1)):
        pairs = zip(logits_of(loaded, prompts[:few], chunk), exact_logits, strict=False)
        error = max(distance(a, b) for a, b in pairs)
        right &= error < 0.3
        say(f"  fp8, 8 layers of noise, {few} sequences, {chunk} at a time: logits {error:.1e} from bf16's")
    return right


def check_engine(say: Callable[[str], None]) -> bool:
    """Greedy tokens must be among the reference's best; twice the same requests must give the same tokens."""
    loaded = build("qwen3-0.6b", torch.device("cuda"), length=512, **SMALL)
    rng = random.Random(9)
    requests = [make_request(rng, i, rng.randint(1, 90), rng.randint(2, 60), 0.0) for i in range(40)]
    requests = [
        type(r)(id=r.id, prompt=[t % 1000 for t in r.prompt], sampling=r.sampling, stopping=r.stopping)
        for r in requests
    ]
    answers: list[dict[str, list[int]]] = []
    for cache in (20_000, 20_000, 2_000):  # the last preempts
        core = EngineCore(loaded, Limits(step_tokens=256, max_running=24), kv_cache_tokens=cache)
        told: dict[str, list[int]] = {r.id: [] for r in requests}
        for request in requests:
            core.submit(request)
        while core.busy:
            for _, delta in core.step():
                told[delta.request] += delta.tokens
        stats = core.stats()
        free = stats.blocks_free + stats.blocks_cached == stats.blocks_total
        done = f"{stats.output_tokens} tokens, {stats.steps} steps, {stats.preemptions} preemptions"
        say(f"  engine: {done}, all free: {free}")
        answers.append(told)
        core.close()
    right = answers[0] == answers[1]
    say(f"  the same again: {right}")
    off = 0
    for told in answers[::2]:
        for request in requests[::4]:
            tokens = told[request.id]
            right &= len(tokens) == request.stopping.max_tokens
            whole = by_reference(loaded, lambda r=request, t=tokens: logits_of(loaded, [[*r.prompt, *t]], 1000))[0]
            rows = whole[len(request.prompt) - 1 : -1]
            chosen = rows.gather(1, torch.tensor(tokens, device=rows.device)[:, None])[:, 0]
            off += int(((rows.amax(-1) - chosen) > 0.06 * rows.std()).sum())
    say(f"  tokens that the reference would not have chosen: {off}")
    return right and off == 0


def check_sampler(say: Callable[[str], None]) -> bool:
    torch.manual_seed(1)
    logits = torch.randn(96, 5_000) * 4
    kinds: list[dict[str, Any]] = [
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
            SamplerState(Sampling(seed=i, **kinds[i % 7]), history, history[:20]),
            0,
            i,
            3 if i % 5 == 0 else None,
            (4, 5),
        )
        for i in range(96)
    ]
    masks = torch.randint(-(2**31), 2**31 - 1, (96, -(-5_000 // 32)), dtype=torch.int32)
    masks[::3] = -1
    here = Sampler(5_000).sample(logits, rows, masks)
    there = Sampler(5_000, "cuda").sample(logits.cuda(), rows, masks)
    differ = sum(a != b for a, b in zip(here.tokens, there.tokens, strict=True))
    scores = [(a.logprob, b.logprob) for a, b in zip(here.logprobs, there.logprobs, strict=True) if a and b]
    worst = max(abs(a - b) for a, b in scores)
    say(f"  sampler: {differ} of 96 tokens differ from the CPU's, log-probabilities by {worst:.1e} at most")
    return differ <= 1 and worst < 1e-3


def check(say: Callable[[str], None], only: str = "") -> bool:
    results = []
    parts = (check_decoder, check_engine, check_sampler, check_fp8)
    for part in [part for part in parts if only in ("", part.__name__)]:
        say(part.__name__)
        try:
            results.append(part(say))
        except Exception as error:
            import traceback

            traceback.print_exc()
            say(f"  {part.__name__} failed: {error!r}")
            results.append(False)
    say("checks passed" if all(results) else f"CHECKS FAILED: {results}")
    return all(results)
