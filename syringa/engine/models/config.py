"""Configuration of the native decoder, read from a Hugging Face config. Model families differ only by these flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from syringa.engine.models.hybrid_config import (
    HYBRID_TYPES,
    DeltaNetShape,
    has_experts,
    language_config,
    read_delta_net,
)
from syringa.errors import ModelError

LLAMA_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
JOINED_TYPES = ("phi3",)  # q, k and v are one matrix in the checkpoint, and so are gate and up
GEMMA_TYPES = ("gemma", "gemma2", "gemma3_text")
MOE_TYPES = ("qwen3_moe", "mixtral", "gpt_oss", "glm4_moe")
NATIVE_TYPES = (*LLAMA_TYPES, *JOINED_TYPES, *GEMMA_TYPES, *MOE_TYPES, *HYBRID_TYPES)
MXFP4_GROUP = 32  # inputs of a scale
# The default `sliding_window` of the families whose attention has windows in transformers, which others ignore.
_DEFAULT_WINDOWS = {
    "mistral": 4096,
    "mixtral": None,
    "qwen2": 4096,
    "qwen3": 4096,
    "qwen3_moe": 4096,
    "smollm3": None,
    "gpt_oss": 128,
    "phi3": None,
    "gemma2": 4096,
    "gemma3_text": 4096,
}
_FULL_ATTENTION_EVERY = {"gpt_oss": 2, "gemma2": 2, "gemma3_text": 6}  # layer, where the config does not say
_GEMMA_HEAD_SIZE = 256
_ROTARY_SHARES = {"glm4_moe": 0.5}  # the default of partial_rotary_factor where it is not 1
_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_SIZES = (*_REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERT_SIZES = ("num_experts_per_tok", "moe_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts")
_MAX_SIZE = 2**31 - 1
_MAX_SHARED_EXPERTS = 64
_MAX_LAYERS, _MAX_EXPERTS = 4096, 4096  # more would allocate memory for each before a missing tensor is found


class ExpertNames(NamedTuple):
    """Names of a sparse layer's tensors in the checkpoint, after `model.layers.N.`."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    shared: str = "mlp.shared_experts"  # one MLP of the intermediate size of all shared experts
    correction: str = "mlp.gate.e_score_correction_bias"  # of the scores by which experts are chosen
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # of one expert: gate, up, down


class NormNames(NamedTuple):
    """Names of a layer's norms in the checkpoint, after `model.layers.N.`; those of outputs are empty without them."""

    attention: str = "input_layernorm"
    mlp: str = "post_attention_layernorm"
    attention_output: str = ""
    mlp_output: str = ""


GEMMA_NORMS = NormNames(
    "input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"
)


