"""Image-text models: `transformers`' language model on our batch, with rows of its vision tower among the tokens'."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from syringa.engine.batch import StepTensors
from syringa.engine.cpu import cpu_flags
from syringa.engine.layers.cache import CacheTensors
from syringa.engine.models.breadth_attention import LayerShape, PagedPass, Unsupported, running
from syringa.engine.native import Kernels
from syringa.engine.vision.family import FAMILIES, Family, Inputs


class SeeingModel:
    """Text goes the same way as in `BreadthModel`; tokens become rows here, so that images can take some places."""

    def __init__(self, model: Any, family: Family, layers: list[LayerShape], kernels: Kernels | None) -> None:
        self.model = model
        self.family = family
        self.layers = layers
        self.kernels = kernels
        self.tower_dtype: torch.dtype = next(towers(model, family)[0].parameters()).dtype
        for module in towers(model, family)[0].modules():
            if any(isinstance(child, nn.Conv2d) for child in module.children()):
                # Patches leave a convolution across; each layer would lay them straight again, a quarter of its time.
                module.register_forward_hook(lambda _, inputs, rows: rows.contiguous())

    @torch.inference_mode()
    def forward(self, step: StepTensors, cache: CacheTensors) -> torch.Tensor:
        rows = self.model.get_input_embeddings()(step.tokens)
        positions = step.positions.long()[None]
        if (pictures := step.pictures) is not None:
            for row, filling in pictures.fills:
                rows[row : row + len(filling)] = filling.to(rows.dtype)
            if pictures.positions is not None:
                positions = pictures.positions[:, None]
        with running(PagedPass(self.layers, step, cache, self.kernels)):
            logits: torch.Tensor = self.model(
                inputs_embeds=rows[None],
                position_ids=positions,
                attention_mask=torch.ones_like(step.tokens)[None],
                use_cache=False,
                logits_to_keep=step.wanted,
            ).logits[0]
        return logits.float()

    @torch.inference_mode()
    def encode(self, inputs: Inputs) -> torch.Tensor:
        """What the tower makes of one frame: `[places, hidden]`."""
        pixels = {name: x.to(self.tower_dtype) if x.is_floating_point() else x for name, x in inputs.items()}
        features = self.model.get_image_features(**pixels, return_dict=True).pooler_output
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in features])


def family_of(config: Any) -> Family:
    """Raises `Unsupported` for what was not checked."""
    family, kind = FAMILIES[config.model_type], config.vision_config.model_type
    if family.vision_types and kind not in family.vision_types:
        raise Unsupported(
            f"a vision tower of the kind {kind!r} has not been checked for {config.model_type}; "
            f"those that have are {', '.join(family.vision_types)}"
        )
    if config.image_token_id >= config.get_text_config().vocab_size:
        raise Unsupported("its token for images is outside its vocabulary")
    return family


def towers(model: nn.Module, family: Family) -> list[nn.Module]:
    return [model.get_submodule(name) for name in family.towers]


def settled_towers(model: nn.Module, family: Family) -> list[nn.Module]:
    """What int8 leaves alone: as it was read, or in fp32 where this processor has no bf16 arithmetic."""
    found = towers(model, family)
    if not cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"}:
        found = [tower.float() for tower in found]
    return found
