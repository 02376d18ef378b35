"""Differences between families of image-text models: placeholder text, tower inputs and attention among image tokens.

`FAMILIES` lists only families that the tests compare with `transformers`. A new family needs an entry here and a small
model in tests/engine/vision/small.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

TowerInputs = dict[str, torch.Tensor]
ProcessorOutput = Any  # what transformers' image processor returns for one image


@dataclass(frozen=True)
class ImageTokens:
    """The special tokens of an image, as text."""

    image: str  # one per embedding of the vision tower
    begin: str = ""
    end: str = ""


@dataclass(frozen=True)
class VisionFamily:
    towers: tuple[str, ...]  # modules from pixels to embeddings: everything but the language model
    expand: Callable[[Any, ProcessorOutput, ImageTokens], str]  # the text that replaces a placeholder
    tower_inputs: Callable[[ProcessorOutput], Iterator[TowerInputs]]  # the tower's arguments, in independent pieces
    placeholder: str = "image_token_id"  # config attribute with the placeholder's token id
    bidirectional: bool = False  # whether the tokens of an image attend to each other in both directions
    mrope: bool = False  # whether positions have three components
    options: tuple[tuple[str, object], ...] = ()  # of the image processor, always
    low_detail_options: tuple[tuple[str, object], ...] = ()  # of the image processor, for images of low detail
    vision_types: tuple[str, ...] = ()  # towers that were checked; empty: the family has only one


def _expand_tiles(config: Any, output: ProcessorOutput, tokens: ImageTokens) -> str:
    """Idefics3: tiles by row and column, one line per row, then the whole image scaled down."""
    vision = config.vision_config
    tile = tokens.image * ((vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2)
    rows, columns = int(output["rows"][0][0]), int(output["cols"][0][0])
    fake = "<fake_token_around_image>"
    lines = [
        "".join(f"{fake}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)) + "\n"
        for row in range(rows)
    ]
    between = "\n" if lines else ""
    return f"{''.join(lines)}{between}{fake}<global-img>{tile}{fake}"


def _tile_inputs(output: ProcessorOutput) -> Iterator[TowerInputs]:
    pixels, masks = output["pixel_values"], output.get("pixel_attention_mask")
    for i in range(pixels.shape[1]):
        mask = {} if masks is None else {"pixel_attention_mask": masks[:, i : i + 1]}
        yield {"pixel_values": pixels[:, i : i + 1], **mask}


def _expand_grid(config: Any, output: ProcessorOutput, tokens: ImageTokens) -> str:
    count: int = int(output["image_grid_thw"][0].prod()) // config.vision_config.spatial_merge_size**2
    return tokens.image * count


def _grid_inputs(output: ProcessorOutput) -> Iterator[TowerInputs]:
    yield {name: output[name] for name in ("pixel_values", "image_grid_thw")}


def _expand_patches(config: Any, output: ProcessorOutput, tokens: ImageTokens) -> str:
    """LLaVA: one token per patch, and one for the class token if the tower has it and the model keeps it."""
    height, width = output["pixel_values"].shape[-2:]
    size = config.vision_config.patch_size
    count: int = (height // size) * (width // size) + (config.vision_config.model_type == "clip_vision_model")
    if config.vision_feature_select_strategy == "default":
        count -= 1
    return tokens.image * count


def _expand_crops(config: Any, output: ProcessorOutput, tokens: ImageTokens) -> str:
    """Gemma 3: the image, and crops of it if pan and scan is on."""
    whole = f"\n\n{tokens.begin}{tokens.image * config.mm_tokens_per_image}{tokens.end}\n\n"
    crops = int(output["num_crops"][0])
    if not crops:
        return whole
    closeups = " ".join([whole] * crops)
    return f"Here is the original image {whole} and here are some crops to help you see better {closeups}"


def _separate_inputs(output: ProcessorOutput) -> Iterator[TowerInputs]:
    for i in range(len(output["pixel_values"])):
        yield {"pixel_values": output["pixel_values"][i : i + 1]}


TILES = VisionFamily(
    towers=("model.vision_model", "model.connector"),
    expand=_expand_tiles,
    tower_inputs=_tile_inputs,
    options=(("return_row_col_info", True),),
    low_detail_options=(("do_image_splitting", False),),
)
GRID = VisionFamily(towers=("model.visual",), expand=_expand_grid, tower_inputs=_grid_inputs, mrope=True)
FAMILIES = {
    "idefics3": TILES,
    "smolvlm": TILES,
    "qwen2_vl": GRID,
    "qwen2_5_vl": GRID,
    "llava": VisionFamily(
        towers=("model.vision_tower", "model.multi_modal_projector"),
        expand=_expand_patches,
        tower_inputs=_separate_inputs,
        vision_types=("clip_vision_model", "siglip_vision_model"),
    ),
    "gemma3": VisionFamily(
        towers=("model.vision_tower", "model.multi_modal_projector"),
        expand=_expand_crops,
        tower_inputs=_separate_inputs,
        placeholder="boi_token_id",
        bidirectional=True,
        low_detail_options=(("do_pan_and_scan", False),),
        vision_types=("siglip_vision_model",),
    ),
}