class ClampedSwiglu(NamedTuple):
    """The gate of gpt-oss's experts: g · sigmoid(alpha · g) · (u + 1), with g ≤ limit and |u| ≤ limit."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class DecoderConfig:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocab: int
    eps: float
    max_positions: int
    rope: dict[str, Any]  # rope_type, rope_theta and the parameters of that type
    local_rope: dict[str, Any] | None  # of layers with a sliding window, if theirs is another one
    rotary: int  # components of a head that are rotated
    tied: bool  # the output head shares the embedding's weights
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    activation: Literal["silu", "gelu_tanh"] = "silu"  # of the MLP's gate
    norm_names: NormNames = field(default_factory=NormNames)
    embedding_scale: float = 1.0
    attention_scale: float = 0.0  # of the products of queries and keys; 0: head_size ** -0.5
    softcap: float = 0.0  # an attention score s becomes softcap · tanh(s / softcap); 0: none
    logit_softcap: float = 0.0  # the same for logits
    windows: tuple[int, ...] = field(default=())  # sliding window per layer; 0: unlimited
    rotated: tuple[bool, ...] = field(
        default=()
    )  # whether rotary embedding applies, per layer; not to every fourth layer of SmolLM3
    experts: int = 0  # per sparse layer; 0: a dense model
    experts_per_token: int = 0
    expert_intermediate: int = 0
    normalize_experts: bool = True  # the weights of a token's experts add up to 1
    sigmoid_scale: float | None = None  # experts are scored by a sigmoid, and their weights scaled; None: a softmax
    shared_experts: int = 0  # that every token uses, beside those of the router
    sparse: tuple[bool, ...] = field(default=())  # whether a layer has experts instead of an MLP
    expert_names: ExpertNames = field(default_factory=ExpertNames)
    packed_experts: bool = False  # one tensor for all experts, gates and ups interleaved, with biases (gpt-oss)
    mxfp4: bool = False  # packed experts are stored in MXFP4
    swiglu: ClampedSwiglu | None = None  # the gate of the experts; None: silu(gate) · up
    sinks: bool = False  # attention has a learned logit per head that joins the softmax's denominator
    output_gate: bool = False  # attention's output is multiplied by a sigmoid of gates that are projected like queries
    delta_net: DeltaNetShape | None = None  # of the layers of linear attention
    tiled_values: bool = False  # the delta nets' output projections have the first value head of each key head first
    linear: tuple[bool, ...] = field(default=())  # whether a layer is a gated delta net instead of attention
    shared_intermediate: int = 0  # of an expert that every token uses, weighted by a sigmoid; 0: there is none

    @property
    def attention_layers(self) -> int:
        """Number of layers with keys and values in the cache."""
        return self.layers - sum(self.linear)

    @property
    def score_scale(self) -> float:
        return self.attention_scale or float(self.head_size**-0.5)

    def is_linear(self, layer: int) -> bool:
        return bool(self.linear) and self.linear[layer]

    def rope_of(self, layer: int) -> dict[str, Any]:
        return self.local_rope if self.local_rope is not None and self.windows[layer] else self.rope


def is_native(config: dict[str, Any]) -> bool:
    """Return whether the native decoder supports this model."""
    config = language_config(config)
    kind = config.get("model_type")
    if config.get("n_group") not in (None, 1):  # experts are chosen group by group
        return False
    if kind in GEMMA_TYPES:
        # Of the first Gemma, "gelu" means the approximation, too.
        activations = ("gelu_pytorch_tanh", "gelu") if kind == "gemma" else ("gelu_pytorch_tanh",)
        key = "hidden_act" if kind == "gemma" else "hidden_activation"
        native = config.get(key, "gelu_pytorch_tanh") in activations and not config.get("use_bidirectional_attention")
    else:
        native = config.get("hidden_act", "silu") == "silu"
    return native and kind in NATIVE_TYPES


def read_config(config: dict[str, Any]) -> DecoderConfig:
    """Read a Hugging Face config. Raise `ModelError` naming what is missing or impossible."""
    config = language_config(config)
    kind = config["model_type"]
    hybrid = kind in HYBRID_TYPES
    sparse = kind in MOE_TYPES or (hybrid and has_experts(config))
    required = {*_REQUIRED, *(("num_experts_per_tok",) if sparse else ())}
    required |= {"moe_intermediate_size"} if kind in ("qwen3_moe", "glm4_moe") or (hybrid and sparse) else set()
    for key in (*_SIZES, *(_EXPERT_SIZES if sparse else ())):
        size, largest = config.get(key), _MAX_LAYERS if key == "num_hidden_layers" else _MAX_SIZE
        if key in _EXPERT_COUNTS:
            largest = _MAX_EXPERTS
        if size is None and key in required:
            raise ModelError(f"config.json has no {key!r}: the model is incomplete")
        if size is not None and (type(size) is not int or not 0 < size <= largest):
            raise ModelError(f"config.json: {key} is {size!r}, which is not a size that can be loaded")
    try:
        heads, hidden, layers = config["num_attention_heads"], config["hidden_size"], config["num_hidden_layers"]
        gemma = kind in GEMMA_TYPES
        head_size = config.get("head_dim") or (_GEMMA_HEAD_SIZE if gemma else hidden // heads)
        rope, local_rope = rope_parameters(config), _local_rope(config, kind)
        rotated_share = rope.get("partial_rotary_factor", _ROTARY_SHARES.get(kind, 1.0))
        decoder = DecoderConfig(
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_size=head_size,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
            eps=config.get("rms_norm_eps", 1e-6),
            max_positions=config.get("max_position_embeddings", 2048),
            rope=rope,
            local_rope=local_rope,
            rotary=int(head_size * rotated_share),
            tied=bool(config.get("tie_word_embeddings", kind == "smollm3" or gemma)),
            qkv_bias=kind == "qwen2" or bool(config.get("attention_bias", kind == "gpt_oss")),
            out_bias=kind not in ("qwen2", "glm4_moe") and bool(config.get("attention_bias", kind == "gpt_oss")),
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=kind in ("qwen3", "qwen3_moe", "gemma3_text", *HYBRID_TYPES)
            or (kind == "glm4_moe" and bool(config.get("use_qk_norm"))),
            windows=_windows(config, kind, layers),
            rotated=_rotated(config, kind, layers),
            sinks=kind == "gpt_oss",
            output_gate=hybrid,
            **(_hybrid(config, layers) if hybrid else {}),
            **(_gemma(config, kind) if gemma else {}),
            **(_experts(config, kind, layers) if sparse else {"sparse": (False,) * layers}),
        )
        if decoder.mxfp4 and (hidden % MXFP4_GROUP or decoder.expert_intermediate % MXFP4_GROUP):
            raise ModelError(
                f"experts of {hidden} × {decoder.expert_intermediate} cannot be in MXFP4: groups are of 32"
            )
        if decoder.experts_per_token > decoder.experts:
            raise ModelError(f"a token cannot use {decoder.experts_per_token} of {decoder.experts} experts")
    except KeyError as missing:
        raise ModelError(f"config.json has no {missing.args[0]!r}: the model is incomplete") from None
    except (AttributeError, TypeError, ValueError, ArithmeticError) as error:
        # Malformed values surface as these errors; checking each one would obscure the code.
        raise ModelError(f"config.json does not describe its model in a way that can be read: {error}") from None
    if type(decoder.eps) not in (int, float) or not 0 <= decoder.eps < 1:
        raise ModelError(f"config.json: rms_norm_eps is {decoder.eps!r}")
    if decoder.rotary % 2 or not 0 <= decoder.rotary <= decoder.head_size:
        raise ModelError(f"{decoder.rotary} components of heads of {decoder.head_size} cannot be rotated")
    if decoder.heads % decoder.kv_heads:
        raise ModelError(f"{decoder.heads} attention heads cannot share {decoder.kv_heads} key-value heads")
    types = decoder.linear or decoder.windows
    for name, flags in (("layer_types", types), ("no_rope_layers", decoder.rotated)):
        if len(flags) != layers:
            raise ModelError(f"config.json has {len(flags)} {name} for {layers} layers")
    return decoder


def count_parameters(c: DecoderConfig) -> int:
    """Return the number of weights by the config, without norms and biases."""
    attention = c.hidden * c.head_size * ((3 if c.output_gate else 2) * c.heads + 2 * c.kv_heads)
    mixers = c.attention_layers * attention
    if c.delta_net is not None:
        mixers += sum(c.linear) * c.hidden * (c.delta_net.projected + c.delta_net.value_width)
    sparse = sum(c.sparse)
    mlps = (c.layers - sparse) * 3 * c.hidden * c.intermediate
    expert = 3 * c.hidden * c.expert_intermediate
    shared = c.shared_experts * expert + 3 * c.hidden * c.shared_intermediate
    experts = sparse * (c.experts * (expert + c.hidden) + shared)
    return mixers + mlps + experts + c.vocab * c.hidden * (1 if c.tied else 2)


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters from either layout of the config."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "full_attention" in rope:  # by the type of a layer
        rope = dict(rope["full_attention"])
    default = 1e6 if config.get("model_type") == "gemma3_text" else 10000.0
    rope.setdefault("rope_theta", config.get("rope_theta", default))
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if config.get("model_type") == "phi3" and rope["rope_type"] in ("su", "yarn"):  # names in older configs
        rope["rope_type"] = "longrope"
    if "partial_rotary_factor" in config:
        rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    if original := config.get("original_max_position_embeddings"):
        rope.setdefault("original_max_position_embeddings", original)
    return rope


def _local_rope(config: dict[str, Any], kind: str) -> dict[str, Any] | None:
    """Return the rotary parameters of layers with a sliding window, from either layout; None if all are alike."""
    if kind != "gemma3_text":
        return None
    rope = dict((config.get("rope_parameters") or {}).get("sliding_attention") or {})
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", config.get("rope_local_base_freq", 10000.0))
    return rope


def _windows(config: dict[str, Any], kind: str, layers: int) -> tuple[int, ...]:
    """Return the sliding window of each layer, 0 for none, as transformers' definition of the family applies it."""
    if kind not in _DEFAULT_WINDOWS:
        return (0,) * layers
    window = config.get("sliding_window", _DEFAULT_WINDOWS[kind]) or 0
    if type(window) is not int or not 0 <= window <= _MAX_SIZE:
        raise ModelError(f"config.json: sliding_window is {window!r}")
    if kind in ("qwen2", "qwen3", "qwen3_moe", "smollm3") and not config.get("use_sliding_window", False):
        window = 0
    if kind in ("mistral", "mixtral", "qwen3_moe", "phi3"):  # all layers are alike, whatever layer_types says
        return (window,) * layers
    if types := config.get("layer_types"):
        if unknown := sorted({str(each) for each in types} - {"sliding_attention", "full_attention"}):
            raise ModelError(f"config.json: layers of type {unknown[0]!r} are not supported")
        return tuple(window if each == "sliding_attention" else 0 for each in types)
    if kind in ("qwen2", "qwen3"):
        first = config.get("max_window_layers", 28)
        return tuple(window if i >= first else 0 for i in range(layers))
    if kind == "smollm3":
        return tuple(0 if rotated else window for rotated in _rotated(config, kind, layers))
    every = _FULL_ATTENTION_EVERY[kind]
    if kind == "gemma3_text":
        every = config.get("sliding_window_pattern", every)
        if type(every) is not int or every < 1:
            raise ModelError(f"config.json: sliding_window_pattern is {every!r}")
    return tuple(0 if (i + 1) % every == 0 else window for i in range(layers))


