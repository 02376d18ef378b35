"""What differs between families of image-text models: the words around an image, and what their tower takes.

Only what was checked against `transformers` is listed. Another family may well work with one more line here, and its
small model in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

Inputs = dict[str, torch.Tensor]
Prepared = Any  # what an image processor of transformers gives for one image


@dataclass(frozen=True)
class Words:
    """The texts of the tokens that show where an image is."""

    image: str  # stands for one row of the tower
    begin: str = ""
    end: str = ""


@dataclass(frozen=True)
class Family:
    towers: tuple[str, ...]  # the modules that make rows of pixels, all that is not the language model
    text: Callable[[Any, Prepared, Words], str]  # what the placeholder becomes, from the model's config
    frames: Callable[[Prepared], Iterator[Inputs]]  # the tower's arguments, in pieces that do not depend on one another
    placeholder: str = "image_token_id"  # the config's name for it
    joint: bool = False  # whether an image's tokens see those that come after them
    planar: bool = False  # whether positions have three parts
    options: tuple[tuple[str, object], ...] = ()  # for the image processor, always
    cheap: tuple[tuple[str, object], ...] = ()  # and for an image of low detail
    vision_types: tuple[str, ...] = ()  # the towers that were checked; any, where there is only one


def _tiles_text(config: Any, prepared: Prepared, words: Words) -> str:
    """Idefics3: tiles by row and column, a line for each row, and last the whole image, small."""
    vision = config.vision_config
    places = words.image * ((vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2)
    rows, columns = int(prepared["rows"][0][0]), int(prepared["cols"][0][0])
    fake = "<fake_token_around_image>"
    lines = [
        "".join(f"{fake}<row_{row + 1}_col_{column + 1}>{places}" for column in range(columns)) + "\n"
        for row in range(rows)
    ]
    between = "\n" if lines else ""
    return f"{''.join(lines)}{between}{fake}<global-img>{places}{fake}"


def _tiles(prepared: Prepared) -> Iterator[Inputs]:
    pixels, masks = prepared["pixel_values"], prepared.get("pixel_attention_mask")
    for i in range(pixels.shape[1]):
        mask = {} if masks is None else {"pixel_attention_mask": masks[:, i : i + 1]}
        yield {"pixel_values": pixels[:, i : i + 1], **mask}


def _grid_text(config: Any, prepared: Prepared, words: Words) -> str:
    count: int = int(prepared["image_grid_thw"][0].prod()) // config.vision_config.spatial_merge_size**2
    return words.image * count


def _grid(prepared: Prepared) -> Iterator[Inputs]:
    yield {name: prepared[name] for name in ("pixel_values", "image_grid_thw")}


def _patches_text(config: Any, prepared: Prepared, words: Words) -> str:
    """LLaVA: a place per patch, and one for the class token, where the tower has it and it is not left out."""
    height, width = prepared["pixel_values"].shape[-2:]
    size = config.vision_config.patch_size
    count: int = (height // size) * (width // size) + (config.vision_config.model_type == "clip_vision_model")
    if config.vision_feature_select_strategy == "default":
        count -= 1
    return words.image * count


def _crops_text(config: Any, prepared: Prepared, words: Words) -> str:
    """Gemma 3: the image, and, where its processor was told to look closer, some crops of it."""
    whole = f"\n\n{words.begin}{words.image * config.mm_tokens_per_image}{words.end}\n\n"
    crops = int(prepared["num_crops"][0])
    if not crops:
        return whole
    close = " ".join([whole] * crops)
    return f"Here is the original image {whole} and here are some crops to help you see better {close}"


def _each(prepared: Prepared) -> Iterator[Inputs]:
    for i in range(len(prepared["pixel_values"])):
        yield {"pixel_values": prepared["pixel_values"][i : i + 1]}


TILES = Family(
    towers=("model.vision_model", "model.connector"),
    text=_tiles_text,
    frames=_tiles,
    options=(("return_row_col_info", True),),
    cheap=(("do_image_splitting", False),),
)
GRID = Family(towers=("model.visual",), text=_grid_text, frames=_grid, planar=True)
FAMILIES = {
    "idefics3": TILES,
    "smolvlm": TILES,
    "qwen2_vl": GRID,
    "qwen2_5_vl": GRID,
    "llava": Family(
        towers=("model.vision_tower", "model.multi_modal_projector"),
        text=_patches_text,
        frames=_each,
        vision_types=("clip_vision_model", "siglip_vision_model"),
    ),
    "gemma3": Family(
        towers=("model.vision_tower", "model.multi_modal_projector"),
        text=_crops_text,
        frames=_each,
        placeholder="boi_token_id",
        joint=True,
        cheap=(("do_pan_and_scan", False),),
        vision_types=("siglip_vision_model",),
    ),
}
