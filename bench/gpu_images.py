"""Check that image-text models compute correctly on a GPU: part of `bench.gpu_check`.

Uses the tiny models of the tests, of every family. Needs Pillow and pytest in addition.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from syringa.engine.loading.loaded_model import LoadedModel, LoadOptions
from syringa.engine.loading.loader import load_model
from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.engine.worker.core import EngineCore
from syringa.types import EngineRequest
from tests.engine.vision.tiny_models import FAMILIES, TinyVisionModel, make_image, preprocess, run, save

MAX_ERROR = 0.03  # relative, by norm: bf16 rounds at other places
SMALL_CACHE_TOKENS = 640
IMAGES = [make_image(i, *size) for i, size in enumerate([(70, 40), (33, 90), (20, 20), (64, 64), (300, 200)])]
PROMPTS = [
    ("What is this?\n@ Say it.", IMAGES[:1]),
    ("@@", IMAGES[1:3]),
    ("Only text here, and a good deal of it.", []),
    ("<turn>user\n@\nand\n\n@ or @?<turn>", [IMAGES[3], IMAGES[4], IMAGES[3]]),
]
Log = Callable[[str], None]


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    a, b = got.double().cpu(), expected.double().cpu()
    return float((a - b).norm() / b.norm()) if bool(a.isfinite().all()) else float("inf")


def hf_inputs(loaded: LoadedModel, model: Any, request: EngineRequest, tokens: list[int]) -> dict[str, Any]:
    """Return the inputs of transformers' forward for a prompt, with the pixels of Syringa's image reader."""
    assert loaded.vision
    reader = loaded.vision.reader
    ids = torch.tensor([tokens])
    frames = [frame for image in request.images for frame in reader.read(image).tower_inputs]
    found: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for name in frames[0] if frames else ():
        tiles = (
            name == "pixel_attention_mask" or frames[0][name].dim() == 5
        )  # tiles are concatenated within their image
        found[name] = torch.cat([frame[name] for frame in frames], dim=int(tiles))
    marks = (ids == model.config.image_token_id).long()
    known = inspect.signature(model.forward).parameters
    found |= {name: marks for name in ("token_type_ids", "mm_token_type_ids") if name in known}
    cast = {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in found.items()}
    return {name: x.cuda() for name, x in cast.items()}


@torch.inference_mode()
def hf_logits(
    loaded: LoadedModel, model: Any, requests: list[EngineRequest], tokens: list[list[int]]
) -> list[torch.Tensor]:
    pairs = zip(requests, tokens, strict=True)
    return [model(**hf_inputs(loaded, model, a, t), use_cache=False).logits[0].float() for a, t in pairs]


def make_requests(model: TinyVisionModel) -> list[EngineRequest]:
    """Return greedy requests, some of text only, which run while the vision tower encodes images of the others."""
    texts = ["Now, what do you see? " * n for n in range(1, 5)]
    params: dict[str, Any] = {"max_tokens": 40, "stopping": {"ignore_eos": True}}
    found = []
    for i in range(16):
        images = [make_image(100 + i, 60 + 9 * i, 150 - 8 * i), IMAGES[i % 5]]
        if i % 4 == 0:
            found.append(model.ask(str(i), texts[i // 4], **params))
        else:
            found.append(model.ask(str(i), f"@ {texts[i % 4]} @", *images, **params))
    return found


def generate(loaded: LoadedModel, requests: list[EngineRequest], cache: int) -> tuple[dict[str, list[int]], Any]:
    core = EngineCore(loaded, SchedulerLimits(step_tokens=64, max_running=8), kv_cache_tokens=cache)
    outputs: dict[str, list[int]] = {each.id: [] for each in requests}
    for each in requests:
        core.submit(each)
    while core.busy or len(core.pending):
        for _, delta in core.step():
            outputs[delta.request_id] += delta.tokens
            if delta.error:
                raise RuntimeError(delta.error)
    stats = core.stats()
    core.close()
    if stats.blocks_free + stats.blocks_cached != stats.blocks_total:
        raise RuntimeError("blocks have leaked")
    if refused := core.take_refused():
        raise RuntimeError(f"refused: {refused}")
    return outputs, stats


def count_unlikely_tokens(
    cpu_model: LoadedModel, requests: list[EngineRequest], outputs: dict[str, list[int]], tolerance: float
) -> int:
    """Count greedy tokens that are not nearly the best by the logits of the CPU engine in fp32."""
    unlikely = 0
    for each, (prompt, images) in zip(requests, preprocess(cpu_model, *requests), strict=True):
        tokens = outputs[each.id]
        rows = run(cpu_model, [(prompt + tokens, images)])[0][len(prompt) - 1 : -1]
        chosen = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        unlikely += int(((rows.amax(-1) - chosen) > tolerance * rows.std()).sum())
    return unlikely


def check_outputs(model: TinyVisionModel, loaded: LoadedModel, log: Log, tolerance: float) -> bool:
    requests = make_requests(model)
    cpu_model = load_model(
        LoadOptions(model=str(model.folder), dtype="fp32", device="cpu", threads=4, native_kernels=False)
    )
    (first, _), (preempted, stats) = (generate(loaded, requests, n) for n in (8_000, SMALL_CACHE_TOKENS))
    unlikely = [count_unlikely_tokens(cpu_model, requests, outputs, tolerance) for outputs in (first, preempted)]
    alike = sum(first[each.id] == preempted[each.id] for each in requests)
    log(
        f"    two images in a prompt, {stats.output_tokens} tokens: {unlikely[0]} unlikely for the CPU engine, with "
        f"{stats.preemptions} preemptions {unlikely[1]}; {alike} of {len(requests)} outputs equal"
    )
    return unlikely == [0, 0] and stats.preemptions > 0


def check_images(log: Log) -> bool:
    """Check every family: at most twice as far from transformers' fp32 on the GPU as its own bf16."""
    from transformers import AutoModelForImageTextToText

    passed = True
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            model = save(name, Path(folder))
            loaded = load_model(LoadOptions(model=folder, device="cuda"))
            half = AutoModelForImageTextToText.from_pretrained(
                folder, attn_implementation="eager", dtype=torch.bfloat16
            )
            assert loaded.gpu
            requests = [model.ask("a", text, *images) for text, images in PROMPTS]
            preprocessed = preprocess(loaded, *requests)
            tokens = [each for each, _ in preprocessed]
            expected = hf_logits(loaded, model.hf_model.cuda(), requests, tokens)
            rounded = max(map(distance, hf_logits(loaded, half.eval().cuda(), requests, tokens), expected))
            batches = [
                run(loaded, preprocessed),
                run(loaded, preprocessed, chunk=13),
                run(loaded, preprocessed, chunk=1),
            ]
            errors = [max(map(distance, batch, expected)) for batch in batches]
            fine = max(errors) < max(MAX_ERROR, 2 * rounded)
            shown = ", ".join(f"{error:.1e}" for error in errors)
            status, decoder = "" if fine else " WRONG", loaded.gpu.decoder
            log(
                f"  {name}: whole, in chunks, token by token: {shown}; transformers in bf16: {rounded:.1e}{status}; "
                f"vision tower {decoder.concurrent_bytes / 2**20:.1f} MiB; CUDA graphs {decoder.supports_cuda_graphs}"
            )
            passed &= fine
            if name in ("idefics3", "qwen2_5_vl", "gemma3"):
                passed &= check_outputs(model, loaded, log, max(0.06, 8 * max(errors)))
    return passed
