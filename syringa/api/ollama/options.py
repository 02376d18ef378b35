"""The `options` field, and the `parameters` of created models: their names, types and effects.

An option without effect is reported as ignored, unless it has the value that asks for nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from syringa.api.decoding import convert
from syringa.api.fields.sampling import MAX_COUNT, Count, Penalty, Seed, Unit
from syringa.api.fields.schema import DEFAULT, IGNORED, doc, ignored_field, nullable
from syringa.api.models.served_model import ServedModel

_NO_SAMPLER = "There is no such sampler; reported unless {}."
_LOADING = "Models are loaded as the settings say; reported as ignored."
_LEAST_TOP_P = 1e-9  # leaves the most likely token, as 0 does in Ollama
_TEXT = {"type": "string", "minLength": 1}

DEFAULTS: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's values of fields that neither the request nor the model's configuration sets."""


class OllamaOptions(msgspec.Struct, kw_only=True):
    """Every option of Ollama, past and present."""

    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None, doc("Sampling temperature; 0 is greedy.", 0.8)
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None,
        doc("Sample from this many most likely tokens; 0 or -1: no limit.", 40),
    ] = None
    top_p: Annotated[
        Unit | None, doc("Sample from the smallest set of most likely tokens with this total probability.", 0.9)
    ] = None
    min_p: Annotated[
        Unit | None, doc("Exclude tokens less likely than this fraction of the most likely token's probability.", 0.0)
    ] = None
    seed: Annotated[Seed | None, doc("Seed for sampling. Default, and -1: random.")] = None
    stop: Annotated[
        Any,
        doc(
            "A string, or up to 64, that end the output and are not part of it.",
            **nullable(_TEXT, {"type": "array", "items": _TEXT, "maxItems": 64}),
        ),
    ] = None
    num_predict: Annotated[
        Annotated[int, Meta(ge=-2, le=MAX_COUNT)] | None,
        doc("Maximum number of output tokens; 0, -1 and -2: the rest of the context.", -1),
    ] = None
    num_ctx: Annotated[
        Count | None,
        doc(
            "Maximum prompt plus output length, in tokens. Reported as ignored if it is above the model's own. "
            "Default, and 0: the model's own."
        ),
    ] = None
    repeat_penalty: Annotated[
        Annotated[float, Meta(gt=0)] | None, doc("Penalty on tokens of the prompt and the output; 1: off.", 1.0)
    ] = None
    presence_penalty: Annotated[
        Penalty | None, doc("Subtracted from a token's logit if it was generated before.", 0.0)
    ] = None
    frequency_penalty: Annotated[
        Penalty | None, doc("Subtracted from a token's logit for each time it was generated.", 0.0)
    ] = None
    repeat_last_n: Annotated[
        Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None,
        doc("0 turns the penalties off. They apply to all tokens, as with -1; other values are reported as ignored."),
    ] = None
    num_keep: Annotated[
        int | None, ignored_field("The context is not shifted: output ends with it. Reported as ignored.")
    ] = None
    typical_p: Annotated[float | None, ignored_field(_NO_SAMPLER.format(1), default=1.0)] = None
    tfs_z: Annotated[float | None, ignored_field(_NO_SAMPLER.format(1), default=1.0)] = None
    mirostat: Annotated[int | None, ignored_field(_NO_SAMPLER.format(0), default=0)] = None
    mirostat_tau: Annotated[float | None, ignored_field("See `mirostat`; reported as ignored.")] = None
    mirostat_eta: Annotated[float | None, ignored_field("See `mirostat`; reported as ignored.")] = None
    penalize_newline: Annotated[
        bool | None, ignored_field("Penalties apply to newlines too; reported if false.", default=True)
    ] = None
    num_batch: Annotated[int | None, ignored_field(_LOADING)] = None
    num_gpu: Annotated[int | None, ignored_field(_LOADING, default=-1)] = None
    main_gpu: Annotated[int | None, ignored_field(_LOADING)] = None
    num_thread: Annotated[int | None, ignored_field(_LOADING, default=0)] = None
    num_gqa: Annotated[int | None, ignored_field(_LOADING)] = None
    draft_num_predict: Annotated[int | None, ignored_field(_LOADING)] = None
    numa: Annotated[bool | None, ignored_field(_LOADING, default=False)] = None
    low_vram: Annotated[bool | None, ignored_field(_LOADING, default=False)] = None
    f16_kv: Annotated[bool | None, ignored_field(_LOADING)] = None
    logits_all: Annotated[bool | None, ignored_field(_LOADING, default=False)] = None
    vocab_only: Annotated[bool | None, ignored_field(_LOADING, default=False)] = None
    use_mmap: Annotated[bool | None, ignored_field(_LOADING)] = None
    use_mlock: Annotated[bool | None, ignored_field(_LOADING, default=False)] = None
    embedding_only: Annotated[bool | None, ignored_field(_LOADING, default=False)] = None
    rope_frequency_base: Annotated[float | None, ignored_field(_LOADING)] = None
    rope_frequency_scale: Annotated[float | None, ignored_field(_LOADING)] = None


