"""Whether the engine computes on a GPU what it should: `python -m bench.gpu_check [check_engine,…]`.

The decoder on the kernels is compared with the same decoder on their references, in bf16 on the same GPU, for small
models of every kind. Then the whole engine runs, with its graphs and its lookahead, and each greedy token is looked up
in the reference's logits for the sequence that it continues, also when the cache is so small that sequences must give
their blocks back. Models on transformers' definitions are compared with transformers, those that read images too
(`gpu_images.py`). The GPU's memory is taken away under the engine (`gpu_shortage.py`). The sampler draws on both
devices. `bench.gpu --check` begins with all of this.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from bench.gpu import build, make_request, say
from syringa.engine.execution.batch import prepare
from syringa.engine.gpu.ops.base import ReferenceOps
from syringa.engine.gpu.ops.fp8 import Fp8Product
from syringa.engine.loading.loader import LoadedModel, LoadOptions, load_model
from syringa.engine.sampling.sampler import Sampler, SamplerState, SamplingRow
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE
from syringa.engine.scheduling.scheduler import Limits
from syringa.engine.worker.core import EngineCore
from syringa.errors import ConfigError
from syringa.types import EngineRequest, Sampling

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
CROWDED = 640  # tokens of cache: two dozen requests of up to 150 do not fit
BREADTH_SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "vocab_size": 1_000,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
BREADTH: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 64, "sliding_window": 40, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 50},
    "phi3": {"sliding_window": 40},
    "gemma3_text": {"head_dim": 256, "sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 64},
    "gpt_oss": {"head_dim": 64, "sliding_window": 40, "num_local_experts": 4, "num_experts_per_tok": 2},
}
Say = Callable[[str], None]


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


def check_decoder(say: Say) -> bool:
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


def check_fp8(say: Say) -> bool:
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


def make_requests(vocabulary: int, longest: int = 90) -> list[EngineRequest]:
    rng = random.Random(9)
    found = []
    for i in range(40):
        r = make_request(rng, i, rng.randint(1, longest), rng.randint(2, 60), 0.0)
        prompt = [token % vocabulary for token in r.prompt]
        found.append(EngineRequest(id=r.id, prompt=prompt, sampling=r.sampling, stopping=r.stopping))
    return found


def answer(
    loaded: LoadedModel, requests: list[EngineRequest], cache: int, say: Say
) -> tuple[dict[str, list[int]], int]:
    """Each request's tokens, and how often one had to give its blocks back. Raises where something went wrong."""
    core = EngineCore(loaded, Limits(step_tokens=256, max_running=24), kv_cache_tokens=cache)
    told: dict[str, list[int]] = {r.id: [] for r in requests}
    for request in requests:
        core.submit(request)
    while core.busy:
        for _, delta in core.step():
            told[delta.request] += delta.tokens
            if delta.error:
                raise RuntimeError(delta.error)
    stats = core.stats()
    core.close()
    say(
        f"  {cache} tokens of cache: {stats.output_tokens} tokens, {stats.steps} steps, {stats.preemptions} preemptions"
    )
    if stats.blocks_free + stats.blocks_cached != stats.blocks_total:
        raise RuntimeError("blocks are left over")
    if short := [r.id for r in requests if len(told[r.id]) != r.stopping.max_tokens]:
        raise RuntimeError(f"too few or too many tokens for {short}")
    return told, stats.preemptions


def strangers(loaded: LoadedModel, requests: list[EngineRequest], told: dict[str, list[int]], near: float) -> int:
    """How many of the greedy tokens are not nearly the best of the reference's logits, by their deviation."""
    off = 0
    for request in requests[::4]:
        tokens = told[request.id]
        whole = by_reference(loaded, lambda r=request, t=tokens: logits_of(loaded, [[*r.prompt, *t]], 1000))[0]
        rows = whole[len(request.prompt) - 1 : -1]
        chosen = rows.gather(1, torch.tensor(tokens, device=rows.device)[:, None])[:, 0]
        off += int(((rows.amax(-1) - chosen) > near * rows.std()).sum())
    return off


