"""The tensors that a native decoder is read from: their names and shapes by its config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syringa.engine.models.config import MXFP4_GROUP, DecoderConfig
from syringa.errors import ModelError

if TYPE_CHECKING:
    from syringa.engine.loading.weights import WeightSource


def check_shapes(c: DecoderConfig, weights: WeightSource, path: str) -> None:
    """Raise `ModelError` if the tensors do not have the shapes of the config."""
    for name, shape in tensor_shapes(c).items():
        if not weights.has(name):
            raise ModelError(f"{path} has no tensor for {name!r}: the model is incomplete, fetch it again")
        if (found := weights.shape(name)) != shape:
            raise ModelError(
                f"{path}: {name} is {list(found)}, and its config says {list(shape)}: fetch the model again, or use "
                "another conversion of it"
            )


def tensor_shapes(c: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors that a decoder is read from."""
    shapes = {
        "model.embed_tokens.weight": (c.vocab, c.hidden),
        "model.norm.weight": (c.hidden,),
        **({} if c.tied else {"lm_head.weight": (c.vocab, c.hidden)}),
    }
    for i in range(c.layers):
        prefix = f"model.layers.{i}."
        mixer = _delta_net_shapes(c) if c.is_linear(i) else _attention_shapes(c)
        shapes |= {prefix + name: shape for name, shape in mixer.items()}
        vectors = _vector_shapes(c, c.sparse[i], linear=c.is_linear(i))
        shapes |= {f"{prefix}{name}": (size,) for name, size in vectors.items()}
        if c.sinks:
            shapes[prefix + "self_attn.sinks"] = (c.heads,)
        if c.sparse[i]:
            shapes |= {prefix + name: shape for name, shape in _expert_shapes(c).items()}
        else:
            shapes |= {
                prefix + "mlp.gate_proj.weight": (c.intermediate, c.hidden),
                prefix + "mlp.up_proj.weight": (c.intermediate, c.hidden),
                prefix + "mlp.down_proj.weight": (c.hidden, c.intermediate),
            }
    return shapes


def _attention_shapes(c: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the matrices of attention."""
    queries, keys = c.heads * c.head_size, c.kv_heads * c.head_size
    return {
        "self_attn.q_proj.weight": (queries, c.hidden),
        "self_attn.k_proj.weight": (keys, c.hidden),
        "self_attn.v_proj.weight": (keys, c.hidden),
        "self_attn.o_proj.weight": (c.hidden, queries),
        **({"self_attn.g_proj.weight": (queries, c.hidden)} if c.output_gate else {}),
    }


def _delta_net_shapes(c: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors of a gated delta net, as `loading.hybrid_weights` names them."""
    assert c.delta_net is not None
    net = c.delta_net
    return {
        "linear_attn.qkv_proj.weight": (net.channels, c.hidden),
        "linear_attn.z_proj.weight": (net.value_width, c.hidden),
        "linear_attn.b_proj.weight": (net.value_heads, c.hidden),
        "linear_attn.a_proj.weight": (net.value_heads, c.hidden),
        "linear_attn.out_proj.weight": (c.hidden, net.value_width),
        "linear_attn.conv1d.weight": (net.channels, 1, net.kernel),
        "linear_attn.A_log": (net.value_heads,),
        "linear_attn.dt_bias": (net.value_heads,),
        "linear_attn.norm.weight": (net.value_size,),
    }


def _vector_shapes(c: DecoderConfig, sparse: bool, *, linear: bool) -> dict[str, int]:
    """Return the names and sizes of a layer's norms and biases."""
    queries, keys = c.heads * c.head_size, c.kv_heads * c.head_size
    sizes = {f"{name}.weight": c.hidden for name in c.norm_names if name}
    if c.qk_norm and not linear:
        sizes |= {"self_attn.q_norm.weight": c.head_size, "self_attn.k_norm.weight": c.head_size}
    if c.qkv_bias and not linear:
        sizes |= {"self_attn.q_proj.bias": queries, "self_attn.k_proj.bias": keys, "self_attn.v_proj.bias": keys}
    if c.out_bias and not linear:
        sizes["self_attn.o_proj.bias"] = c.hidden
    if c.mlp_bias and not sparse:
        sizes |= {"mlp.gate_proj.bias": c.intermediate, "mlp.up_proj.bias": c.intermediate}
        sizes["mlp.down_proj.bias"] = c.hidden
    return sizes


def _expert_shapes(c: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a sparse layer's tensors in the checkpoint."""
    hidden, size, names = c.hidden, c.expert_intermediate, c.expert_names
    shapes: dict[str, tuple[int, ...]] = {f"{names.router}.weight": (c.experts, hidden)}
    if not c.packed_experts:
        gate, up, down = names.projections
        for e in range(c.experts):
            shapes |= {
                f"{names.experts}.{e}.{gate}.weight": (size, hidden),
                f"{names.experts}.{e}.{up}.weight": (size, hidden),
                f"{names.experts}.{e}.{down}.weight": (hidden, size),
            }
        if shared := c.shared_experts * size + c.shared_intermediate:
            shapes |= {
                f"{names.shared}.{gate}.weight": (shared, hidden),
                f"{names.shared}.{up}.weight": (shared, hidden),
                f"{names.shared}.{down}.weight": (hidden, shared),
            }
        if c.shared_intermediate:
            shapes[f"{names.shared}_gate.weight"] = (1, hidden)
        if c.sigmoid_scale is not None:
            shapes[names.correction] = (c.experts,)
        return shapes
    shapes[f"{names.router}.bias"] = (c.experts,)
    for name, outputs, inputs in (("gate_up_proj", 2 * size, hidden), ("down_proj", hidden, size)):
        tensor = f"{names.experts}.{name}"
        shapes[f"{tensor}_bias"] = (c.experts, outputs)
        if c.mxfp4:  # blocks of 32 inputs in 16 bytes, with one scale
            shapes[f"{tensor}_blocks"] = (c.experts, outputs, inputs // MXFP4_GROUP, 16)
            shapes[f"{tensor}_scales"] = (c.experts, outputs, inputs // MXFP4_GROUP)
        else:
            shapes[tensor] = (c.experts, inputs, outputs)
    return shapes
