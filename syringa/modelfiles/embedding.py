"""What the folder of an embedding model or a cross-encoder says about it: modules, prompts, lengths, dimensions.

The folders are those of sentence-transformers: `modules.json` lists an encoder, its pooling and what follows. A folder
without it is an embedding model if its architecture is a bare encoder, whose token vectors are averaged then.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import msgspec

from syringa.errors import ModelError
from syringa.modelfiles.locate import ModelFiles, read_json
from syringa.types import ModelKind

Pooling = Literal["mean", "cls", "lasttoken", "max", "weightedmean", "mean_sqrt_len_tokens"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
Activation = Literal["identity", "tanh", "relu", "gelu", "sigmoid"]

MODULES_FILE = "modules.json"
PROMPTS_FILE = "config_sentence_transformers.json"
ENCODER_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)

_SCORING = "ForSequenceClassification"
_BARE_ENCODERS = frozenset(
    f"{name}Model" for name in ("Bert", "Roberta", "XLMRoberta", "Camembert", "DistilBert", "MPNet", "ModernBert",
                                "NomicBert", "Electra", "Albert", "DebertaV2")
)  # fmt: skip
_POOLING_FLAGS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_POOLINGS = frozenset(_POOLING_FLAGS.values())
_ACTIVATIONS: dict[str, Activation] = {  # by the name of torch's class
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "Sigmoid": "sigmoid",
}
_SIMILARITIES: dict[str, Similarity] = {
    "cosine": "cosine",
    "dot": "dot",
    "dot_product": "dot",
    "euclidean": "euclidean",
    "manhattan": "manhattan",
}
_MATRYOSHKA_MINIMUM = 32  # of Qwen3-Embedding, which was trained for every size from here on and does not say so
_UNKNOWN_LENGTH = 10**9  # transformers writes 1e30 as model_max_length if it is unknown
_DEFAULT_LENGTH = 512


class DenseModule(msgspec.Struct, frozen=True, kw_only=True):
    """A linear layer with an activation after the pooling. Its weights are `linear.weight` and `linear.bias`."""

    path: str  # of its folder in that of the model
    in_features: int
    out_features: int
    bias: bool
    activation: Activation


class EmbeddingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An embedding model (kind `embed`) or a cross-encoder (kind `score`), as its folder describes it."""

    kind: ModelKind
    architecture: str  # the Hugging Face class, such as BertModel
    max_length: int  # of an input in tokens, with special tokens
    dimensions: int  # of a vector; of a cross-encoder: the number of its labels
    pooling: Pooling = "mean"
    dense: tuple[DenseModule, ...] = ()  # in their order, after the pooling
    normalize: bool = False  # to the length 1, after the dense modules
    # Texts to put before an input, by name, and the one that is used where a request names none.
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    lower_case: bool = False  # texts are lowercased before the tokenizer sees them
    # Whether the first values of a vector are an embedding too: so many of them, or from `min_dimensions` on.
    matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    min_dimensions: int = 1
    similarity: Similarity = "cosine"
    activation: Activation = "identity"  # of a cross-encoder's logits, which the engine returns without it


def read_embedding_spec(files: ModelFiles) -> EmbeddingSpec | None:
    """Return what a folder says about an embedding model or a cross-encoder; None for a model that generates text.

    Raise `ModelError` for a folder that is malformed, or has modules that are not supported.
    """
    if files.kind != "folder":
        return None
    folder = Path(files.path)
    config = read_json(folder / "config.json")
    architectures = config.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    try:
        if architecture.endswith(_SCORING):
            return _scoring(folder, config, architecture)
        if (folder / MODULES_FILE).is_file():
            return _embedding(folder, config, architecture, _modules(folder))
        if architecture in _BARE_ENCODERS:
            return _embedding(folder, config, architecture, [("Transformer", "")])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # Malformed values surface as these errors; checking each one would obscure the code.
        raise ModelError(f"{folder} does not describe its model in a way that can be read: {error}") from error
    return None


def model_kind(files: ModelFiles) -> ModelKind:
    """Return what a model does. Raise `ModelError` as `read_embedding_spec` does."""
    spec = read_embedding_spec(files)
    return "generate" if spec is None else spec.kind


def _scoring(folder: Path, config: dict[str, Any], architecture: str) -> EmbeddingSpec:
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) and labels else int(config.get("num_labels", 2))
    stated = config.get("sentence_transformers")
    activation = stated.get("activation_fn") if isinstance(stated, dict) else None
    activation = activation or config.get("sbert_ce_default_activation_function")
    return EmbeddingSpec(
        kind="score",
        architecture=architecture,
        max_length=_max_length(folder, config, {}),
        dimensions=count,
        activation=_activation(folder, activation) if activation else ("sigmoid" if count == 1 else "identity"),
    )


