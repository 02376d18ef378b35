"""Request fields of vLLM and llama.cpp that are other names of fields, have no effect here, or are refused.

A value that asks for nothing, such as `mirostat: 0`, is accepted: clients send the values of all their settings. Others
are reported as ignored.
"""

from __future__ import annotations

import operator
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

from syringa.api.fields.sampling import SamplingFields
from syringa.api.fields.schema import DEFAULT, IGNORED, doc, ignored_field, nullable, refused_field
from syringa.errors import InvalidRequest

Number = Annotated[int, Meta(ge=-1, le=2**63 - 1)]

_NO_SAMPLER = "There is no such sampler"
_INTERNAL = "llama.cpp's own description of a chat template; reported as ignored."
_EMPTY = nullable({"type": "array", "items": {"type": "object"}, "maxItems": 0})
_REFUSED = {
    "lora": "Adapters are not supported.",
    "logits_processors": "Code that processes logits cannot be named in a request.",
    "prompt_embeds": "Embeddings are not supported as a prompt; send text or token ids.",
    "previous_input_messages": "Messages in the format of gpt-oss are not supported; send `input`.",
}


def _refused(name: str, **schema: Any) -> Meta:
    return refused_field(_REFUSED[name], **schema or {"type": "null"})


class CompatibilityFields(SamplingFields, kw_only=True):
    """Base of the bodies of chat completions, completions and responses."""

    # Honored
    repeat_penalty: Annotated[
        Annotated[float, Meta(gt=0)] | None, doc("Same as `repetition_penalty`, which takes precedence.", 1.0)
    ] = None
    cache_prompt: Annotated[
        bool | None, doc("Use the prefix cache; false: compute the whole prompt, and do not keep it.", True)
    ] = None

    # Of vLLM
    session_id: Annotated[
        str | None, ignored_field("Requests are not routed by session: all share one cache. Reported as ignored.")
    ] = None
    vllm_xargs: Annotated[
        dict[str, Any] | None, ignored_field("For extensions of vLLM; reported as ignored.", default={})
    ] = None
    kv_transfer_params: Annotated[
        dict[str, Any] | None,
        ignored_field("Prompts are computed by the server that generates; reported as ignored.", default={}),
    ] = None
    ec_transfer_params: Annotated[
        dict[str, Any] | None,
        ignored_field("Images are encoded by the server that generates; reported as ignored.", default={}),
    ] = None
    mm_processor_kwargs: Annotated[
        dict[str, Any] | None,
        ignored_field("Images are processed as the model's files say; reported as ignored.", default={}),
    ] = None
    media_io_kwargs: Annotated[
        dict[str, Any] | None,
        ignored_field("Images are read as they are; reported as ignored.", default={}),
    ] = None
    repetition_detection: Annotated[
        dict[str, Any] | None,
        ignored_field("Repetition does not end the output; see `dry_multiplier`. Reported as ignored."),
    ] = None
    routed_experts_prompt_start: Annotated[
        Number | None, ignored_field("Routed experts are not returned; reported as ignored.", default=0)
    ] = None
    return_assistant_tokens_mask: Annotated[
        bool | None, ignored_field("For vLLM's rendering endpoints only; reported as ignored.", default=False)
    ] = None
    enable_response_messages: Annotated[
        bool | None, ignored_field("Messages in the format of gpt-oss are not returned.", default=False)
    ] = None
    early_stopping: Annotated[
        bool | None, ignored_field("Beam search ends when no beam can become better.", default=False)
    ] = None
    logits_processors: Annotated[Any, _refused("logits_processors", **_EMPTY)] = None
    prompt_embeds: Annotated[Any, _refused("prompt_embeds")] = None
    previous_input_messages: Annotated[Any, _refused("previous_input_messages")] = None

    # Of llama.cpp: sampling
    typical_p: Annotated[float | None, ignored_field(f"{_NO_SAMPLER}; reported unless 1.", default=1.0)] = None
    top_n_sigma: Annotated[float | None, ignored_field(f"{_NO_SAMPLER}; reported unless -1.", default=-1.0)] = None
    xtc_probability: Annotated[float | None, ignored_field(f"{_NO_SAMPLER}; reported unless 0.", default=0.0)] = None
    xtc_threshold: Annotated[float | None, ignored_field("Has no effect without `xtc_probability`.")] = None
    dynatemp_range: Annotated[float | None, ignored_field(f"{_NO_SAMPLER}; reported unless 0.", default=0.0)] = None
    dynatemp_exponent: Annotated[float | None, ignored_field("Has no effect without `dynatemp_range`.")] = None
    mirostat: Annotated[float | None, ignored_field(f"{_NO_SAMPLER}; reported unless 0.", default=0)] = None
    mirostat_tau: Annotated[float | None, ignored_field("Has no effect without `mirostat`.")] = None
    mirostat_eta: Annotated[float | None, ignored_field("Has no effect without `mirostat`.")] = None
    adaptive_target: Annotated[float | None, ignored_field(f"{_NO_SAMPLER}; reported unless -1.", default=-1.0)] = None
    adaptive_decay: Annotated[float | None, ignored_field("Has no effect without `adaptive_target`.")] = None
    repeat_last_n: Annotated[
        Number | None, ignored_field("Penalties apply to all tokens; reported unless -1.", default=-1)
    ] = None
    dry_penalty_last_n: Annotated[
        Number | None, ignored_field("DRY searches the whole output; reported unless -1.", default=-1)
    ] = None
    min_keep: Annotated[
        Number | None, ignored_field("Sampling rules may leave a single token; reported unless 0.", default=0)
    ] = None
    samplers: Annotated[
        list[str] | str | None, ignored_field("The order of the sampling rules is fixed; reported as ignored.")
    ] = None
    backend_sampling: Annotated[
        bool | None, ignored_field("Does not change the output, and is not reported.", default=False)
    ] = None
    lora: Annotated[Any, _refused("lora", **_EMPTY)] = None

    # Of llama.cpp: prompt and output
    id_slot: Annotated[Number | None, ignored_field("There are no slots; reported unless -1.", default=-1)] = None
    n_keep: Annotated[
        Number | None, ignored_field("The context is not shifted: output ends with it. Reported unless 0.", default=0)
    ] = None
    n_discard: Annotated[Number | None, ignored_field("See `n_keep`; reported unless 0.", default=0)] = None
    n_cache_reuse: Annotated[
        Number | None, ignored_field("Only prefixes are reused; reported unless 0.", default=0)
    ] = None
    n_indent: Annotated[Number | None, ignored_field("Lines are not indented; reported unless 0.", default=0)] = None
    t_max_predict_ms: Annotated[
        Number | None,
        ignored_field("See the header `x-syringa-timeout`; reported unless -1.", default=-1),
    ] = None
    t_max_prompt_ms: Annotated[
        Number | None,
        ignored_field("See the header `x-syringa-timeout`; reported unless -1.", default=-1),
    ] = None
    post_sampling_probs: Annotated[
        bool | None,
        ignored_field("Log-probabilities are those before any sampling rule; reported if true.", default=False),
    ] = None
    return_tokens: Annotated[bool | None, ignored_field("See `return_token_ids`; reported if true.", default=False)] = (
        None
    )
    return_progress: Annotated[
        bool | None, ignored_field("Streams begin with the output; reported if true.", default=False)
    ] = None
    timings_per_token: Annotated[
        bool | None, ignored_field("See `/metrics` and the usage records; reported if true.", default=False)
    ] = None
    response_fields: Annotated[
        list[str] | None, ignored_field("Responses have all fields; reported as ignored.", default=[])
    ] = None
    verbose: Annotated[bool | None, ignored_field("Reported if true.", default=False)] = None
    sse_ping_interval: Annotated[
        Number | None, ignored_field("The setting `keep_alive` is used; reported as ignored.")
    ] = None
    parse_tool_calls: Annotated[
        bool | None, ignored_field("Tool calls are always parsed; reported if false.", default=True)
    ] = None
    reasoning_format: Annotated[
        Literal["auto", "none", "deepseek", "deepseek-legacy"] | None,
        ignored_field("Reasoning is always returned apart, as with `deepseek`; `none` is reported.", default="auto"),
    ] = None
    reasoning_control: Annotated[
        bool | None, ignored_field("Reasoning cannot be ended by a later request; reported if true.", default=False)
    ] = None
    reasoning_budget_message: Annotated[
        str | None, ignored_field("The reasoning is closed without a message; reported as ignored.", default="")
    ] = None
    reasoning_budget_start_tag: Annotated[str | None, ignored_field(_INTERNAL)] = None
    reasoning_budget_end_tag: Annotated[str | None, ignored_field(_INTERNAL)] = None
    reasoning_budget_end_tags: Annotated[list[str] | None, ignored_field(_INTERNAL)] = None
    generation_prompt: Annotated[str | None, ignored_field(_INTERNAL)] = None
    chat_format: Annotated[int | str | None, ignored_field(_INTERNAL)] = None
    chat_parser: Annotated[str | None, ignored_field(_INTERNAL)] = None
    grammar_lazy: Annotated[bool | None, ignored_field(_INTERNAL, default=False)] = None
    grammar_triggers: Annotated[list[dict[str, Any] | str] | None, ignored_field(_INTERNAL, default=[])] = None
    grammar_type: Annotated[str | None, ignored_field(_INTERNAL)] = None
    preserved_tokens: Annotated[list[str] | None, ignored_field(_INTERNAL, default=[])] = None


