"""The same prompts through `transformers`: its processors where they can be made, and their parts where not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image as Pillow

from syringa.types import Image
from tests.engine.vision.small import Small, opened

BICUBIC = Pillow.Resampling.BICUBIC


def inputs(small: Small, text: str, *pixels: Any, **options: Any) -> dict[str, Any]:
    """What the model's forward takes."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small.folder)
    text = "<bos>" + text.replace("@", small.placeholder)
    if not pixels:
        return dict(tokenizer([text], return_tensors="pt"))
    if small.name in ("qwen2_vl", "qwen2_5_vl", "smolvlm"):
        return _by_hand(small, tokenizer, text, list(pixels), options)
    found = _processor(small, tokenizer)(text=[text], images=[list(pixels)], return_tensors="pt", **options)
    return {name: value for name, value in found.items() if name != "num_crops"}


def _processor(small: Small, tokenizer: Any) -> Any:
    from transformers import Gemma3Processor, Idefics3Processor, LlavaProcessor

    if small.name == "idefics3":
        return Idefics3Processor(small.processor, tokenizer, image_seq_len=4)
    if small.name == "gemma3":
        return Gemma3Processor(small.processor, tokenizer, image_seq_length=16)
    clip = small.name == "llava"
    return LlavaProcessor(
        small.processor,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default" if clip else "full",
        num_additional_image_tokens=int(clip),
    )


def _by_hand(small: Small, tokenizer: Any, text: str, pixels: list[Any], options: Any) -> dict[str, Any]:
    """Processors that want torchvision, or more, for the sake of videos: their own replacements, without them."""
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

    if small.name == "smolvlm":
        found = small.processor([pixels], return_tensors="pt", return_row_col_info=True, **options)
        half = SimpleNamespace(
            image_seq_len=4,
            fake_image_token="<fake_token_around_image>",
            image_token="<image>",
            global_image_token="<global-img>",
        )
        texts = [SmolVLMProcessor.replace_image_token(half, found, i) for i in range(len(pixels))]
        kept = {name: found[name] for name in ("pixel_values", "pixel_attention_mask")}
        word = "<image>"
    else:
        found = small.processor(pixels, return_tensors="pt", **options)
        half = SimpleNamespace(image_processor=small.processor, image_token="<|image_pad|>")
        texts = [Qwen2_5_VLProcessor.replace_image_token(half, found, i) for i in range(len(pixels))]
        kept, word = dict(found), "<|image_pad|>"
    parts = text.split(word)
    whole = "".join(a + b for a, b in zip(parts, [*texts, ""], strict=True))
    kept |= tokenizer([whole], return_tensors="pt")
    if small.name != "smolvlm":
        kept["mm_token_type_ids"] = (kept["input_ids"] == small.theirs.config.image_token_id).int()
    return kept


def logits(small: Small, text: str, *images: Image, **options: Any) -> tuple[list[int], torch.Tensor]:
    """The expanded prompt and the logits of every token of it."""
    return logits_of_pixels(small, text, *map(opened, images), **options)


def logits_of_pixels(small: Small, text: str, *pixels: Any, **options: Any) -> tuple[list[int], torch.Tensor]:
    given = inputs(small, text, *pixels, **options)
    with torch.inference_mode():
        found: torch.Tensor = small.theirs(**given, use_cache=False).logits[0].float()
    return given["input_ids"][0].tolist(), found


def greedy(small: Small, count: int, text: str, *images: Image) -> list[int]:
    given = inputs(small, text, *map(opened, images))
    output = small.theirs.generate(**given, do_sample=False, min_new_tokens=count, max_new_tokens=count)
    tokens: list[int] = output[0, given["input_ids"].shape[1] :].tolist()
    return tokens