def check_answers(loaded: LoadedModel, requests: list[EngineRequest], say: Say, near: float = 0.06) -> bool:
    """Greedy tokens must be among the reference's best, with and without preemptions; twice the same, the same."""
    (first, _), (again, _), (crowded, preemptions) = (
        answer(loaded, requests, n, say) for n in (20_000, 20_000, CROWDED)
    )
    off = [strangers(loaded, requests, told, near) for told in (first, crowded)]
    alike = sum(first[r.id] == crowded[r.id] for r in requests)
    say(f"  the same again: {first == again}; the same with preemptions: {alike} of {len(requests)} answers")
    say(f"  tokens that the reference would not have chosen: {off[0]}, with preemptions {off[1]}")
    if not preemptions:
        say("  NOTHING WAS PREEMPTED")
    return first == again and preemptions > 0 and off == [0, 0]


def check_engine(say: Say) -> bool:
    loaded = build("qwen3-0.6b", torch.device("cuda"), length=512, **SMALL)
    return check_answers(loaded, make_requests(1_000), say) and refuses_too_much(loaded, say)


def refuses_too_much(loaded: LoadedModel, say: Say) -> bool:
    """A cache larger than the GPU's memory is refused in one line, before it is taken."""
    before = torch.cuda.memory_allocated()
    try:
        EngineCore(loaded, Limits(step_tokens=256, max_running=24), kv_cache_gb=10_000)
    except ConfigError as error:
        say(f"  10,000 GB of cache: {error.message}")
        return "\n" not in error.message and torch.cuda.memory_allocated() - before < 1 << 28
    return False


def save_small(family: str, folder: str) -> list[Any]:
    """Writes a model with random weights, and gives transformers' own on the GPU: in fp32 and bf16."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(BREADTH_SIZES | BREADTH[family]))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    for parameter in model.parameters():  # wide enough for positions, windows and caps to matter
        wide = parameter.dim() > 1
        parameter.data = torch.randn_like(parameter) * 0.05 if wide else parameter + torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder)
    Tokenizer(WordLevel({f"t{i}": i for i in range(1_000)}, unk_token="t0")).save(f"{folder}/tokenizer.json")
    half = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.bfloat16).eval()
    return [model.cuda(), half.cuda()]


@torch.inference_mode()
def their_logits(model: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    return [model(torch.tensor([prompt], device="cuda"), use_cache=False).logits[0].float() for prompt in prompts]


def check_breadth(say: Say) -> bool:
    """transformers' models through our cache: at most twice as far from their own fp32 as their own bf16 is."""
    rng = random.Random(4)
    prompts = [[rng.randrange(1_000) for _ in range(n)] for n in (150, 3, 97, 16, 64, 201)]
    right = True
    for family in BREADTH:
        with tempfile.TemporaryDirectory() as folder:
            exact, rounded = save_small(family, folder)
            loaded = load_model(LoadOptions(model=folder, device="cuda"))
        expected = their_logits(exact, prompts)
        half = max(map(distance, their_logits(rounded, prompts), expected))
        errors = [max(map(distance, logits_of(loaded, prompts, chunk), expected)) for chunk in (1000, 29, 1)]
        fine = max(errors) < max(MOST, 2 * half)
        shown = ", ".join(f"{error:.1e}" for error in errors)
        verdict = "" if fine else " WRONG"
        say(f"  {family}: whole, in pieces, one by one: {shown}; transformers in bf16: {half:.1e}{verdict}")
        right &= fine
        if family in ("gemma2", "phi3"):  # in plain PyTorch, and by the kernels
            right &= check_answers(loaded, make_requests(1_000), say, max(0.06, 8 * max(errors)))
    return right


def check_images(say: Say) -> bool:
    from bench import gpu_images  # wants what the tests want

    return gpu_images.check_images(say)


def check_shortage(say: Say) -> bool:
    from bench import gpu_shortage

    return gpu_shortage.check_shortage(say)


def check_sampler(say: Say) -> bool:
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


def check(say: Say, only: str = "") -> bool:
    """`only`: names with commas; none: all."""
    results = []
    parts = (check_decoder, check_engine, check_breadth, check_images, check_shortage, check_sampler, check_fp8)
    names = only.split(",") if only else [part.__name__ for part in parts]
    for part in [part for part in parts if part.__name__ in names]:
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


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing to check")
    sys.exit(not check(say, ",".join(sys.argv[1:])))
