"""Description of a model from its files: context length, end tokens, chat template, special tokens, weight count."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from syringa.errors import ModelError
from syringa.modelfiles.gguf import GgufFile, read_gguf
from syringa.modelfiles.gguf_config import config_from_gguf
from syringa.modelfiles.locate import ModelFiles, read_json
from syringa.modelfiles.pretokenizers import PRETOKENIZERS
from syringa.modelfiles.safetensors_headers import count_numbers, read_headers

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_GGUF_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

# Tokens that end a turn, besides the `eos` of a GGUF file: many files name only the token that ends a document.
_END_OF_TURN_TOKENS = {
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "</s>",
    "<eos>",
    "<｜end▁of▁sentence｜>",
}
_CONTROL = 3  # tokenizer.ggml.token_type
# Context lengths that the configs of some vision-language models leave out.
_DEFAULT_LENGTHS = {"gemma3_text": 131072, "qwen2_5_vl": 128000}
_UNKNOWN_LENGTH = 10**9  # transformers writes 1e30 as model_max_length if it is unknown
_TEXT_ONLY = ("qwen3_5", "qwen3_5_moe")  # the language model is read without its vision tower


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    architecture: str  # the Hugging Face class, such as LlamaForCausalLM
    config: dict[str, Any]
    max_model_len: int
    end_tokens: frozenset[int]
    bos_token: int | None = None
    add_bos: bool = False  # whether `bos_token` is prepended to prompts without chat template
    chat_template: str | None = None
    tool_template: str | None = None  # separate template for requests with tools
    special_tokens: dict[str, Any] = {}  # token texts by template variable: bos_token, eos_token, …
    supports_images: bool = False


def describe(files: ModelFiles) -> ModelDescription:
    """Read the description of a model. Raise `ModelError` if its files are malformed."""
    try:
        return _describe_gguf(files) if files.kind == "gguf" else _describe_folder(files)
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        # Malformed values surface as these errors; checking each one would obscure the code.
        raise ModelError(f"{files.path} does not describe its model in a way that can be read: {error}") from error


def _describe_gguf(files: ModelFiles) -> ModelDescription:
    file = read_gguf(files.path)
    config = config_from_gguf(file)
    metadata = file.metadata
    tokens: list[str] = _strings(metadata.get("tokenizer.ggml.tokens"))
    special = {}
    for name, short in _GGUF_SPECIAL.items():
        id_ = metadata.get(f"tokenizer.ggml.{short}_token_id")
        if _is_token_id(id_, tokens):
            special[name] = tokens[id_]
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    return ModelDescription(
        name=files.name,
        architecture=config["architectures"][0],
        config=config,
        max_model_len=config["max_position_embeddings"],
        end_tokens=_gguf_end_tokens(file, tokens),
        bos_token=bos if _is_token_id(bos, tokens) else None,
        add_bos=_gguf_adds_bos(metadata),
        chat_template=_text(metadata.get("tokenizer.chat_template")),
        tool_template=_text(metadata.get("tokenizer.chat_template.tool_use")),
        special_tokens=special,
    )


def _gguf_end_tokens(file: GgufFile, tokens: list[str]) -> frozenset[int]:
    metadata = file.metadata
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    ends = {id_ for id_ in named if _is_token_id(id_, tokens)}
    types = metadata.get("tokenizer.ggml.token_type")
    if isinstance(types, list) and len(types) == len(tokens):
        found = {text: id_ for id_, text in enumerate(tokens) if types[id_] == _CONTROL and text in _END_OF_TURN_TOKENS}
        if "<|return|>" in found:
            found.pop("<|end|>", None)  # in the harmony format it ends a message, not the turn
        ends.update(found.values())
    return frozenset(ends)


def _gguf_adds_bos(metadata: dict[str, Any]) -> bool:
    stated = metadata.get("tokenizer.ggml.add_bos_token")
    if isinstance(stated, bool):
        return stated
    if metadata.get("tokenizer.ggml.model") == "llama":
        return True
    pre = PRETOKENIZERS.get(metadata.get("tokenizer.ggml.pre", "default"))
    return pre is not None and pre.add_bos


def _describe_folder(files: ModelFiles) -> ModelDescription:
    folder = Path(files.path)
    config = read_json(folder / "config.json")
    text_config = config.get("text_config")
    inner = {**config, **text_config} if isinstance(text_config, dict) else config
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    tokenizer = read_tokenizer_json(folder / "tokenizer.json")
    ids = {token.content: token.id for token in tokenizer.added_tokens}
    special = _special_tokens(folder, tokenizer_config)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ModelError(f"{folder / 'config.json'} does not name an architecture")
    ends = set()
    for source in (read_json(folder / "generation_config.json"), config, inner):
        ends.update(_ids(source.get("eos_token_id")))
    if special.get("eos_token") in ids:
        ends.add(ids[special["eos_token"]])
    bos, first = inner.get("bos_token_id"), _first_special(tokenizer.post_processor)
    add_bos = tokenizer_config.get("add_bos_token")
    if first in ids:
        bos = ids[first]
    elif special.get("bos_token") in ids:
        bos = ids[special["bos_token"]]
    templates = _templates(folder, tokenizer_config)
    return ModelDescription(
        name=files.name,
        architecture=str(architectures[0]),
        config=config,
        max_model_len=_max_length(inner, tokenizer_config),
        end_tokens=frozenset(ends),
        bos_token=bos if isinstance(bos, int) else None,
        add_bos=isinstance(bos, int) and (add_bos if isinstance(add_bos, bool) else first is not None),
        chat_template=templates.get("default"),
        tool_template=templates.get("tool_use"),
        special_tokens=special,
        supports_images=isinstance(config.get("vision_config"), dict) and config.get("model_type") not in _TEXT_ONLY,
    )


class AddedToken(msgspec.Struct, frozen=True):
    id: int
    content: str
    special: bool = False


class TokenizerJson(msgspec.Struct, frozen=True):
    """The parts of a tokenizer.json that are needed here; the vocabulary is skipped."""

    added_tokens: list[AddedToken] = []
    post_processor: dict[str, Any] | None = None


def read_tokenizer_json(path: Path) -> TokenizerJson:
    try:
        return msgspec.json.decode(path.read_bytes(), type=TokenizerJson)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _first_special(processor: dict[str, Any] | None) -> str | None:
    """Return the special token that a tokenizer's post-processor prepends, if any."""
    if not processor:
        return None
    if processor.get("type") == "Sequence":
        found = (_first_special(inner) for inner in processor.get("processors", ()))
        return next((text for text in found if text is not None), None)
    single = processor.get("single")
    if processor.get("type") == "TemplateProcessing" and isinstance(single, list) and single:
        token = single[0].get("SpecialToken")
        return str(token["id"]) if token else None
    return None


