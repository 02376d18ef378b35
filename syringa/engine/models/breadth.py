"""Models beyond the native decoder: `transformers`' definitions, on our batch, cache and scheduler.

A step's sequences lie one after the other in a single row of tokens, `[1, T]`. All that mixes tokens is attention, and
that is ours (`breadth_attention.py`); models that mix them in another way are refused. Nothing is trusted here: a model
without weights is walked through once to learn its layers and find what it cannot do, and one with weights must give
the same logits in pieces and in company as whole and alone.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import nn

from syringa.engine.batch import StepTensors
from syringa.engine.kv_cache import BLOCK_SIZE
from syringa.engine.layers.cache import CacheTensors
from syringa.engine.loader import CacheShape, check_memory
from syringa.engine.models import breadth_attention, breadth_int8
from syringa.engine.models.breadth_attention import LayerShape, PagedPass, Probe, Unsupported, cache_heads, running
from syringa.engine.models.decoder import Model
from syringa.engine.native import Kernels
from syringa.errors import ModelError
from syringa.modelfiles import ModelDescription, ModelFiles

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}
# What code that was not written for this may raise.
FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)
IMAGE_CONFIGS = ("vision_config", "audio_config", "image_config")


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
    files: ModelFiles, description: ModelDescription, dtype: str, kernels: Kernels | None, length: int
) -> tuple[Model, CacheShape, int]:
    """Raises `ModelError` naming what the model does that cannot be run; nearly always before its weights are read."""
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
        return _load_breadth(files, description, dtype, kernels, length)
    except Unsupported as reason:
        raise ModelError(f"{name} cannot be run: {reason}") from None


def _load_breadth(
    files: ModelFiles, description: ModelDescription, dtype: str, kernels: Kernels | None, length: int
) -> tuple[Model, CacheShape, int]:
    model_class, config = _definition(files, description)
    empty = _empty(model_class, config, length)
    try:
        layers = _probe(empty)
    except NeedsWeights:
        layers = []
    parameters = sum(parameter.numel() for parameter in empty.parameters())
    # int8 is packed from bf16 weights, which therefore have to fit first.
    check_memory(parameters, "bf16" if dtype == "int8" else dtype, description.name)
    half = torch.float32 if dtype == "fp32" else torch.bfloat16
    model = _load(model_class, files, config, half, length)
    layers = layers or _probe(model)
    if dtype == "int8":
        assert kernels is not None  # choose_dtype saw to it
        breadth_int8.swap_linears(model, kernels)
    breadth = BreadthModel(model, layers, kernels)
    cache = CacheShape(len(layers), *cache_heads(layers), half)
    try:
        _check_batching(breadth, cache, description.config["vocab_size"])
    except FAILURES as error:
        raise Unsupported(f"its definition in transformers fails in {dtype}: {_first_line(error)}") from None
    return breadth, cache, parameters


def _definition(files: ModelFiles, description: ModelDescription) -> tuple[Any, Any]:
    """The model's class and config in transformers, once nothing known speaks against them."""
    from transformers import AutoConfig, AutoModelForCausalLM, __version__

    raw = description.config
    if "vocab_size" not in raw:
        raise Unsupported("its config.json has no 'vocab_size'")
    if "quantization_config" in raw:
        raise Unsupported("its folder is quantized; use the original, or a GGUF file of a Llama-like model")
    if any(raw.get(each) for each in IMAGE_CONFIGS):
        raise Unsupported("models that read images or sound are not supported yet")
    try:
        config = AutoConfig.from_pretrained(files.path, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, TypeError, OSError, ImportError) as error:
        raise Unsupported(
            f"transformers {__version__} does not know its type, {raw.get('model_type')!r}, or not with this config: "
            f"{_first_line(error)}"
        ) from None
    if config.is_encoder_decoder:
        raise Unsupported("it is an encoder-decoder model, and only decoders are supported")
    _check_config(config)
    model_class = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if model_class is None:
        raise Unsupported("transformers has no causal language model of this type")
    if model_class.__name__ != description.architecture:
        raise Unsupported(f"its config.json names that class, and only {model_class.__name__} generates text")
    return model_class, config


def _check_config(config: Any) -> None:
    if others := _layer_kinds(config) - ATTENTION_LAYERS:
        raise Unsupported(f"it has {', '.join(sorted(others))} layers, and only plain attention is supported")
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        raise Unsupported("its positions are ALiBi biases, which are not supported")


def _layer_kinds(config: Any) -> set[str]:
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return set(map(str, kinds))


