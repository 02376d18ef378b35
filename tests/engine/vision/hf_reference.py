"""Reference results of `transformers`: by its processors, or by parts of those that cannot be created here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image as Pillow

from syringa.types import Image
from tests.engine.vision.tiny_models import TinyVisionModel, open_pixels

BICUBIC = Pillow.Resampling.BICUBIC


def inputs(tiny_model: TinyVisionModel, text: str, *pixels: Any, **options: Any) -> dict[str, Any]:
    """Return the arguments of the model's forward."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model.folder)
    text = "<bos>" + text.replace("@", tiny_model.placeholder)
    if not pixels:
        return dict(tokenizer([text], return_tensors="pt"))
    if tiny_model.name in ("qwen2_vl", "qwen2_5_vl", "smolvlm"):
        return _inputs_without_processor(tiny_model, tokenizer, text, list(pixels), options)
    found = _processor(tiny_model, tokenizer)(text=[text], images=[list(pixels)], return_tensors="pt", **options)
    return {name: value for name, value in found.items() if name != "num_crops"}


def _processor(tiny_model: TinyVisionModel, tokenizer: Any) -> Any:
    from transformers import Gemma3Processor, Idefics3Processor, LlavaProcessor

    if tiny_model.name == "idefics3":
        return Idefics3Processor(tiny_model.processor, tokenizer, image_seq_len=4)
    if tiny_model.name == "gemma3":
        return Gemma3Processor(tiny_model.processor, tokenizer, image_seq_length=16)
    clip = tiny_model.name == "llava"
    return LlavaProcessor(
        tiny_model.processor,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default" if clip else "full",
        num_additional_image_tokens=int(clip),
    )


def _inputs_without_processor(
    tiny_model: TinyVisionModel, tokenizer: Any, text: str, pixels: list[Any], options: Any
) -> dict[str, Any]:
    """Expand placeholders with the methods of processors that cannot be created without torchvision."""
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

    if tiny_model.name == "smolvlm":
        found = tiny_model.processor([pixels], return_tensors="pt", return_row_col_info=True, **options)
        processor = SimpleNamespace(
            image_seq_len=4,
            fake_image_token="<fake_token_around_image>",
            image_token="<image>",
            global_image_token="<global-img>",
        )
        texts = [SmolVLMProcessor.replace_image_token(processor, found, i) for i in range(len(pixels))]
        kept = {name: found[name] for name in ("pixel_values", "pixel_attention_mask")}
        token = "<image>"
    else:
        found = tiny_model.processor(pixels, return_tensors="pt", **options)
        processor = SimpleNamespace(image_processor=tiny_model.processor, image_token="<|image_pad|>")
        texts = [Qwen2_5_VLProcessor.replace_image_token(processor, found, i) for i in range(len(pixels))]
        kept, token = dict(found), "<|image_pad|>"
    parts = text.split(token)
    whole = "".join(a + b for a, b in zip(parts, [*texts, ""], strict=True))
    kept |= tokenizer([whole], return_tensors="pt")
    if tiny_model.name != "smolvlm":
        kept["mm_token_type_ids"] = (kept["input_ids"] == tiny_model.hf_model.config.image_token_id).int()
    return kept


def logits(tiny_model: TinyVisionModel, text: str, *images: Image, **options: Any) -> tuple[list[int], torch.Tensor]:
    """Return the expanded prompt and the logits of each of its tokens."""
    return logits_of_pixels(tiny_model, text, *map(open_pixels, images), **options)


def logits_of_pixels(
    tiny_model: TinyVisionModel, text: str, *pixels: Any, **options: Any
) -> tuple[list[int], torch.Tensor]:
    given = inputs(tiny_model, text, *pixels, **options)
    with torch.inference_mode():
        found: torch.Tensor = tiny_model.hf_model(**given, use_cache=False).logits[0].float()
    return given["input_ids"][0].tolist(), found


def greedy(tiny_model: TinyVisionModel, count: int, text: str, *images: Image) -> list[int]:
    given = inputs(tiny_model, text, *map(open_pixels, images))
    output = tiny_model.hf_model.generate(**given, do_sample=False, min_new_tokens=count, max_new_tokens=count)
    tokens: list[int] = output[0, given["input_ids"].shape[1] :].tolist()
    return tokens
