"""Find the definition of a model in `transformers`, and refuse unsupported ones before they are built."""

from __future__ import annotations

from typing import Any, NamedTuple

from syringa.engine.models.hf import attention as hf_attention
from syringa.engine.models.hf import vision as hf_vision
from syringa.engine.models.hf.attention import UnsupportedModel
from syringa.engine.vision.family import FAMILIES, VisionFamily
from syringa.modelfiles import ModelDescription, ModelFiles

# present in the config of models that read more than text
MULTIMODAL_CONFIGS = ("vision_config", "audio_config", "image_config")
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}


class HFDefinition(NamedTuple):
    """The transformers class and config of a model that passed the checks of this module."""

    model_class: Any
    config: Any
    family: VisionFamily | None  # None: text only

    @property
    def attention(self) -> Any:
        """The `attn_implementation` argument."""
        if self.family is None:
            return hf_attention.NAME
        return {"": hf_attention.NAME, "text_config": hf_attention.NAME, "vision_config": "sdpa"}


def find_definition(files: ModelFiles, description: ModelDescription) -> HFDefinition:
    """Raise `UnsupportedModel` with the reason if the model cannot be run."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, __version__

    raw = description.config
    if raw.get("quantization_config") is not None:
        raise UnsupportedModel(_describe_quantized(raw))
    multimodal = any(raw.get(each) for each in MULTIMODAL_CONFIGS)
    if multimodal and raw.get("model_type") not in FAMILIES:
        raise UnsupportedModel(
            f"models that read images or sound in the way of {raw.get('model_type')!r} have not been checked; "
            f"those that read images and have are {', '.join(sorted(FAMILIES))}"
        )
    try:
        if files.kind == "gguf":
            config = AutoConfig.for_model(**raw)
        else:
            config = AutoConfig.from_pretrained(files.path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers and huggingface_hub raise many kinds for a malformed config
        raise UnsupportedModel(
            f"transformers {__version__} does not know its type, {raw.get('model_type')!r}, or not with this config: "
            f"{first_line(error)}"
        ) from None
    if config.is_encoder_decoder:
        raise UnsupportedModel("it is an encoder-decoder model, and only decoders are supported")
    _check_config(config.get_text_config())
    kind = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    model_class = kind._model_mapping.get(type(config), None)
    if model_class is None:
        raise UnsupportedModel("transformers has no causal language model of this type")
    if model_class.__name__ != description.architecture:
        raise UnsupportedModel(f"its config.json names that class, and only {model_class.__name__} generates text")
    return HFDefinition(model_class, config, hf_vision.find_family(config) if multimodal else None)


def _describe_quantized(raw: dict[str, Any]) -> str:
    """Return why a quantized folder cannot be run on transformers' definition, and what can."""
    found = raw["quantization_config"]
    method = found.get("quant_method") if isinstance(found, dict) else found
    return (
        f"its folder is quantized ({method}), which is read for models of the native decoder only: use the original "
        "folder, or a GGUF file"
    )


def _check_config(config: Any) -> None:
    if others := layer_types(config) - ATTENTION_LAYERS:
        raise UnsupportedModel(f"it has {', '.join(sorted(others))} layers, and only plain attention is supported")
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        raise UnsupportedModel("its positions are ALiBi biases, which are not supported")


def layer_types(config: Any) -> set[str]:
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return set(map(str, kinds))


def first_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0] or type(error).__name__
    return line if len(line) <= 160 else line[:160].rsplit(" ", 1)[0] + " …"
