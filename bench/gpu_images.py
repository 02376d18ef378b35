"""Whether image-text models compute on a GPU what they should: `bench.gpu_check` runs this with the rest.

The models are the small ones of the tests, a few of each family. Needs Pillow and pytest beside what the others need.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from syringa.engine.loading.loader import LoadedModel, LoadOptions, load_model
from syringa.engine.scheduling.scheduler import Limits
from syringa.engine.worker.core import EngineCore
from syringa.types import EngineRequest
from tests.engine.vision.small import FAMILIES, Small, picture, prepared, run, save

MOST = 0.03  # relative, by norm: bf16 rounds at other places
CROWDED = 640  # tokens of cache
PICTURES = [picture(i, *size) for i, size in enumerate([(70, 40), (33, 90), (20, 20), (64, 64), (300, 200)])]
PROMPTS = [
    ("What is this?\n@ Say it.", PICTURES[:1]),
    ("@@", PICTURES[1:3]),
    ("Only text here, and a good deal of it.", []),
    ("<turn>user\n@\nand\n\n@ or @?<turn>", [PICTURES[3], PICTURES[4], PICTURES[3]]),
]
Say = Callable[[str], None]


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    a, b = got.double().cpu(), expected.double().cpu()
    return float((a - b).norm() / b.norm()) if bool(a.isfinite().all()) else float("inf")


def their_inputs(loaded: LoadedModel, model: Any, asked: EngineRequest, tokens: list[int]) -> dict[str, Any]:
    """What transformers' own forward takes for a prompt, from the pixels that our reader gives."""
    assert loaded.vision
    reader = loaded.vision.reader
    ids = torch.tensor([tokens])
    frames = [frame for image in asked.images for frame in reader.read(image).frames]
    found: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for name in frames[0] if frames else ():
        tiles = name == "pixel_attention_mask" or frames[0][name].dim() == 5  # counted within their image
        found[name] = torch.cat([frame[name] for frame in frames], dim=int(tiles))
    marks = (ids == model.config.image_token_id).long()
    known = inspect.signature(model.forward).parameters
    found |= {name: marks for name in ("token_type_ids", "mm_token_type_ids") if name in known}
    cast = {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in found.items()}
    return {name: x.cuda() for name, x in cast.items()}


@torch.inference_mode()
def their_logits(
    loaded: LoadedModel, model: Any, asked: list[EngineRequest], tokens: list[list[int]]
) -> list[torch.Tensor]:
    pairs = zip(asked, tokens, strict=True)
    return [model(**their_inputs(loaded, model, a, t), use_cache=False).logits[0].float() for a, t in pairs]


def requests(model: Small) -> list[EngineRequest]:
    """Greedy ones: some of text, which run while the tower looks at the images of the others."""
    texts = ["Now, what do you see? " * n for n in range(1, 5)]
    wishes: dict[str, Any] = {"max_tokens": 40, "stopping": {"ignore_eos": True}}
    found = []
    for i in range(16):
        images = [picture(100 + i, 60 + 9 * i, 150 - 8 * i), PICTURES[i % 5]]
        if i % 4 == 0:
            found.append(model.ask(str(i), texts[i // 4], **wishes))
        else:
            found.append(model.ask(str(i), f"@ {texts[i % 4]} @", *images, **wishes))
    return found


def answer(loaded: LoadedModel, asked: list[EngineRequest], cache: int) -> tuple[dict[str, list[int]], Any]:
    core = EngineCore(loaded, Limits(step_tokens=64, max_running=8), kv_cache_tokens=cache)
    told: dict[str, list[int]] = {each.id: [] for each in asked}
    for each in asked:
        core.submit(each)
    while core.busy or len(core.arrivals):
        for _, delta in core.step():
            told[delta.request] += delta.tokens
            if delta.error:
                raise RuntimeError(delta.error)
    stats = core.stats()
    core.close()
    if stats.blocks_free + stats.blocks_cached != stats.blocks_total:
        raise RuntimeError("blocks are left over")
    if refused := core.take_refused():
        raise RuntimeError(f"refused: {refused}")
    return told, stats


def strangers(here: LoadedModel, asked: list[EngineRequest], told: dict[str, list[int]], near: float) -> int:
    """How many of the greedy tokens are not nearly the best by the logits of the CPU's engine in fp32."""
    off = 0
    for each, (prompt, pictures) in zip(asked, prepared(here, *asked), strict=True):
        tokens = told[each.id]
        rows = run(here, [(prompt + tokens, pictures)])[0][len(prompt) - 1 : -1]
        chosen = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        off += int(((rows.amax(-1) - chosen) > near * rows.std()).sum())
    return off


def check_answers(model: Small, loaded: LoadedModel, say: Say, near: float) -> bool:
    asked = requests(model)
    here = load_model(LoadOptions(model=str(model.folder), dtype="fp32", device="cpu", threads=4, native_kernels=False))
    (first, _), (crowded, stats) = (answer(loaded, asked, n) for n in (8_000, CROWDED))
    off = [strangers(here, asked, told, near) for told in (first, crowded)]
    alike = sum(first[each.id] == crowded[each.id] for each in asked)
    say(
        f"    two images in a prompt, {stats.output_tokens} tokens: {off[0]} that the CPU would not have chosen, with "
        f"{stats.preemptions} preemptions {off[1]}; {alike} of {len(asked)} answers the same"
    )
    return off == [0, 0] and stats.preemptions > 0


def check_images(say: Say) -> bool:
    """At most twice as far from transformers' own fp32 on the GPU as its own bf16 is there."""
    from transformers import AutoModelForImageTextToText

    right = True
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            model = save(name, Path(folder))
            loaded = load_model(LoadOptions(model=folder, device="cuda"))
            half = AutoModelForImageTextToText.from_pretrained(
                folder, attn_implementation="eager", dtype=torch.bfloat16
            )
            assert loaded.gpu
            asked = [model.ask("a", text, *images) for text, images in PROMPTS]
            ours = prepared(loaded, *asked)
            tokens = [each for each, _ in ours]
            expected = their_logits(loaded, model.theirs.cuda(), asked, tokens)
            rounded = max(map(distance, their_logits(loaded, half.eval().cuda(), asked, tokens), expected))
            batches = [run(loaded, ours), run(loaded, ours, chunk=13), run(loaded, ours, chunk=1)]
            errors = [max(map(distance, batch, expected)) for batch in batches]
            fine = max(errors) < max(MOST, 2 * rounded)
            shown = ", ".join(f"{error:.1e}" for error in errors)
            verdict, decoder = "" if fine else " WRONG", loaded.gpu.decoder
            say(
                f"  {name}: whole, in pieces, one by one: {shown}; transformers in bf16: {rounded:.1e}{verdict}; "
                f"the tower takes {decoder.beside / 2**20:.1f} MiB; recorded: {decoder.recordable}"
            )
            right &= fine
            if name in ("idefics3", "qwen2_5_vl", "gemma3"):
                right &= check_answers(model, loaded, say, max(0.06, 8 * max(errors)))
    return right