def _empty(model_class: Any, config: Any, length: int) -> Any:
    """The model without weights."""
    if model_class._is_stateful and not _layer_kinds(config):  # a hybrid's kinds have been checked one by one
        raise Unsupported("it is a recurrent or state-space model, and only attention is supported")
    if not model_class._can_set_attn_implementation():
        raise Unsupported("its definition in transformers does not use the attention interface")
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        raise Unsupported("its definition in transformers takes no positions")
    with torch.device("meta"):
        model = model_class._from_config(config, attn_implementation=breadth_attention.NAME).eval()
    if any(isinstance(module, (nn.Conv1d, nn.Conv2d, nn.RNNBase)) for module in model.modules()):
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
        raise NeedsWeights(f"its definition in transformers fails: {_first_line(error)}") from None
    if (rest := model.config.num_hidden_layers - len(probe.layers)) > 0:
        raise Unsupported(f"{rest} of its layers do not use the attention interface")
    return probe.layers


def _load(model_class: Any, files: ModelFiles, config: Any, dtype: torch.dtype, length: int) -> Any:
    from safetensors import SafetensorError

    try:
        model, report = model_class.from_pretrained(
            files.path,
            config=config,
            dtype=dtype,
            attn_implementation=breadth_attention.NAME,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (*FAILURES, OSError, SafetensorError) as error:
        raise ModelError(f"{files.path} cannot be loaded: {_first_line(error)}") from None
    # Transformers fills what is missing with random numbers.
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"{files.path} has no tensor for {missing[0]!r}: the model is incomplete")
    model.eval().requires_grad_(False)
    if breadth_int8.has_experts(model):
        model.set_experts_implementation("eager")
    fix_rotary(model, length)
    return model


def fix_rotary(model: nn.Module, length: int) -> None:
    """Settles rotary scaling that would follow the longest sequence of a batch, as if that were `length`.

    A sequence's cached keys must not depend on its neighbours, nor on how long it has become since.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        if not isinstance(kinds, (str, dict)):
            continue
        each: dict[str | None, str] = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer_type, kind in each.items():
            if "dynamic" not in kind and kind != "longrope":
                continue
            prefix = f"{layer_type}_" if layer_type else ""
            old = getattr(module, f"{prefix}inv_freq")
            arguments = {"layer_type": layer_type} if layer_type else {}
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, old.device, seq_len=length, **arguments)
            setattr(module, f"{prefix}inv_freq", frequencies)
            setattr(module, f"{prefix}attention_scaling", scaling)
            each[layer_type] = "default"
        if isinstance(kinds, str):
            module.rope_type = each[None]  # type: ignore[assignment]


def _check_batching(model: BreadthModel, shape: CacheShape, vocabulary: int) -> None:
    """Computes a short prompt whole, then in two pieces behind another sequence. The logits must be the same.

    This finds what a walk without weights cannot: positions of the model's own counting, or tokens mixed elsewhere.
    """
    cache = shape.allocate(3)
    prompt = [(7 * i + 3) % vocabulary for i in range(12)]
    whole = model.forward(_step([(prompt, 0, 0)]), cache)
    other = prompt[::-1]
    model.forward(_step([(other[:7], 0, 1), (prompt[:5], 0, 2)]), cache)
    pieces = model.forward(_step([(other[7:], 7, 1), (prompt[5:], 5, 2)]), cache)[-1:]
    difference, peak = float((whole - pieces).abs().max()), float(whole.abs().max())
    if not math.isfinite(peak) or difference > 0.01 * peak:
        raise Unsupported("its answers change with what is in the batch, so it mixes tokens outside attention")


def _step(sequences: list[tuple[list[int], int, int]]) -> StepTensors:
    """A step of sequences of one block each, as (tokens, first position, block). The last row of each is wanted."""
    positions = [torch.arange(first, first + len(tokens)) for tokens, first, _ in sequences]
    lengths = torch.tensor([0] + [len(tokens) for tokens, _, _ in sequences])
    starts = lengths.cumsum(0)
    return StepTensors(
        tokens=torch.tensor([token for tokens, _, _ in sequences for token in tokens]),
        positions=torch.cat(positions).int(),
        slots=torch.cat([at + block * BLOCK_SIZE for at, (_, _, block) in zip(positions, sequences, strict=True)]),
        starts=starts.int(),
        first=torch.tensor([first for _, first, _ in sequences], dtype=torch.int32),
        tables=torch.tensor([[block] for _, _, block in sequences], dtype=torch.int32),
        wanted=starts[1:] - 1,
    )


def _first_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0] or type(error).__name__
    return line if len(line) <= 160 else line[:160].rsplit(" ", 1)[0] + " …"
