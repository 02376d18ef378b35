"""Configuration of hybrid models: layers of linear attention (gated delta nets) between layers of attention.

Qwen3-Next and Qwen3.5. The folders of Qwen3.5 hold a vision tower too, and name the language model `text_config`; its
vision tower and the layers of multi-token prediction (`mtp`) are not read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from syringa.errors import ModelError

HYBRID_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_OUTER_TYPES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
_LINEAR, _FULL = "linear_attention", "full_attention"
# The defaults of transformers, for what a config leaves out.
_DEFAULTS = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_ROTARY_SHARE = 0.25
_ATTENTION_INTERVAL = 4
_MAX_SIZE = 2**31 - 1
_MAX_KERNEL = 64


class DeltaNetShape(NamedTuple):
    """Sizes of the gated delta nets of a model, equal in all layers."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int  # positions that the convolution sees, the own one included

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_size

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def projected(self) -> int:
        """Outputs of the input projection: the channels, the output gate z, and b and a of each value head."""
        return self.channels + self.value_width + 2 * self.value_heads

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of a sequence in a layer, in fp32."""
        recurrent = self.value_heads * self.key_size * self.value_size
        return 4 * (recurrent + (self.kernel - 1) * self.channels)


def language_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the language model, with the defaults of hybrid models; others as they are."""
    outer = config.get("model_type")
    if isinstance(outer, str) and outer in _OUTER_TYPES and isinstance(inner := config.get("text_config"), dict):
        tied = config.get("tie_word_embeddings", inner.get("tie_word_embeddings", False))
        kind = inner.get("model_type", _OUTER_TYPES[outer])
        config = {**config, **inner, "model_type": kind, "tie_word_embeddings": tied}
        del config["text_config"]
    if config.get("model_type") not in HYBRID_TYPES:
        return config
    config = {**_DEFAULTS, **config}
    # Models whose layers all have experts do not name the size of the MLP that they do not have.
    config.setdefault("intermediate_size", config.get("moe_intermediate_size"))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict) or "partial_rotary_factor" not in rope:
        config.setdefault("partial_rotary_factor", _ROTARY_SHARE)
    return config


def has_experts(config: dict[str, Any]) -> bool:
    """Return whether a hybrid model has experts. `config`: that of the language model."""
    return config["model_type"] == "qwen3_5_moe_text" or (
        config["model_type"] == "qwen3_next" and bool(config.get("num_experts", 512))
    )


def read_delta_net(config: dict[str, Any], layers: int) -> tuple[DeltaNetShape, tuple[bool, ...]]:
    """Return the sizes of the delta nets, and which layers are such. Raise `ModelError` for impossible values."""
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    sizes = []
    for name in names:
        size = config[f"linear_{name}"]
        largest = _MAX_KERNEL if name == "conv_kernel_dim" else _MAX_SIZE
        if type(size) is not int or not 0 < size <= largest:
            raise ModelError(f"config.json: linear_{name} is {size!r}, which is not a size that can be loaded")
        sizes.append(size)
    shape = DeltaNetShape(*sizes)
    if shape.value_heads % shape.key_heads:
        raise ModelError(f"{shape.value_heads} linear value heads cannot share {shape.key_heads} key heads")
    if shape.kernel < 2:
        raise ModelError("config.json: linear_conv_kernel_dim is 1, and a convolution needs at least 2")
    types = config.get("layer_types")
    if types is None:
        interval = config.get("full_attention_interval", _ATTENTION_INTERVAL)
        types = [_LINEAR if (i + 1) % interval else _FULL for i in range(layers)]
    if unknown := sorted({str(each) for each in types} - {_LINEAR, _FULL}):
        raise ModelError(f"config.json: layers of type {unknown[0]!r} are not supported in a hybrid model")
    if len({*types}) == 1:
        raise ModelError(f"config.json: all layers are of type {types[0]!r}, and a hybrid model has two types")
    return shape, tuple(each == _LINEAR for each in types)
