"""Image-text models: `transformers`' language model on our batch, with rows of its vision tower among the tokens'."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cached_property
from math import isqrt
from typing import Any

import torch
from torch import nn

from syringa.engine.cpu.features import cpu_flags
from syringa.engine.cpu.layers.cache import CacheTensors
from syringa.engine.cpu.native import Kernels
from syringa.engine.execution.batch import StepTensors
from syringa.engine.gpu.decoder import Rows
from syringa.engine.gpu.device import NO_GPU_MEMORY
from syringa.engine.gpu.model import GpuModel
from syringa.engine.gpu.ops.base import Ops, choose_ops
from syringa.engine.models.hf.attention import LayerShape, PagedPass, Unsupported, running
from syringa.engine.models.hf.gpu import BreadthDecoder, records
from syringa.engine.vision.family import FAMILIES, Family, Inputs
from syringa.engine.vision.layout import StepPictures
from syringa.engine.vision.preprocessor import Vision
from syringa.engine.vision.reader import MOST_PIXELS, Reader
from syringa.errors import EngineError, ModelError

LARGE = 1024  # pixels along each side, where the processor makes frames of one size
STRIP = 64  # times as wide as it is high, at most


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
        given = with_pictures(self.model, step.tokens, step.positions, step.pictures)
        with running(PagedPass(self.layers, step, cache, self.kernels)):
            logits: torch.Tensor = self.model(
                **given,
                attention_mask=torch.ones_like(step.tokens)[None],
                use_cache=False,
                logits_to_keep=step.wanted,
            ).logits[0]
        return logits.float()

    @torch.inference_mode()
    def encode(self, inputs: Inputs) -> torch.Tensor:
        """What the tower makes of one frame: `[places, hidden]`."""
        return encode(self.model, inputs, self.tower_dtype)


class SeeingDecoder(BreadthDecoder):
    """The same on a GPU; what the tower has made of an image comes back to the host, and waits there."""

    @cached_property
    def stream(self) -> torch.cuda.Stream | None:
        """The tower's own: on that of the steps, these would stand still until it is done."""
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def given(self, tokens: torch.Tensor, positions: torch.Tensor, rows: Rows) -> dict[str, torch.Tensor]:
        if rows.shifts is not None:
            positions = positions + rows.shifts
        return with_pictures(self.model, tokens, positions, rows.pictures)

    @torch.inference_mode()
    def encode(self, inputs: Inputs) -> torch.Tensor:
        """`SeeingModel.encode`'s contract. Waits for the tower, in the thread that asks for it."""
        try:
            with torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
                pixels = {name: x.to(self.device) for name, x in inputs.items()}
                return encode(self.model, pixels, self.model.dtype).cpu()
        except torch.OutOfMemoryError:
            raise EngineError("The GPU has no memory left to look at this image: try again later.") from None

    def rehearse(self, frame: Inputs) -> int:
        """Bytes that the tower takes for a frame."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        try:
            self.encode(frame)
        except EngineError:
            raise ModelError(
                "the GPU has no room for the model's vision tower beside the weights: use --device cpu",
                code=NO_GPU_MEMORY,
            ) from None
        return torch.cuda.max_memory_allocated(self.device) - before


def on_device(
    model: Any,
    layers: list[LayerShape],
    vocabulary: int,
    length: int,
    device: torch.device,
    ops: Ops | None,
    reader: Reader,
    threads: int,
) -> tuple[GpuModel, Vision]:
    """`breadth_gpu.on_device` for a model that sees."""
    decoder = SeeingDecoder(model.to(device), layers, vocabulary, ops or choose_ops(device), device)
    if device.type == "cuda":
        decoder.recordable = decoder.recordable and records(decoder)
        decoder.beside = decoder.rehearse(largest_frame(reader, length))
    return GpuModel(decoder, decoder.cache_shape, length), Vision(reader, decoder.encode, threads)


def with_pictures(
    model: Any, tokens: torch.Tensor, positions: torch.Tensor, pictures: StepPictures | None
) -> dict[str, torch.Tensor]:
    """What the language model is called with: rows of the embedding, some of which are images'."""
    rows = model.get_input_embeddings()(tokens)
    positions = positions.long()[None]
    if pictures is not None:
        for row, filling in pictures.fills:
            rows[row : row + len(filling)] = filling.to(rows.dtype)
        if pictures.positions is not None:
            positions = pictures.positions[:, None]
    return {"inputs_embeds": rows[None], "position_ids": positions}


def encode(model: Any, inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
    pixels = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    features = model.get_image_features(**pixels, return_dict=True).pooler_output
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in features])


def largest_frame(reader: Reader, length: int) -> Inputs:
    """The most that the tower is given at once. Only grids grow with the image, up to what fits in a context."""
    from PIL import Image as Pillow

    width = height = LARGE
    if reader.family.planar:
        vision = reader.config.vision_config
        cell = vision.patch_size * vision.spatial_merge_size
        cells = min(length, min(MOST_PIXELS, reader.processor.size["longest_edge"]) // cell**2)
        height = isqrt(cells // STRIP) + 1  # in strips, few cells are left over
        width, height = cells // height * cell, height * cell
    prepared = reader.processor(Pillow.new("RGB", (width, height)), return_tensors="pt", **dict(reader.family.options))
    return next(iter(reader.family.frames(prepared)))


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