def _gemma(config: dict[str, Any], kind: str) -> dict[str, Any]:
    flags: dict[str, Any] = {"activation": "gelu_tanh", "embedding_scale": config["hidden_size"] ** 0.5}
    if kind != "gemma":
        flags |= {
            "norm_names": GEMMA_NORMS,
            "attention_scale": _positive(config, "query_pre_attn_scalar", 256) ** -0.5,
            "logit_softcap": _softcap(config, "final_logit_softcapping", 30.0 if kind == "gemma2" else None),
        }
    if kind == "gemma2":
        flags["softcap"] = _softcap(config, "attn_logit_softcapping", 50.0)
    return flags


def _softcap(config: dict[str, Any], name: str, default: float | None) -> float:
    """Return a soft cap; 0 for none."""
    return 0.0 if config.get(name, default) is None else _positive(config, name, default or 0.0)


def _positive(config: dict[str, Any], name: str, default: float) -> float:
    """Return a number of the config. Raise `ModelError` if it is not one, or does not fit in fp32."""
    value = config.get(name, default)
    if type(value) not in (int, float) or not 1e-30 < value < 1e30:
        raise ModelError(f"config.json: {name} is {value!r}, which is not a positive number")
    return float(value)


def _hybrid(config: dict[str, Any], layers: int) -> dict[str, Any]:
    shape, linear = read_delta_net(config, layers)
    shared = config.get("shared_expert_intermediate_size", 512) if has_experts(config) else 0
    if type(shared) is not int or not 0 <= shared <= _MAX_SIZE:
        raise ModelError(f"config.json: shared_expert_intermediate_size is {shared!r}")
    tiled = bool(config.get("tiled_linear_values"))
    return {"delta_net": shape, "linear": linear, "shared_intermediate": shared, "tiled_values": tiled}