def _embedding(
    folder: Path, config: dict[str, Any], architecture: str, modules: list[tuple[str, str]]
) -> EmbeddingSpec:
    (first, path), *others = modules
    if first != "Transformer" or path:
        raise ModelError(f"{folder / MODULES_FILE}: the first module has to be the encoder, in the folder itself")
    encoder = next((read_json(folder / name) for name in ENCODER_CONFIGS if (folder / name).is_file()), {})
    pooling: Pooling | None = None
    dense: list[DenseModule] = []
    normalize = include_prompt = False
    for name, path in others:
        settings = read_json(folder / path / "config.json")
        if name == "Pooling" and pooling is None and not dense:
            pooling, include_prompt = _pooling(folder / path, settings), settings.get("include_prompt", True)
        elif name == "Dense" and pooling is not None and not normalize:
            dense.append(_dense(folder, path, settings))
        elif name == "Normalize" and pooling is not None:
            normalize = True
        elif name != "Dropout":
            raise ModelError(f"{folder / MODULES_FILE}: the module {name} is not supported at its place")
    if pooling is None:
        pooling, include_prompt = "mean", True
    width = config.get("hidden_size") or config.get("dim") or config.get("n_embd")
    dimensions = dense[-1].out_features if dense else _positive(width, folder / "config.json", "hidden_size")
    stated = read_json(folder / PROMPTS_FILE)
    prompts = {str(name): text for name, text in (stated.get("prompts") or {}).items() if isinstance(text, str)}
    default = stated.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ModelError(f"{folder / PROMPTS_FILE}: there is no prompt {default!r}, which is the default")
    if not include_prompt and any(prompts.values()):
        raise ModelError(f"{folder}: a pooling that leaves out the prompt is not supported")
    similarity = stated.get("similarity_fn_name") or "cosine"
    if similarity not in _SIMILARITIES:
        raise ModelError(f"{folder / PROMPTS_FILE}: the similarity {similarity!r} is not supported")
    sizes = _matryoshka_dimensions(config, dimensions)
    is_qwen3 = architecture.startswith("Qwen3")
    return EmbeddingSpec(
        kind="embed",
        architecture=architecture,
        max_length=_max_length(folder, config, encoder),
        dimensions=dimensions,
        pooling=pooling,
        dense=tuple(dense),
        normalize=normalize,
        prompts=prompts,
        default_prompt=default,
        lower_case=bool(encoder.get("do_lower_case")),
        matryoshka=bool(sizes) or config.get("is_matryoshka") is True or is_qwen3,
        matryoshka_dimensions=sizes,
        min_dimensions=min(_MATRYOSHKA_MINIMUM, dimensions) if is_qwen3 and not sizes else 1,
        similarity=_SIMILARITIES[similarity],
    )


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Return the modules of a folder, each as the name of its class and its folder."""
    path = folder / MODULES_FILE
    try:
        content = msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
    except (msgspec.DecodeError, OSError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not content:
        raise ModelError(f"{path} lists no modules")
    modules = [(str(module["type"]).rpartition(".")[2], str(module.get("path") or "")) for module in content]
    for _, module in modules:
        if Path(module).is_absolute() or ".." in Path(module).parts:
            raise ModelError(f"{path}: {module} is not a folder of the model")
    return modules


def _pooling(path: Path, settings: dict[str, Any]) -> Pooling:
    named = settings.get("pooling_mode")
    if isinstance(named, str):
        modes = [named.lower()]
    else:
        modes = [mode for flag, mode in _POOLING_FLAGS.items() if settings.get(flag)]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        shown = " and ".join(modes) or "none"
        raise ModelError(f"{path}: the pooling {shown} is not supported; one of {', '.join(sorted(_POOLINGS))} is")
    return next(mode for mode in _POOLING_FLAGS.values() if mode == modes[0])


def _dense(folder: Path, path: str, settings: dict[str, Any]) -> DenseModule:
    where = folder / path
    if not (where / "model.safetensors").is_file():
        raise ModelError(f"{where} has no model.safetensors: convert its weights to safetensors")
    for name in ("module_input_name", "module_output_name"):
        if settings.get(name) not in (None, "sentence_embedding"):
            raise ModelError(f"{where}: the {name} {settings[name]!r} is not supported")
    return DenseModule(
        path=path,
        in_features=_positive(settings.get("in_features"), where, "in_features"),
        out_features=_positive(settings.get("out_features"), where, "out_features"),
        bias=bool(settings.get("bias", True)),
        activation=_activation(where, settings.get("activation_function") or "Tanh"),
    )


def _activation(path: Path, name: str) -> Activation:
    activation = _ACTIVATIONS.get(name.rpartition(".")[2])
    if activation is None:
        raise ModelError(f"{path}: the activation {name} is not supported; {', '.join(_ACTIVATIONS)} are")
    return activation


def _matryoshka_dimensions(config: dict[str, Any], dimensions: int) -> tuple[int, ...]:
    sizes = config.get("matryoshka_dimensions")
    if not isinstance(sizes, list):
        return ()
    return tuple(sorted({size for size in sizes if isinstance(size, int) and 0 < size <= dimensions}))


def _max_length(folder: Path, config: dict[str, Any], encoder: dict[str, Any]) -> int:
    """Return the longest input: the smallest of what the files state."""
    positions = config.get("max_position_embeddings") or config.get("n_positions") or math.inf
    if "roberta" in str(config.get("model_type", "")) or config.get("model_type") in ("camembert", "mpnet"):
        positions -= 1 + int(config.get("pad_token_id") or 0)  # their positions are numbered from the padding token on
    stated = read_json(folder / "tokenizer_config.json").get("model_max_length")
    tokenizer = stated if isinstance(stated, (int, float)) and stated < _UNKNOWN_LENGTH else math.inf
    # The length of the encoder's file is what the model was trained for, and overrides that of the tokenizer.
    length = min(positions, encoder.get("max_seq_length") or tokenizer)
    if length == math.inf:
        length = _DEFAULT_LENGTH
    return _positive(int(length), folder, "the longest input")


def _positive(value: Any, path: Path, name: str) -> int:
    if type(value) is not int or value < 1:
        raise ModelError(f"{path}: {name} is {value!r}, and should be a positive number: fetch the model again")
    return value
