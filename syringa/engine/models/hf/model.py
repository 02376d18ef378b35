"""Models beyond the native decoder: `transformers`' definitions, on our batch, cache and scheduler.

A step's sequences lie one after the other in a single row of tokens, `[1, T]`. All that mixes tokens is attention, and
that is ours (`breadth_attention.py`); models that mix them in another way are refused. Nothing is trusted here: a model
without weights is walked through once to learn its layers and find what it cannot do, and one with weights must give
the same logits in pieces and in company as whole and alone.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import nn

from syringa.engine.cpu.layers.cache import CacheTensors
from syringa.engine.cpu.native import Kernels
from syringa.engine.execution.batch import StepTensors
from syringa.engine.gpu import device as machine
from syringa.engine.gpu.cache import GpuCacheShape
from syringa.engine.gpu.model import GpuModel
from syringa.engine.gpu.ops.base import Ops
from syringa.engine.loading.loader import CacheShape
from syringa.engine.loading.precision import check_memory
from syringa.engine.models.decoder import Model
from syringa.engine.models.hf import attention as breadth_attention
from syringa.engine.models.hf import gpu as breadth_gpu
from syringa.engine.models.hf import int8 as breadth_int8
from syringa.engine.models.hf import vision as breadth_vision
from syringa.engine.models.hf.attention import LayerShape, PagedPass, Probe, Unsupported, cache_heads, running
from syringa.engine.models.hf.batch_check import check_batching
from syringa.engine.models.hf.definition import Definition, define, first_line, layer_kinds
from syringa.engine.models.hf.rotary import fix_rotary
from syringa.engine.models.hf.vision import SeeingModel
from syringa.engine.vision.preprocessor import Vision
from syringa.engine.vision.reader import Reader
from syringa.errors import ModelError
from syringa.modelfiles import ModelDescription, ModelFiles

# What code that was not written for this may raise.
FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)
# On a GPU, products of other sizes round elsewhere; what mixes tokens differs by far more.
GPU_TOLERANCE = 0.1


class Breadth(NamedTuple):
    """A loaded model. `vision` prepares images for one that sees."""

    model: Model
    cache: CacheShape | GpuCacheShape
    parameters: int
    vocabulary: int
    vision: Vision | None = None
    gpu: GpuModel | None = None  # the model, where it is on one


class NeedsWeights(Unsupported):
    """What the model does depends on more than shapes, so that it cannot be walked through without weights."""


class BreadthModel:
    def __init__(self, model: Any, layers: list[LayerShape], kernels: Kernels | None) -> None:
        self.model = model
        self.layers = layers
        self.kernels = kernels
        self.narrows = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def forward(self, step: StepTensors, cache: CacheTensors) -> torch.Tensor:
        tokens = step.tokens[None]
        narrowing = {"logits_to_keep": step.wanted} if self.narrows else {}
        with running(PagedPass(self.layers, step, cache, self.kernels)):
            logits = self.model(
                input_ids=tokens,
                position_ids=step.positions.long()[None],
                attention_mask=torch.ones_like(tokens),
                use_cache=False,
                **narrowing,
            ).logits[0]
        wanted: torch.Tensor = logits if self.narrows else logits[step.wanted]
        return wanted.float()


def load_breadth(
    files: ModelFiles,
    description: ModelDescription,
    dtype: str,
    kernels: Kernels | None,
    length: int,
    threads: int,
    device: torch.device | None = None,
    ops: Ops | None = None,
) -> Breadth:
    """Raises `ModelError` naming what the model does that cannot be run; nearly always before its weights are read.

    With a `device` it goes there, on the GPU's kernels or their references.
    """
    name = description.architecture
    try:
        from transformers.utils import logging
    except ImportError:
        raise ModelError(
            f"{name} runs on transformers' definition of it, which is not installed: pip install 'syringa[models]'"
        ) from None
    if files.kind != "folder":
        raise ModelError(f"{name} cannot be read from a GGUF file: give its Hugging Face folder")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    breadth_attention.register()
    breadth_int8.register()
    try:
        return _load_breadth(files, description, dtype, kernels, length, threads, device, ops)
    except Unsupported as reason:
        raise ModelError(f"{name} cannot be run: {reason}") from None


def _load_breadth(
    files: ModelFiles,
    description: ModelDescription,
    dtype: str,
    kernels: Kernels | None,
    length: int,
    threads: int,
    device: torch.device | None,
    ops: Ops | None,
) -> Breadth:
    definition = define(files, description)
    family, vocabulary = definition.family, definition.config.get_text_config().vocab_size
    reader = Reader(files, family, definition.config) if family else None
    empty = _empty(definition, length)
    try:
        layers = _probe(empty)
    except NeedsWeights:
        layers = []
    parameters = sum(parameter.numel() for parameter in empty.parameters())
    if device is not None and device.type == "cuda":
        gpu, free = torch.cuda.get_device_name(device), machine.free_memory(device)
        machine.check_weights(parameters, dtype, description.name, free, gpu, halvable=False)
    # int8 is packed from bf16 weights, which therefore have to fit first; and those of a GPU pass through here.
    check_memory(parameters, "bf16" if dtype == "int8" else dtype, description.name)
    half = torch.float32 if dtype == "fp32" else torch.bfloat16
    model = _load(definition, files, half, length)
    layers = layers or _probe(model)
    if device is not None:
        return _place((model, layers, vocabulary, length, device, ops), parameters, reader, threads)
    if dtype == "int8":
        assert kernels is not None  # choose_dtype saw to it
        breadth_int8.swap_linears(model, kernels, breadth_vision.settled_towers(model, family) if family else ())
    breadth: Model = BreadthModel(model, layers, kernels)
    vision = None
    if family and reader:
        breadth = seeing = SeeingModel(model, family, layers, kernels)
        vision = Vision(reader, seeing.encode, threads)
    cache = CacheShape(len(layers), *cache_heads(layers), half)
    _check(breadth, cache, vocabulary, dtype)
    return Breadth(breadth, cache, parameters, vocabulary, vision)


def _place(
    parts: tuple[Any, list[LayerShape], int, int, torch.device, Ops | None],
    parameters: int,
    reader: Reader | None,
    threads: int,
) -> Breadth:
    """`parts`: model, layers, vocabulary, length, device and its kernels."""
    try:
        if reader is None:
            gpu, vision = breadth_gpu.on_device(*parts), None
        else:
            gpu, vision = breadth_vision.on_device(*parts, reader, threads)
    except FAILURES as error:
        raise Unsupported(f"it cannot be moved to the GPU: {first_line(error)}") from None
    vocabulary, kind = gpu.decoder.vocabulary, str(gpu.shape.dtype).removeprefix("torch.")
    _check(gpu, gpu.shape, vocabulary, f"{kind} on the GPU", GPU_TOLERANCE)
    return Breadth(gpu, gpu.shape, parameters, vocabulary, vision, gpu)


def _check(model: Model, cache: CacheShape | GpuCacheShape, vocabulary: int, how: str, tolerance: float = 0.01) -> None:
    try:
        check_batching(model, cache, vocabulary, tolerance)
    except FAILURES as error:
        raise Unsupported(f"its definition in transformers fails in {how}: {first_line(error)}") from None


def _empty(definition: Definition, length: int) -> Any:
    """The model without weights."""
    model_class, config, family = definition
    # A hybrid's kinds of layer have been checked one by one.
    if model_class._is_stateful and not layer_kinds(config.get_text_config()):
        raise Unsupported("it is a recurrent or state-space model, and only attention is supported")
    if not model_class._can_set_attn_implementation():
        raise Unsupported("its definition in transformers does not use the attention interface")
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        raise Unsupported("its definition in transformers takes no positions")
    with torch.device("meta"):
        model = model_class._from_config(config, attn_implementation=definition.attention).eval()
    apart = {module for tower in (breadth_vision.towers(model, family) if family else ()) for module in tower.modules()}
    if any(isinstance(module, (nn.Conv1d, nn.Conv2d, nn.RNNBase)) for module in model.modules() if module not in apart):
        raise Unsupported("it has convolutions or recurrence over tokens, and only attention is supported")
    fix_rotary(model, length)
    if breadth_int8.has_experts(model):
        model.set_experts_implementation("batched_mm")  # what the others do depends on data
    return model


def _probe(model: Any) -> list[LayerShape]:
    """What each attention call of a forward pass needs."""
    probe, device = Probe(), model.device
    tokens = torch.zeros(1, 4, dtype=torch.int64, device=device)
    positions = torch.arange(4, device=device)[None]
    try:
        with running(probe), torch.no_grad():
            model(input_ids=tokens, position_ids=positions, attention_mask=torch.ones_like(tokens), use_cache=False)
    except FAILURES as error:
        raise NeedsWeights(f"its definition in transformers fails: {first_line(error)}") from None
    if (rest := model.config.get_text_config().num_hidden_layers - len(probe.layers)) > 0:
        raise Unsupported(f"{rest} of its layers do not use the attention interface")
    return probe.layers


def _load(definition: Definition, files: ModelFiles, dtype: torch.dtype, length: int) -> Any:
    from safetensors import SafetensorError

    try:
        model, report = definition.model_class.from_pretrained(
            files.path,
            config=definition.config,
            dtype=dtype,
            attn_implementation=definition.attention,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (*FAILURES, OSError, SafetensorError) as error:
        raise ModelError(f"{files.path} cannot be loaded: {first_line(error)}") from None
    # Transformers fills what is missing with random numbers.
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"{files.path} has no tensor for {missing[0]!r}: the model is incomplete")
    model.eval().requires_grad_(False)
    if breadth_int8.has_experts(model):
        model.set_experts_implementation("eager")
    fix_rotary(model, length)
    return model
