"""Every setting, with its type, its default and the sentence that explains it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from syringa.config.checking import bare
from syringa.config.specs import Count, Device, Dtype, ModelSpec, ReasoningFormat, Seconds, ToolFormat, says

PREFIX = "SYRINGA_"

_Positive = Annotated[int, Meta(ge=1)]


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What an administrator may set. The descriptions are also the command line's help."""

    model: Annotated[
        str, says("A known model's name, a GGUF file, or a Hugging Face folder; with [[models]], an id: the default.")
    ] = "default"
    served_model_name: Annotated[
        tuple[str, ...], says("Names the API answers to; the first is the one it shows. May be repeated.")
    ] = ()
    host: Annotated[str, says("Address to listen on. Beyond loopback, a key is needed.")] = "127.0.0.1"
    port: Annotated[Annotated[int, Meta(ge=0, le=65535)], says("Port to listen on; 0 takes a free one.")] = 8000
    api_key: Annotated[tuple[str, ...], says("A key that clients must send as a Bearer token. May be repeated.")] = ()
    cors_origins: Annotated[
        tuple[str, ...], says("Origins whose pages may call the API, or * for any. May be repeated.")
    ] = ()
    workers: Annotated[_Positive, says("API processes.")] = 1
    log_level: Annotated[Literal["debug", "info", "warning", "error"], says("How much is logged.")] = "info"
    log_format: Annotated[Literal["text", "json"], says("Log lines for people, or one JSON object a line.")] = "text"
    log_prompts: Annotated[
        bool, says("Log what clients send and are sent, too. Never keys; never without this setting.")
    ] = False

    requests_per_minute: Annotated[
        Count, says("Requests a minute of an organisation that has no limit of its own; 0: no limit.")
    ] = 200
    tokens_per_minute: Annotated[
        Count, says("Tokens a minute, read and written, of an organisation without a limit of its own; 0: no limit.")
    ] = 0
    concurrent_requests: Annotated[
        Count, says("Requests at the same time of an organisation without a limit of its own; 0: no limit.")
    ] = 0
    usage_days: Annotated[Count, says("Days that the records of requests are kept; 0: for ever.")] = 400
    public_metrics: Annotated[bool, says("Answer /metrics without a key, where keys are needed.")] = False
    metrics_prefix: Annotated[
        str, says("What the names at /metrics begin with; vllm: makes dashboards for vLLM work.")
    ] = "syringa_"

    database: Annotated[
        str,
        says(
            "Where responses, keys and usage are kept: a file, or postgresql://user@host/name; empty: a file in your"
            " data folder."
        ),
    ] = ""

    response_days: Annotated[Count, says("Days that a stored response is kept; 0: for ever.")] = 30
    responses_mode: Annotated[
        Literal["openai", "open-responses"],
        says("Whose names a response's stream uses where a request does not say (x-syringa-responses-mode)."),
    ] = "openai"
    max_background: Annotated[
        _Positive, says("Background responses that one API process runs at the same time; one more gets 503.")
    ] = 64
    websocket_idle: Annotated[
        Seconds, says("Seconds after which a WebSocket that asks for nothing is closed; 0: never.")
    ] = 3600.0

    chat_template: Annotated[str, says("A file with a chat template; empty: the model's own.")] = ""
    tool_format: Annotated[
        ToolFormat, says("How the model writes calls of tools; auto: read off its chat template.")
    ] = "auto"
    reasoning_format: Annotated[
        ReasoningFormat,
        says("How the model marks its thoughts; auto: read off its chat template and its tokens."),
    ] = "auto"

    max_model_len: Annotated[Count, says("Longest prompt plus answer, in tokens; 0: what the model allows.")] = 0
    dtype: Annotated[Dtype, says("Precision of the weights. fp8 is for GPUs, int8 and fp32 for CPUs.")] = "auto"
    device: Annotated[Device, says("Where models are computed; auto: on a GPU where there is one.")] = "auto"
    attention: Annotated[
        Literal["auto", "triton", "flashinfer"],
        says(
            "Whose kernel computes prompts' attention on a GPU; auto: FlashInfer's on Hopper, where its prebuilt "
            "kernels are installed."
        ),
    ] = "auto"
    deterministic: Annotated[
        bool,
        says(
            "A seeded request gets the same bytes under any load on a GPU too, where that costs some speed; on a CPU "
            "it always does in int8 and bf16."
        ),
    ] = False
    threads: Annotated[Count, says("CPU threads of the model; 0: chosen for the machine.")] = 0
    kv_cache_tokens: Annotated[Count, says("Tokens that the cache holds; 0: sized from memory.")] = 0
    kv_cache_gb: Annotated[Annotated[float, Meta(ge=0)], says("Memory for the cache in GiB; 0: chosen.")] = 0.0
    gpu_memory_fraction: Annotated[
        Annotated[float, Meta(ge=0, le=1)],
        says(
            "Part of a GPU's memory up to which a model's cache grows, up to 1; 0: all of it, or where several models"
            " may be loaded, what each needs and an equal part of the rest."
        ),
    ] = 0.0
    prefix_caching: Annotated[bool, says("Reuse computed prompt prefixes across requests.")] = True
    max_running: Annotated[_Positive, says("Sequences computed at the same time.")] = 256
    max_queue: Annotated[_Positive, says("Requests that may wait; one more is refused with 503.")] = 1024
    queue_timeout: Annotated[
        Seconds, says("Seconds that a request may wait to be begun; then it is refused with 503. 0: no limit.")
    ] = 0.0
    step_tokens: Annotated[Count, says("Tokens computed in one step at most; 0: 512 on a CPU, 8192 on a GPU.")] = 0

    model_idle: Annotated[
        Seconds, says("Seconds after which a model that nobody uses is unloaded, unless it is preloaded; 0: never.")
    ] = 900.0
    max_loaded: Annotated[Count, says("Models loaded at the same time; 0: as memory allows.")] = 0
    load_timeout: Annotated[
        Seconds, says("Seconds that a request waits for a model to be loaded; then it gets 503. 0: no limit.")
    ] = 600.0

    max_body_bytes: Annotated[_Positive, says("Largest request body; a larger one gets 413.")] = 32 * 1024 * 1024
    unknown_fields: Annotated[
        Literal["ignore", "refuse"], says("What happens to request fields that are not known.")
    ] = "ignore"
    request_timeout: Annotated[Seconds, says("Seconds one request may take; 0: no limit.")] = 0.0
    read_timeout: Annotated[
        Seconds, says("Seconds that a client may take to send a request, from its first byte; 0: no limit.")
    ] = 60.0
    keep_alive: Annotated[Seconds, says("Seconds between comments on a stream that waits.")] = 10.0
    drain_timeout: Annotated[Seconds, says("Seconds that running requests get when the server ends.")] = 10.0

    image_hosts_private: Annotated[
        bool, says("Fetch images from this machine and from private networks too, not only from public addresses.")
    ] = False
    image_max_bytes: Annotated[_Positive, says("Largest image, in bytes.")] = 20 * 1024 * 1024
    image_timeout: Annotated[Seconds, says("Seconds that fetching one image may take; 0: no limit.")] = 10.0
    image_max_pixels: Annotated[_Positive, says("Largest image, width times height.")] = 40_000_000
    images_per_request: Annotated[Count, says("Images in one request at most.")] = 50

    models: tuple[ModelSpec, ...] = ()  # the tables `[[models]]` of the file; a flag could not say it


# The settings that are flags and variables, too.
FIELDS: Mapping[str, msgspec.structs.FieldInfo] = {
    f.name: f for f in msgspec.structs.fields(Config) if f.name != "models"
}
HINTS: Mapping[str, Any] = get_type_hints(Config, include_extras=True)


def describe(name: str) -> str:
    """The sentence that explains a setting."""
    for meta in HINTS[name].__metadata__:
        if isinstance(meta, Meta) and meta.description:
            return meta.description
    raise KeyError(name)


def bare_type(name: str) -> Any:
    """A setting's type without its constraints: `int`, `str`, `tuple[str, ...]`, a `Literal`."""
    return bare(HINTS[name])


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()
