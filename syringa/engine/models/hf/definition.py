"""What transformers knows of a model, and what speaks against running it before it is built."""

from __future__ import annotations

from typing import Any, NamedTuple

from syringa.engine.loading.loader import IMAGE_CONFIGS
from syringa.engine.models.hf import attention as breadth_attention
from syringa.engine.models.hf import vision
from syringa.engine.models.hf.attention import Unsupported
from syringa.engine.vision.family import FAMILIES, Family
from syringa.modelfiles import ModelDescription, ModelFiles

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}


class Definition(NamedTuple):
    """A model as transformers defines it, once nothing known speaks against it."""

    model_class: Any
    config: Any
    family: Family | None  # of those that read images

    @property
    def attention(self) -> Any:
        if self.family is None:
            return breadth_attention.NAME
        return {"": breadth_attention.NAME, "text_config": breadth_attention.NAME, "vision_config": "sdpa"}


def define(files: ModelFiles, description: ModelDescription) -> Definition:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, __version__

    raw = description.config
    if "quantization_config" in raw:
        raise Unsupported("its folder is quantized; use the original, or a GGUF file of a Llama-like model")
    sees = any(raw.get(each) for each in IMAGE_CONFIGS)
    if sees and raw.get("model_type") not in FAMILIES:
        raise Unsupported(
            f"models that read images or sound in the way of {raw.get('model_type')!r} have not been checked; "
            f"those that read images and have are {', '.join(sorted(FAMILIES))}"
        )
    try:
        config = AutoConfig.from_pretrained(files.path, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, TypeError, OSError, ImportError) as error:
        raise Unsupported(
            f"transformers {__version__} does not know its type, {raw.get('model_type')!r}, or not with this config: "
            f"{first_line(error)}"
        ) from None
    if config.is_encoder_decoder:
        raise Unsupported("it is an encoder-decoder model, and only decoders are supported")
    _check_config(config.get_text_config())
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model_class = kind._model_mapping.get(type(config), None)
    if model_class is None:
        raise Unsupported("transformers has no causal language model of this type")
    if model_class.__name__ != description.architecture:
        raise Unsupported(f"its config.json names that class, and only {model_class.__name__} generates text")
    return Definition(model_class, config, vision.family_of(config) if sees else None)


def _check_config(config: Any) -> None:
    if others := layer_kinds(config) - ATTENTION_LAYERS:
        raise Unsupported(f"it has {', '.join(sorted(others))} layers, and only plain attention is supported")
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        raise Unsupported("its positions are ALiBi biases, which are not supported")


def layer_kinds(config: Any) -> set[str]:
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return set(map(str, kinds))


def first_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0] or type(error).__name__
    return line if len(line) <= 160 else line[:160].rsplit(" ", 1)[0] + " …"
