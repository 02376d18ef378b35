"""What a native decoder's config says of its weights, before any of them is read."""

from __future__ import annotations

from syringa.engine.loading.weights import WeightSource
from syringa.engine.models.config import DecoderConfig
from syringa.errors import ModelError


def count_parameters(c: DecoderConfig) -> int:
    attention = c.hidden * c.head_size * (2 * c.heads + 2 * c.kv_heads)
    return c.layers * (attention + 3 * c.hidden * c.intermediate) + c.vocab * c.hidden * (1 if c.tied else 2)


def check_shapes(c: DecoderConfig, weights: WeightSource, path: str) -> None:
    """A config that does not fit its weights would otherwise fail deep inside, or not at all."""
    expected = {
        "model.embed_tokens.weight": (c.vocab, c.hidden),
        "model.norm.weight": (c.hidden,),
        **({} if c.tied else {"lm_head.weight": (c.vocab, c.hidden)}),
    }
    for i in range(c.layers):
        prefix = f"model.layers.{i}."
        expected |= {
            prefix + "self_attn.q_proj.weight": (c.heads * c.head_size, c.hidden),
            prefix + "self_attn.k_proj.weight": (c.kv_heads * c.head_size, c.hidden),
            prefix + "self_attn.v_proj.weight": (c.kv_heads * c.head_size, c.hidden),
            prefix + "self_attn.o_proj.weight": (c.hidden, c.heads * c.head_size),
            prefix + "mlp.gate_proj.weight": (c.intermediate, c.hidden),
            prefix + "mlp.up_proj.weight": (c.intermediate, c.hidden),
            prefix + "mlp.down_proj.weight": (c.hidden, c.intermediate),
        }
    for name, shape in expected.items():
        if not weights.has(name):
            raise ModelError(f"{path} has no tensor for {name!r}: the model is incomplete")
        if weights.shape(name) != shape:
            raise ModelError(f"{path}: {name} is {list(weights.shape(name))}, and its config says {list(shape)}")