def _special_tokens(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, Any]:
    special: dict[str, Any] = {}
    for source in (read_json(folder / "special_tokens_map.json"), tokenizer_config):
        for name in _SPECIAL_NAMES:
            value = source.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                special[name] = value
    return special


def _templates(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    templates = {}
    stated = tokenizer_config.get("chat_template", read_json(folder / "chat_template.json").get("chat_template"))
    if isinstance(stated, str):
        templates["default"] = stated
    elif isinstance(stated, list):
        templates.update({entry["name"]: entry["template"] for entry in stated if {"name", "template"} <= entry.keys()})
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    if (path := folder / "chat_template.jinja").is_file():
        templates["default"] = path.read_text(encoding="utf-8")
    return templates


def _max_length(config: dict[str, Any], tokenizer_config: dict[str, Any]) -> int:
    length = config.get("max_position_embeddings") or config.get("n_positions")
    length = length or _DEFAULT_LENGTHS.get(config.get("model_type", ""))
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(scaling, dict) and isinstance(length, int):
        kind = scaling.get("rope_type", scaling.get("type"))
        original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
        # A yarn config may keep the length before scaling as its maximum; other kinds state the scaled one.
        if kind == "yarn" and isinstance(original, int) and isinstance(factor, (int, float)):
            length = max(length, int(original * factor))
    if not isinstance(length, int):
        stated = tokenizer_config.get("model_max_length")
        length = int(stated) if isinstance(stated, (int, float)) and stated < _UNKNOWN_LENGTH else 2048
    if length <= 0:
        raise ModelError(f"the context of the model has {length} tokens by its config: fetch it again")
    return length


def _is_token_id(value: Any, tokens: list[str]) -> TypeGuard[int]:
    return isinstance(value, int) and 0 <= value < len(tokens)


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int)]


def _strings(value: Any) -> list[str]:
    return value if isinstance(value, list) and all(isinstance(item, str) for item in value) else []


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def count_weights(files: ModelFiles) -> int:
    """Return the number of weights from the tensor tables; tensor data is not read."""
    if files.kind == "gguf":
        return sum(math.prod(tensor.shape) for tensor in read_gguf(files.path).tensors.values())
    return count_numbers(read_headers(Path(files.path)))
