"""Wire types of `/version`, `/load`, `/tokenizer_info` and `/props`, which describe a server to programs that probe it.

They have the shapes of vLLM and llama.cpp. Paths of files are left out: `/props` has the id of the model instead.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from syringa.api.fields.schema import doc
from syringa.api.models.served_model import ServedModel
from syringa.types import SamplingParams
from syringa.version import installed_version

_UNLIMITED = -1  # llama.cpp's value for no limit, and for a random seed
_TOKENIZER_CLASS = "PreTrainedTokenizerFast"  # the class of transformers that loads such a tokenizer


class VersionInfo(msgspec.Struct):
    version: str


class LoadInfo(msgspec.Struct):
    server_load: Annotated[int, doc("Sequences that are running or waiting, of all models.")]


class SpecialTokenInfo(msgspec.Struct):
    content: str
    special: bool


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """The tokenizer of a model, with the names of `tokenizer_config.json`."""

    tokenizer_class: Annotated[str, doc("The class of `transformers` that loads such a tokenizer.")]
    vocab_size: int
    model_max_length: Annotated[int, doc("Maximum prompt plus output length, in tokens.")]
    add_bos_token: Annotated[bool, doc("Whether prompts without chat template begin with `bos_token`.")]
    added_tokens_decoder: Annotated[dict[str, SpecialTokenInfo], doc("The special tokens, by token id.")]
    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    pad_token: str | None = None
    chat_template: Annotated[str | None, doc("Null for a model without chat template.")] = None


class GenerationParams(msgspec.Struct, kw_only=True):
    """Default values of request fields, as far as llama.cpp has them."""

    seed: Annotated[int, doc("-1: random.")]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repeat_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    max_tokens: Annotated[int, doc("Of chat completions; -1: the rest of the context.")]
    n_predict: Annotated[int, doc("Same as `max_tokens`.")]


class GenerationSettings(msgspec.Struct):
    params: GenerationParams
    n_ctx: Annotated[int, doc("Maximum prompt plus output length, in tokens.")]


class Modalities(msgspec.Struct):
    vision: bool
    audio: bool
    video: bool


class Props(msgspec.Struct, kw_only=True):
    """The properties of the server and of one model."""

    default_generation_settings: GenerationSettings
    total_slots: Annotated[int, doc("Maximum number of running sequences.")]
    model_alias: Annotated[str, doc("The id of the model.")]
    model_path: Annotated[str, doc("The id of the model: paths of files are not shown.")]
    modalities: Modalities
    chat_template: Annotated[str, doc("Empty for a model without chat template.")]
    chat_template_tool_use: Annotated[str | UnsetType, doc("The template for tools, if there is a separate one.")] = (
        UNSET
    )
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: Annotated[bool, doc("Whether the model is not in memory, and loaded by its next request.")]


def describe_tokenizer(model: ServedModel) -> TokenizerInfo:
    tokenizer = model.tokenizer
    texts = ((each, tokenizer.token_bytes(each).decode("utf-8", "replace")) for each in sorted(tokenizer.special_ids))
    special = model.special_tokens
    return TokenizerInfo(
        tokenizer_class=_TOKENIZER_CLASS,
        vocab_size=model.vocab_size,
        model_max_length=model.max_model_len,
        add_bos_token=bool(tokenizer.encode("")),
        added_tokens_decoder={str(token): SpecialTokenInfo(text, special=True) for token, text in texts},
        bos_token=_text(special.get("bos_token")),
        eos_token=_text(special.get("eos_token")),
        unk_token=_text(special.get("unk_token")),
        pad_token=_text(special.get("pad_token")),
        chat_template=model.template.source if model.template is not None else None,
    )


def describe_model(model: ServedModel, *, max_running: int, in_memory: bool) -> Props:
    template, special = model.template, model.special_tokens
    return Props(
        default_generation_settings=GenerationSettings(_generation_params(model), model.max_model_len),
        total_slots=max_running,
        model_alias=model.id,
        model_path=model.id,
        modalities=Modalities(vision=model.supports_images, audio=False, video=False),
        chat_template=template.source if template is not None else "",
        chat_template_tool_use=(template and template.tool_source) or UNSET,
        bos_token=_text(special.get("bos_token")) or "",
        eos_token=_text(special.get("eos_token")) or "",
        build_info=f"syringa-{installed_version()}",
        is_sleeping=not in_memory,
    )


def _generation_params(model: ServedModel) -> GenerationParams:
    """Return the defaults of the sampling fields, and those that the administrator has set for the model."""
    given: dict[str, Any] = msgspec.structs.asdict(SamplingParams(seed=_UNLIMITED)) | model.defaults
    length = model.defaults.get("max_tokens", _UNLIMITED)
    named = {"repeat_penalty": given["repetition_penalty"], "max_tokens": length, "n_predict": length}
    return GenerationParams(**{name: (given | named)[name] for name in GenerationParams.__struct_fields__})


def _text(token: Any) -> str | None:
    return token if isinstance(token, str) else None