def _experts(config: dict[str, Any], kind: str, layers: int) -> dict[str, Any]:
    flags: dict[str, Any] = {
        # The first since transformers 5, the second of GLM-4.5.
        "experts": config.get("num_local_experts") or config.get("n_routed_experts") or config["num_experts"],
        "experts_per_token": config["num_experts_per_tok"],
        "expert_intermediate": config["intermediate_size"],
        "sparse": (True,) * layers,
    }
    if kind in HYBRID_TYPES:
        flags["expert_names"] = ExpertNames(shared="mlp.shared_expert")
    if kind == "qwen3_5_moe_text":
        flags["expert_intermediate"] = config["moe_intermediate_size"]
    if kind in ("qwen3_moe", "qwen3_next"):
        step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
        if type(step) is not int or step < 1:
            raise ModelError(f"config.json: decoder_sparse_step is {step!r}")
        flags |= {
            "expert_intermediate": config["moe_intermediate_size"],
            "normalize_experts": bool(config.get("norm_topk_prob", kind == "qwen3_next")),
            "sparse": tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        }
    if kind == "glm4_moe":
        dense_layers, shared = config.get("first_k_dense_replace", 1), config.get("n_shared_experts", 1)
        if type(shared) is not int or not 0 <= shared <= _MAX_SHARED_EXPERTS:
            raise ModelError(f"config.json: n_shared_experts is {shared!r}")
        if type(dense_layers) is not int:
            raise ModelError(f"config.json: first_k_dense_replace is {dense_layers!r}")
        flags |= {
            "expert_intermediate": config["moe_intermediate_size"],
            "normalize_experts": bool(config.get("norm_topk_prob", True)),
            "sigmoid_scale": _positive(config, "routed_scaling_factor", 1.0),
            "shared_experts": shared,
            "sparse": tuple(i >= dense_layers for i in range(layers)),
        }
    if kind == "mixtral":
        flags["expert_names"] = ExpertNames(
            "block_sparse_moe.gate", "block_sparse_moe.experts", projections=("w1", "w3", "w2")
        )
    if kind == "gpt_oss":
        flags |= {
            "expert_names": ExpertNames("mlp.router"),
            "packed_experts": True,
            "mxfp4": _is_mxfp4(config),
            "swiglu": ClampedSwiglu(_positive(config, "swiglu_alpha", 1.702), _positive(config, "swiglu_limit", 7.0)),
        }
    return flags


def _is_mxfp4(config: dict[str, Any]) -> bool:
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method not in (None, "mxfp4"):
        raise ModelError(f"experts quantized with {method!r} cannot be read: use the model in MXFP4 or bf16")
    return method is not None


def _rotated(config: dict[str, Any], kind: str, layers: int) -> tuple[bool, ...]:
    if flags := config.get("no_rope_layers"):  # 1 means rotated, despite the name
        return tuple(map(bool, flags))
    interval = config.get("no_rope_layer_interval", 4) if kind == "smollm3" else 0
    return tuple(not interval or (i + 1) % interval != 0 for i in range(layers))
