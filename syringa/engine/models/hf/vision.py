"""`transformers`' vision-language models: image embeddings are written over the embeddings of placeholder tokens."""

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
from syringa.engine.gpu.decoder import ModelInput
from syringa.engine.gpu.device import NO_GPU_MEMORY
from syringa.engine.gpu.model import GpuModel
from syringa.engine.gpu.ops.base import GpuOps, choose_ops
from syringa.engine.models.hf.attention import LayerShape, PagedAttention, UnsupportedModel, attention_context
from syringa.engine.models.hf.gpu import HFGpuDecoder, can_capture_graphs
from syringa.engine.vision.family import FAMILIES, TowerInputs, VisionFamily
from syringa.engine.vision.image_reader import MAX_PIXELS, ImageReader
from syringa.engine.vision.preprocessor import VisionComponents
from syringa.engine.vision.step_images import StepImages
from syringa.errors import EngineError, ModelError

PROBE_PIXELS = 1024  # side of the probe image, for processors whose output has a fixed size
PROBE_ASPECT = 64  # aspect ratio of the probe image, for processors whose output grows with the image


class HFVisionLanguageModel:
    """`HFModel` with image embeddings among the token embeddings."""

    def __init__(self, model: Any, family: VisionFamily, layers: list[LayerShape], kernels: Kernels | None) -> None:
        self.model = model
        self.family = family
        self.layers = layers
        self.kernels = kernels
        self.tower_dtype: torch.dtype = next(towers(model, family)[0].parameters()).dtype
        for module in towers(model, family)[0].modules():
            if any(isinstance(child, nn.Conv2d) for child in module.children()):
                # The patch embedding returns a strided tensor, which each layer would copy: a quarter of its time.
                module.register_forward_hook(lambda _, inputs, rows: rows.contiguous())

    @torch.inference_mode()
    def forward(self, step: StepTensors, cache: CacheTensors) -> torch.Tensor:
        inputs = embed_inputs(self.model, step.tokens, step.positions, step.images)
        with attention_context(PagedAttention(self.layers, step, cache, self.kernels)):
            logits: torch.Tensor = self.model(
                **inputs,
                attention_mask=torch.ones_like(step.tokens)[None],
                use_cache=False,
                logits_to_keep=step.logit_rows,
            ).logits[0]
        return logits.float()

    @torch.inference_mode()
    def encode(self, inputs: TowerInputs) -> torch.Tensor:
        """Run the vision tower. Return `[image tokens, hidden]`."""
        return run_tower(self.model, inputs, self.tower_dtype)


class HFVisionLanguageGpuDecoder(HFGpuDecoder):
    """`HFVisionLanguageModel` on a GPU. Image embeddings are kept in host memory."""

    @cached_property
    def stream(self) -> torch.cuda.Stream | None:
        """The tower's own stream: on the stream of the steps, they would wait for it."""
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def model_inputs(self, tokens: torch.Tensor, positions: torch.Tensor, rows: ModelInput) -> dict[str, torch.Tensor]:
        if rows.position_deltas is not None:
            positions = positions + rows.position_deltas
        return embed_inputs(self.model, tokens, positions, rows.images)

    @torch.inference_mode()
    def encode(self, inputs: TowerInputs) -> torch.Tensor:
        """Like `HFVisionLanguageModel.encode`. Blocks the calling thread until the tower is done."""
        try:
            with torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
                pixels = {name: x.to(self.device) for name, x in inputs.items()}
                return run_tower(self.model, pixels, self.model.dtype).cpu()
        except torch.OutOfMemoryError:
            raise EngineError("The GPU has no memory left to encode this image: try again later.") from None

    def measure_peak_memory(self, inputs: TowerInputs) -> int:
        """Return the bytes that one call of the tower allocates at most."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        try:
            self.encode(inputs)
        except EngineError:
            raise ModelError(
                "the GPU has too little memory for the model's vision tower besides the weights: use --device cpu",
                code=NO_GPU_MEMORY,
            ) from None
        return torch.cuda.max_memory_allocated(self.device) - before


def move_to_gpu(
    model: Any,
    layers: list[LayerShape],
    vocabulary: int,
    length: int,
    device: torch.device,
    ops: GpuOps | None,
    reader: ImageReader,
    threads: int,
) -> tuple[GpuModel, VisionComponents]:
    """Like `hf.gpu.move_to_gpu`, for a vision-language model."""
    decoder = HFVisionLanguageGpuDecoder(model.to(device), layers, vocabulary, ops or choose_ops(device), device)
    if device.type == "cuda":
        decoder.supports_cuda_graphs = decoder.supports_cuda_graphs and can_capture_graphs(decoder)
        decoder.concurrent_bytes = decoder.measure_peak_memory(largest_tower_inputs(reader, length))
    return GpuModel(decoder, decoder.cache_shape, length), VisionComponents(reader, decoder.encode, threads)


def embed_inputs(
    model: Any, tokens: torch.Tensor, positions: torch.Tensor, images: StepImages | None
) -> dict[str, torch.Tensor]:
    """Return the language model's arguments: token embeddings with those of images written over placeholders."""
    rows = model.get_input_embeddings()(tokens)
    positions = positions.long()[None]
    if images is not None:
        for row, embeddings in images.embeddings:
            rows[row : row + len(embeddings)] = embeddings.to(rows.dtype)
        if images.mrope_positions is not None:
            positions = images.mrope_positions[:, None]
    return {"inputs_embeds": rows[None], "position_ids": positions}


def run_tower(model: Any, inputs: TowerInputs, dtype: torch.dtype) -> torch.Tensor:
    pixels = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    features = model.get_image_features(**pixels, return_dict=True).pooler_output
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in features])


def largest_tower_inputs(reader: ImageReader, length: int) -> TowerInputs:
    """Return the largest input of one tower call. It grows with the image and the context for M-RoPE models only."""
    from PIL import Image as Pillow

    width = height = PROBE_PIXELS
    if reader.family.mrope:
        vision = reader.config.vision_config
        cell = vision.patch_size * vision.spatial_merge_size
        cells = min(length, min(MAX_PIXELS, reader.processor.size["longest_edge"]) // cell**2)
        height = isqrt(cells // PROBE_ASPECT) + 1  # a long strip comes closest to `cells`
        width, height = cells // height * cell, height * cell
    prepared = reader.processor(Pillow.new("RGB", (width, height)), return_tensors="pt", **dict(reader.family.options))
    return next(iter(reader.family.tower_inputs(prepared)))


def find_family(config: Any) -> VisionFamily:
    """Return the family of a model. Raise `UnsupportedModel` if its combination of towers was not tested."""
    family, kind = FAMILIES[config.model_type], config.vision_config.model_type
    if family.vision_types and kind not in family.vision_types:
        raise UnsupportedModel(
            f"a vision tower of the kind {kind!r} has not been checked for {config.model_type}; "
            f"those that have are {', '.join(family.vision_types)}"
        )
    if config.image_token_id >= config.get_text_config().vocab_size:
        raise UnsupportedModel("its token for images is outside its vocabulary")
    return family


def towers(model: nn.Module, family: VisionFamily) -> list[nn.Module]:
    return [model.get_submodule(name) for name in family.towers]


def towers_for_int8(model: nn.Module, family: VisionFamily) -> list[nn.Module]:
    """Return the modules that int8 quantization skips, converted to fp32 if the CPU has no bf16 arithmetic."""
    found = towers(model, family)
    if not cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"}:
        found = [tower.float() for tower in found]
    return found