B = TypeVar("B", bound=CompatibilityFields)

# Fields that have no effect, or none without another one that is reported.
_NOT_REPORTED = {
    *("xtc_threshold", "dynatemp_exponent", "mirostat_tau", "mirostat_eta", "adaptive_decay", "backend_sampling"),
}
_ALSO_NEUTRAL = {"reasoning_format": "deepseek"}


def _ignored_fields() -> dict[str, Any]:
    """Return the ignored fields that are reported, with the values that ask for nothing."""
    found = {}
    hints = get_type_hints(CompatibilityFields, include_extras=True)
    for name in CompatibilityFields.__annotations__:
        schema = next(meta.extra_json_schema or {} for meta in hints[name].__metadata__)
        if schema.get(IGNORED) and name not in _NOT_REPORTED:
            found[name] = schema.get(DEFAULT)
    return found


_NEUTRAL = _ignored_fields()
_read_ignored = operator.attrgetter(*_NEUTRAL)
_ABSENT = (None,) * len(_NEUTRAL)


def read_compatibility_fields(body: B, ignored: list[str]) -> B:
    """Return the body with other names of fields resolved. Raises `InvalidRequest` for a field that is refused.

    The names of fields without effect are appended to `ignored`.
    """
    for name, reason in _REFUSED.items():
        value = getattr(body, name)
        if value is not None and not (value == [] and name in ("lora", "logits_processors")):
            raise InvalidRequest(f"{name}: {reason}", param=name)
    if (values := _read_ignored(body)) != _ABSENT:
        for (name, neutral), value in zip(_NEUTRAL.items(), values, strict=True):
            if value is not None and value != neutral and value != _ALSO_NEUTRAL.get(name):
                ignored.append(name)
    if body.repeat_penalty is not None and body.repetition_penalty is None:
        return msgspec.structs.replace(body, repetition_penalty=body.repeat_penalty)
    return body
