"""Models outside the native decoder's families: `transformers`' definitions on this engine's batches and cache.

The sequences of a step are concatenated to one row of tokens, `[1, T]`. Only attention may mix tokens, and it is
replaced (`attention.py`); models that mix tokens in another way are refused. A forward pass without weights finds the
shapes of the layers, and a check of the loaded model (`batch_check.py`) compares batched with unbatched logits.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any, NamedTuple

import torch
from torch import nn

from syringa.engine.cpu.layers.cache import CacheTensors
from syringa.engine.cpu.native import Kernels
from syringa.engine.execution.batch import StepTensors
from syringa.engine.gpu import device as gpu_device
from syringa.engine.gpu.cache import GpuCacheShape
from syringa.engine.gpu.model import GpuModel
from syringa.engine.gpu.ops.base import GpuOps
from syringa.engine.loading.loaded_model import CacheShape, Progress
from syringa.engine.loading.precision import check_host_memory
from syringa.engine.models.decoder import Model
from syringa.engine.models.hf import attention as hf_attention
from syringa.engine.models.hf import gpu as hf_gpu
from syringa.engine.models.hf import int8 as hf_int8
from syringa.engine.models.hf import missing_transformers
from syringa.engine.models.hf import vision as hf_vision
from syringa.engine.models.hf.attention import (
    LayerShape,
    PagedAttention,
    ShapeProbe,
    UnsupportedModel,
    attention_context,
    cache_heads,
)
from syringa.engine.models.hf.batch_check import check_batching
from syringa.engine.models.hf.definition import HFDefinition, find_definition, first_line, layer_types
from syringa.engine.models.hf.gguf_source import GgufSource
from syringa.engine.models.hf.progress import WeightProgress, count_linears
from syringa.engine.models.hf.vision import HFVisionLanguageModel
from syringa.engine.vision.image_reader import ImageReader
from syringa.engine.vision.preprocessor import VisionComponents
from syringa.errors import ModelError
from syringa.modelfiles import ModelDescription, ModelFiles

# What model definitions may raise when they are used in a way they were not written for.
FOREIGN_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)
# Products of other sizes round differently on a GPU; mixing tokens makes a far larger difference.
GPU_TOLERANCE = 0.1


class LoadedHFModel(NamedTuple):
    """A loaded model and its properties."""

    model: Model
    cache: CacheShape | GpuCacheShape
    parameters: int
    vocabulary: int
    vision: VisionComponents | None = None  # of a vision-language model
    gpu: GpuModel | None = None  # `model`, if it is on a GPU


class ProbeNeedsWeights(UnsupportedModel):
    """The forward pass depends on values, so the layers cannot be probed without weights."""


class HFModel:
    """A causal language model of `transformers` on a CPU."""

    def __init__(self, model: Any, layers: list[LayerShape], kernels: Kernels | None) -> None:
        self.model = model
        self.layers = layers
        self.kernels = kernels
        self.takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def forward(self, step: StepTensors, cache: CacheTensors) -> torch.Tensor:
        tokens = step.tokens[None]
        keep_logits = {"logits_to_keep": step.logit_rows} if self.takes_logits_to_keep else {}
        with attention_context(PagedAttention(self.layers, step, cache, self.kernels)):
            logits = self.model(
                input_ids=tokens,
                position_ids=step.positions.long()[None],
                attention_mask=torch.ones_like(tokens),
                use_cache=False,
                **keep_logits,
            ).logits[0]
        kept: torch.Tensor = logits if self.takes_logits_to_keep else logits[step.logit_rows]
        return kept.float()


def load_hf_model(
    files: ModelFiles,
    description: ModelDescription,
    dtype: str,
    kernels: Kernels | None,
    length: int,
    threads: int,
    device: torch.device | None = None,
    ops: GpuOps | None = None,
    progress: Progress | None = None,
) -> LoadedHFModel:
    """Load a model on the CPU, or on `device` with the GPU kernels (on a CPU device, their references).

    `progress` gets the number of parameters that were read and of layers that were converted, and their total.

    Raise `ModelError` with the reason if the model cannot be run, nearly always before its weights are read.
    """
    _prepare_transformers(description.architecture)
    try:
        return _load_hf_model(files, description, dtype, kernels, length, threads, device, ops, progress)
    except UnsupportedModel as reason:
        raise ModelError(f"{description.architecture} cannot be run: {reason}") from None


def check_definition(files: ModelFiles, description: ModelDescription) -> None:
    """Raise `ModelError` with the reason if a model cannot be run, as far as its config says without its weights."""
    _prepare_transformers(description.architecture)
    try:
        unloaded = _build_without_weights(find_definition(files, description), description.max_model_len)
        with contextlib.suppress(ProbeNeedsWeights):
            probe_layers(unloaded)
    except UnsupportedModel as reason:
        raise ModelError(f"{description.architecture} cannot be run: {reason}") from None


def _prepare_transformers(name: str) -> None:
    """Register our attention and layers, and silence the library. `name`: of the model, for an error message."""
    try:
        from transformers.utils import logging
    except ImportError:
        raise missing_transformers(name) from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hf_attention.register()
    hf_int8.register()


def _load_hf_model(
    files: ModelFiles,
    description: ModelDescription,
    dtype: str,
    kernels: Kernels | None,
    length: int,
    threads: int,
    device: torch.device | None,
    ops: GpuOps | None,
    progress: Progress | None,
) -> LoadedHFModel:
    definition = find_definition(files, description)
    family, vocabulary = definition.family, definition.config.get_text_config().vocab_size
    reader = ImageReader(files, family, definition.config) if family else None
    unloaded = _build_without_weights(definition, length)
    try:
        layers = probe_layers(unloaded)
    except ProbeNeedsWeights:
        layers = []
    parameters = sum(parameter.numel() for parameter in unloaded.parameters())
    if device is not None and device.type == "cuda":
        gpu, free = torch.cuda.get_device_name(device), gpu_device.free_memory(device)
        gpu_device.check_weights_fit(2 * parameters, dtype, description.name, free, gpu)
    if dtype != "gguf":  # blocks are packed as they are read
        check_host_memory(parameters, "fp32" if dtype == "fp32" else "bf16", description.name)
    half = torch.float32 if dtype == "fp32" else torch.bfloat16
    gguf, state_dict = None, None
    if files.kind == "gguf":
        gguf = GgufSource(files, description, unloaded, kernels, blocks=dtype == "gguf")
        state_dict = gguf.state_dict(half)
    converts = dtype in ("int8", "gguf") and device is None
    counted = WeightProgress(progress, count_linears(unloaded) if converts else 0)
    with counted.reading():
        model = _load_weights(definition, files, state_dict, half, length)
    layers = layers or probe_layers(model)
    if device is not None:
        return _move_to_gpu((model, layers, vocabulary, length, device, ops), parameters, reader, threads)
    if converts:
        assert kernels is not None  # checked by choose_dtype
        if gguf is not None:
            gguf.pack_layers(model, kernels, counted.advance)
        keep = hf_vision.towers_for_int8(model, family) if family else ()
        hf_int8.quantize_linears(model, kernels, keep, counted.advance)
        counted.finish()
    hf_model: Model = HFModel(model, layers, kernels)
    vision = None
    if family and reader:
        hf_model = vision_model = HFVisionLanguageModel(model, family, layers, kernels)
        vision = VisionComponents(reader, vision_model.encode, threads)
    cache = CacheShape(len(layers), *cache_heads(layers), half)
    _check(hf_model, cache, vocabulary, dtype)
    return LoadedHFModel(hf_model, cache, parameters, vocabulary, vision)


def _move_to_gpu(
    parts: tuple[Any, list[LayerShape], int, int, torch.device, GpuOps | None],
    parameters: int,
    reader: ImageReader | None,
    threads: int,
) -> LoadedHFModel:
    """`parts`: the arguments of `hf_gpu.move_to_gpu`."""
    try:
        if reader is None:
            gpu, vision = hf_gpu.move_to_gpu(*parts), None
        else:
            gpu, vision = hf_vision.move_to_gpu(*parts, reader, threads)
    except FOREIGN_ERRORS as error:
        raise UnsupportedModel(f"it cannot be moved to the GPU: {first_line(error)}") from None
    vocabulary, kind = gpu.decoder.vocabulary, str(gpu.shape.dtype).removeprefix("torch.")
    _check(gpu, gpu.shape, vocabulary, f"{kind} on the GPU", GPU_TOLERANCE)
    return LoadedHFModel(gpu, gpu.shape, parameters, vocabulary, vision, gpu)


def _check(model: Model, cache: CacheShape | GpuCacheShape, vocabulary: int, how: str, tolerance: float = 0.01) -> None:
    try:
        check_batching(model, cache, vocabulary, tolerance)
    except FOREIGN_ERRORS as error:
        raise UnsupportedModel(f"its definition in transformers fails in {how}: {first_line(error)}") from None


def _build_without_weights(definition: HFDefinition, length: int) -> Any:
    """Build a model on the meta device. Raise `UnsupportedModel` if its definition cannot run on this engine."""
    model_class, config, family = definition
    # The layer types of hybrid models were checked by find_definition.
    if model_class._is_stateful and not layer_types(config.get_text_config()):
        raise UnsupportedModel("it is a recurrent or state-space model, and only attention is supported")
    if not model_class._can_set_attn_implementation():
        raise UnsupportedModel("its definition in transformers does not use the attention interface")
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        raise UnsupportedModel("its definition in transformers takes no positions")
    try:
        with torch.device("meta"):
            model = model_class._from_config(config, attn_implementation=definition.attention).eval()
    except FOREIGN_ERRORS as error:
        raise UnsupportedModel(f"its config cannot be used: {first_line(error)}") from None
    tower_modules = {
        module for tower in (hf_vision.towers(model, family) if family else ()) for module in tower.modules()
    }
    if any(
        isinstance(module, (nn.Conv1d, nn.Conv2d, nn.RNNBase))
        for module in model.modules()
        if module not in tower_modules
    ):
        raise UnsupportedModel("it has convolutions or recurrence over tokens, and only attention is supported")
    freeze_dynamic_rope(model, length)
    if hf_int8.has_experts(model):
        model.set_experts_implementation("batched_mm")  # the other implementations depend on data
    return model


def probe_layers(model: Any) -> list[LayerShape]:
    """Return the shape of each attention call of a forward pass."""
    probe, device = ShapeProbe(), model.device
    tokens = torch.zeros(1, 4, dtype=torch.int64, device=device)
    positions = torch.arange(4, device=device)[None]
    try:
        with attention_context(probe), torch.no_grad():
            model(input_ids=tokens, position_ids=positions, attention_mask=torch.ones_like(tokens), use_cache=False)
    except FOREIGN_ERRORS as error:
        raise ProbeNeedsWeights(f"its definition in transformers fails: {first_line(error)}") from None
    if (rest := model.config.get_text_config().num_hidden_layers - len(probe.layers)) > 0:
        raise UnsupportedModel(f"{rest} of its layers do not use the attention interface")
    return probe.layers


def _load_weights(
    definition: HFDefinition, files: ModelFiles, state_dict: dict[str, Any] | None, dtype: torch.dtype, length: int
) -> Any:
    """Load the weights of `state_dict`, or those of the folder if it is None."""
    from safetensors import SafetensorError

    try:
        model, report = definition.model_class.from_pretrained(
            files.path if state_dict is None else None,
            state_dict=state_dict,
            config=definition.config,
            dtype=dtype,
            attn_implementation=definition.attention,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (*FOREIGN_ERRORS, OSError, SafetensorError) as error:
        raise ModelError(f"{files.path} cannot be loaded: {first_line(error)}") from None
    # transformers initializes missing tensors randomly.
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"{files.path} has no tensor for {missing[0]!r}: the model is incomplete")
    model.eval().requires_grad_(False)
    if hf_int8.has_experts(model):
        model.set_experts_implementation("eager")
    freeze_dynamic_rope(model, length)
    return model


def freeze_dynamic_rope(model: nn.Module, length: int) -> None:
    """Replace rotary scaling that follows the longest sequence of a batch by that of a sequence of `length` tokens.

    The cached keys of a sequence must depend neither on the rest of the batch nor on how long the sequence becomes.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        rope_type: Any = getattr(module, "rope_type", None)
        if not isinstance(rope_type, (str, dict)):
            continue
        by_layer_type: dict[str | None, str] = rope_type if isinstance(rope_type, dict) else {None: rope_type}
        for layer_type, kind in by_layer_type.items():
            if "dynamic" not in kind and kind != "longrope":
                continue
            prefix = f"{layer_type}_" if layer_type else ""
            old = getattr(module, f"{prefix}inv_freq")
            arguments = {"layer_type": layer_type} if layer_type else {}
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, old.device, seq_len=length, **arguments)
            setattr(module, f"{prefix}inv_freq", frequencies)
            setattr(module, f"{prefix}attention_scaling", scaling)
            by_layer_type[layer_type] = "default"
        if isinstance(rope_type, str):
            module.rope_type = by_layer_type[None]  # type: ignore[assignment]