_PROPERTIES: dict[str, Any] = msgspec.json.schema(OllamaOptions)["$defs"]["OllamaOptions"]["properties"]
_NEUTRAL = {name: each.get(DEFAULT) for name, each in _PROPERTIES.items() if each.get(IGNORED)}
OptionsField = Annotated[
    Annotated[dict[str, Any], Meta(extra_json_schema={"properties": _PROPERTIES})] | None,
    doc("How to sample and when to stop. Unknown options are reported as ignored."),
]

# Options with another name in the other APIs.
_NAMES = {"repeat_penalty": "repetition_penalty"}
_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "stop"),
    *("repeat_penalty", "presence_penalty", "frequency_penalty"),
)
_NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def read_options(given: dict[str, Any] | None, ignored: list[str], path: str = "options") -> OllamaOptions:
    """Validate options. Raises `InvalidRequest`; the paths of those without effect are appended to `ignored`."""
    options = convert(given or {}, OllamaOptions, path=path, ignored=ignored)
    for name, neutral in _NEUTRAL.items():
        value = getattr(options, name)
        if value is not None and value != neutral:
            ignored.append(f"{path}.{name}")
    penalties = (options.repeat_penalty or 1.0) != 1.0 or options.presence_penalty or options.frequency_penalty
    if penalties and options.repeat_last_n not in (None, -1, 0):
        ignored.append(f"{path}.repeat_last_n")
    return options


def sampling_fields(options: OllamaOptions) -> dict[str, Any]:
    """Return the sampling fields of the other APIs that the options set."""
    fields = {_NAMES.get(name, name): value for name in _SAMPLING if (value := getattr(options, name)) is not None}
    if fields.get("top_p") == 0:
        fields["top_p"] = _LEAST_TOP_P
    if options.repeat_last_n == 0:
        fields |= _NO_PENALTIES
    return fields


def request_fields_of(options: OllamaOptions, model: ServedModel) -> dict[str, Any]:
    """Return the sampling fields of a request: those of its options, and Ollama's defaults where nothing is set."""
    unset = {name: value for name, value in DEFAULTS.items() if name not in model.defaults}
    return unset | sampling_fields(options)


def max_tokens(options: OllamaOptions, model: ServedModel) -> int | None:
    """Return the maximum number of output tokens; None: the rest of the context."""
    if options.num_predict is not None:
        return options.num_predict if options.num_predict > 0 else None
    length: int | None = model.defaults.get("max_tokens")
    return length


def with_context(model: ServedModel, options: OllamaOptions, ignored: list[str]) -> ServedModel:
    """Return the model with the context of a request, and without a default length, which `max_tokens` returns."""
    limit = options.num_ctx or model.max_model_len
    if limit > model.max_model_len:
        ignored.append("options.num_ctx")
    defaults = {name: value for name, value in model.defaults.items() if name != "max_tokens"}
    return dataclasses.replace(model, max_model_len=min(limit, model.max_model_len), defaults=defaults)


def parameters_to_defaults(
    given: dict[str, Any], base: Mapping[str, Any], ignored: list[str]
) -> tuple[dict[str, Any], int]:
    """Return the default fields of requests, and the context limit, that the `parameters` of a model stand for.

    `base`: the default fields of the model that it is made from, which stay where no parameter sets others.
    """
    options = read_options(given, ignored, "parameters")
    defaults = dict(base) | sampling_fields(options)
    if options.num_predict is not None:
        defaults.pop("max_tokens", None)
        if options.num_predict > 0:
            defaults["max_tokens"] = options.num_predict
    return defaults, options.num_ctx or 0


def defaults_to_parameters(defaults: Mapping[str, Any], context_limit: int) -> dict[str, Any]:
    """Return the parameters that default fields stand for, for `/api/show`. Fields that Ollama has not are left out."""
    own = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}
    known = {own.get(name, name): value for name, value in defaults.items()}
    parameters = {name: value for name, value in known.items() if name in (*_SAMPLING, "num_predict")}
    return parameters | ({"num_ctx": context_limit} if context_limit else {})
