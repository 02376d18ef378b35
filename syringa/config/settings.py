"""All settings, each with its type, default and description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from syringa.config.specs import (
    CacheDtype,
    Count,
    Device,
    Dtype,
    ModelSpec,
    ReasoningFields,
    ReasoningFormatSetting,
    Replicas,
    RequestChatTemplates,
    Seconds,
    ToolFormatSetting,
    doc,
)
from syringa.config.validation import base_type
from syringa.fleet.pools import PoolSpec

PREFIX = "SYRINGA_"
TABLES = ("models", "pools")

_Positive = Annotated[int, Meta(ge=1)]


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a server. The descriptions are also the help of the command line."""

    model: Annotated[
        str, doc("A known model's name, a GGUF file, or a Hugging Face folder; with [[models]], the default's id.")
    ] = "default"
    embedding_model: Annotated[
        str,
        doc(
            "An embedding model or a reranker to serve beside the model: `embedding` for all-MiniLM-L6-v2, a folder, a "
            "name of the Hugging Face Hub, or the id of one of the [[models]]; empty: none."
        ),
    ] = ""
    served_model_name: Annotated[
        tuple[str, ...],
        doc(
            "Names of the model in the API; the first is shown in responses, and any other may be a pattern such as "
            "claude-*. May be repeated."
        ),
    ] = ()
    host: Annotated[str, doc("Address to listen on. Any but a loopback address requires an API key.")] = "127.0.0.1"
    port: Annotated[Annotated[int, Meta(ge=0, le=65535)], doc("Port to listen on; 0: any free port.")] = 8000
    ollama_port: Annotated[
        Annotated[int, Meta(ge=-1, le=65535)],
        doc(
            "A second port on the same address, for programs that expect Ollama at its own, 11434; all APIs are on "
            "both. 0: any free port; -1: none."
        ),
    ] = -1
    api_key: Annotated[
        tuple[str, ...], doc("An API key that clients must send, as a Bearer token or in X-Api-Key. May be repeated.")
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...], doc("Origins that may call the API from a browser (CORS), or * for any. May be repeated.")
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        doc(
            "Host names by which clients reach the server, besides loopback names and --host, or * for any. Checked "
            "while no API key is required, and where this is set. May be repeated."
        ),
    ] = ()
    root_path: Annotated[
        str,
        doc(
            "Path under which a proxy serves the API, such as /llm. Requests are accepted with and without it, so the "
            "proxy may strip it or not."
        ),
    ] = ""
    console: Annotated[bool, doc("Serve the console, a web page for all of the server, at /.")] = True
    workers: Annotated[_Positive, doc("Number of API server processes.")] = 1
    log_level: Annotated[Literal["debug", "info", "warning", "error"], doc("Log level.")] = "info"
    log_format: Annotated[Literal["text", "json"], doc("Log format: text, or one JSON object per line.")] = "text"
    log_prompts: Annotated[bool, doc("Also log prompts and answers. API keys are never logged.")] = False

    requests_per_minute: Annotated[
        Count, doc("Requests per minute of an organization without its own limit; 0: no limit.")
    ] = 200
    tokens_per_minute: Annotated[
        Count, doc("Tokens per minute, input plus output, of an organization without its own limit; 0: no limit.")
    ] = 0
    concurrent_requests: Annotated[
        Count, doc("Concurrent requests of an organization without its own limit; 0: no limit.")
    ] = 0
    usage_days: Annotated[Count, doc("Days that usage records are kept; 0: forever.")] = 400
    public_metrics: Annotated[bool, doc("Serve /metrics without an API key.")] = False
    metrics_prefix: Annotated[str, doc("Prefix of metric names; with vllm: dashboards for vLLM work.")] = "syringa_"

    database: Annotated[
        str,
        doc(
            "Database of responses, keys and usage: a SQLite file, or postgresql://user@host/name; empty: a file in the"
            " user's data folder."
        ),
    ] = ""

    response_days: Annotated[Count, doc("Days that stored responses are kept; 0: forever.")] = 30
    responses_mode: Annotated[
        Literal["openai", "open-responses"],
        doc("Default event names of response streams; a request may choose with x-syringa-responses-mode."),
    ] = "openai"
    history_max_items: Annotated[
        _Positive,
        doc("Maximum number of items of a conversation, and of the history that a response continues; more get 400."),
    ] = 10_000
    history_max_bytes: Annotated[
        _Positive,
        doc("Maximum size of a conversation in bytes, and of the history that a response continues; more get 400."),
    ] = 32 * 1024 * 1024
    max_background: Annotated[
        _Positive,
        doc("Concurrent background responses per API process, shared equally by organizations; more get 503."),
    ] = 64
    websocket_idle: Annotated[Seconds, doc("Seconds after which an idle WebSocket is closed; 0: never.")] = 3600.0

    files_dir: Annotated[
        str,
        doc(
            "Folder of uploaded files and of the output of batches, of this database alone; several servers with one "
            "database share it. Empty: beside the database file, or in the user's data folder."
        ),
    ] = ""
    file_max_bytes: Annotated[_Positive, doc("Maximum size of an uploaded file in bytes; a larger one gets 413.")] = (
        512 * 1024 * 1024
    )
    files_quota_bytes: Annotated[
        Count,
        doc("Maximum size of all files of an organization in bytes; an upload beyond it gets 413. 0: no limit."),
    ] = 10 * 1024**3
    file_days: Annotated[
        Count, doc("Days that files without a time of their own, and finished batches, are kept; 0: forever.")
    ] = 30
    batch_concurrency: Annotated[
        _Positive, doc("Requests of batches that run at the same time, per API process; organizations share them.")
    ] = 256
    batch_max_lines: Annotated[_Positive, doc("Maximum number of requests of a batch; one with more fails.")] = 50_000
    batch_queue_lines: Annotated[
        Count,
        doc(
            "Maximum number of requests of all unfinished batches of an organization; a batch that exceeds it fails. "
            "0: no limit."
        ),
    ] = 200_000
    batch_discount: Annotated[
        Annotated[float, Meta(ge=0, le=1)], doc("Fraction of the price by which requests of batches are cheaper.")
    ] = 0.5

    always_include_usage: Annotated[
        bool, doc("Send usage at the end of every stream, as if it had `stream_options.include_usage`.")
    ] = False

    reasoning_fields: Annotated[
        ReasoningFields,
        doc("Fields in which chat returns reasoning: both, or only the one of this name."),
    ] = "both"

    request_chat_templates: Annotated[
        RequestChatTemplates,
        doc("Whether requests may bring a chat template of their own; auto: while no API keys are required."),
    ] = "auto"
    chat_template: Annotated[str, doc("File with a chat template; empty: the model's own.")] = ""
    tool_format: Annotated[
        ToolFormatSetting, doc("Format of the model's tool calls; auto: detected from its chat template.")
    ] = "auto"
    reasoning_format: Annotated[
        ReasoningFormatSetting,
        doc("Format of the model's reasoning; auto: detected from its chat template and tokens."),
    ] = "auto"

    max_model_len: Annotated[
        Count, doc("Maximum tokens of prompt plus output; 0: the model's maximum, or less where memory is short.")
    ] = 0
    dtype: Annotated[
        Dtype, doc("Data type of the weights; gguf: as in the file. fp8 is for GPUs, int8, gguf and fp32 for CPUs.")
    ] = "auto"
    device: Annotated[Device, doc("Device of the models; auto: a GPU if there is one.")] = "auto"
    attention: Annotated[
        Literal["auto", "triton", "flashinfer"],
        doc(
            "Attention kernel for prompts on a GPU; auto: FlashInfer on Hopper if its prebuilt kernels are installed, "
            "else Triton."
        ),
    ] = "auto"
    deterministic: Annotated[
        bool,
        doc(
            "Batch-invariant results: a seeded request gets the same bytes under any load. Costs some speed on a GPU; "
            "on a CPU, native models with the compiled kernels always have them, in int8, gguf and bf16."
        ),
    ] = False
    threads: Annotated[Count, doc("CPU threads of the model; 0: chosen for the machine.")] = 0
    replicas: Annotated[
        Replicas,
        doc(
            "Replicas of a model while it is loaded: a number, or MIN:MAX to add more when requests wait. They share "
            "the CPU threads; on several GPUs, each has its own."
        ),
    ] = Replicas()
    kv_cache_tokens: Annotated[Count, doc("Capacity of the KV cache in tokens; 0: sized from memory.")] = 0
    kv_cache_gb: Annotated[
        Annotated[float, Meta(ge=0)], doc("Memory of the KV cache in GiB; 0: chosen automatically.")
    ] = 0.0
    kv_cache_dtype: Annotated[
        CacheDtype,
        doc("Data type of the KV cache on a GPU; fp8: half the memory of auto, for a small loss of accuracy."),
    ] = "auto"
    gpu_memory_fraction: Annotated[
        Annotated[float, Meta(ge=0, le=1)],
        doc(
            "Fraction of GPU memory that a model may use, up to 1; 0: all of it, or with several models, what each"
            " needs plus an equal share of the rest."
        ),
    ] = 0.0
    prefix_caching: Annotated[bool, doc("Reuse the KV cache of common prompt prefixes.")] = True
    share_prefix_cache: Annotated[
        bool,
        doc(
            "Reuse cached prefixes, images and grammars across organizations. An organization can then find out by "
            "guessing what others have sent."
        ),
    ] = False
    max_running: Annotated[_Positive, doc("Maximum number of running sequences.")] = 256
    max_queue: Annotated[
        _Positive, doc("Maximum number of waiting requests, without those of batches; further ones get 503.")
    ] = 1024
    queue_timeout: Annotated[
        Seconds,
        doc(
            "Seconds that a request may wait in the queue before it gets 503; 0: no limit. In a cluster, also for a "
            "node with room for its model; 0: as long as load_timeout."
        ),
    ] = 0.0
    step_tokens: Annotated[Count, doc("Maximum number of tokens per engine step; 0: 512 on a CPU, 8192 on a GPU.")] = 0

    grammar_timeout: Annotated[
        Annotated[float, Meta(gt=0, le=60)],
        doc("Seconds of CPU time that compiling a grammar may take; a request whose grammar takes longer gets 400."),
    ] = 2.0
    grammar_memory_bytes: Annotated[
        _Positive, doc("Maximum memory of a compiled grammar in bytes; a request whose grammar takes more gets 400.")
    ] = 128 * 1024 * 1024

    model_idle: Annotated[
        Seconds, doc("Seconds after which an idle model is unloaded, unless it is preloaded; 0: never.")
    ] = 900.0
    max_loaded: Annotated[Count, doc("Maximum number of loaded models; 0: limited by memory.")] = 0
    load_timeout: Annotated[
        Seconds, doc("Seconds that a request waits for its model to be loaded before it gets 503; 0: no limit.")
    ] = 600.0

    step_timeout: Annotated[
        Seconds,
        doc(
            "Seconds that an engine step may take; then the model is not ready, and after as long again its worker is "
            "restarted. 10 times as long while loading; 0: no limit."
        ),
    ] = 120.0
    heartbeat_timeout: Annotated[
        Seconds,
        doc("Like step_timeout, for seconds in which a model worker does not respond at all; 0: no limit."),
    ] = 15.0
    worker_host: Annotated[
        str,
        doc(
            "Name or address of this machine on which model workers serve API servers over TCP with mutual TLS, each "
            "on a free port; empty: Unix sockets."
        ),
    ] = ""
    cluster: Annotated[
        bool,
        doc("Run models on the nodes of a cluster, not on this machine. `syringa cluster start` sets this."),
    ] = False
    cluster_dir: Annotated[
        str,
        doc(
            "Folder of the certificates of a cluster, for worker_host and cluster (`syringa cluster init`); empty: "
            "cluster/ in the data folder."
        ),
    ] = ""
    cluster_address: Annotated[
        str,
        doc(
            "With cluster: HOST:PORT at which nodes join and fetch model files; they reach Ray under the same host. "
            "Empty: nodes can neither join nor fetch files."
        ),
    ] = ""
    cluster_hub: Annotated[
        bool,
        doc(
            "With cluster: nodes fetch models of the Hugging Face Hub from there, in the version of this server, and "
            "from this server only if that fails."
        ),
    ] = False
    cluster_keep_replicas: Annotated[
        bool,
        doc(
            "With cluster: leave the replicas running when the server is stopped; the next one takes them over. "
            "Without, they end with the last server that uses the cluster."
        ),
    ] = False
    ray_port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)], doc("With cluster: port of Ray's head on this machine.")
    ] = 6379

    max_body_bytes: Annotated[_Positive, doc("Maximum size of a request body in bytes; a larger one gets 413.")] = (
        32 * 1024 * 1024
    )
    max_choices: Annotated[
        _Positive, doc("Maximum number of choices of a request: its prompts times n or best_of; more get 400.")
    ] = 2048
    embedding_max_tokens: Annotated[
        _Positive,
        doc("Maximum number of tokens of all inputs of an embeddings, rerank or score request; more get 400."),
    ] = 1_000_000
    unknown_fields: Annotated[Literal["ignore", "refuse"], doc("What to do with unknown request fields.")] = "ignore"
    unsupported_tools: Annotated[
        Literal["ignore", "refuse"],
        doc(
            "What to do with tools that only OpenAI or Anthropic hosts, such as web_search: do not offer them to the "
            "model and name them in x-syringa-ignored, or answer with 400."
        ),
    ] = "ignore"
    request_timeout: Annotated[Seconds, doc("Seconds that a request may take; 0: no limit.")] = 0.0
    read_timeout: Annotated[Seconds, doc("Seconds that a client may take to send a request; 0: no limit.")] = 60.0
    keep_alive: Annotated[Seconds, doc("Seconds between keep-alive comments on a silent stream.")] = 10.0
    drain_timeout: Annotated[
        Seconds, doc("Seconds that running requests may take to finish when the server shuts down.")
    ] = 10.0

    image_hosts_private: Annotated[bool, doc("Allow image URLs on this machine and in private networks.")] = False
    image_max_bytes: Annotated[_Positive, doc("Maximum size of an image in bytes.")] = 20 * 1024 * 1024
    image_timeout: Annotated[Seconds, doc("Seconds that downloading an image may take; 0: no limit.")] = 10.0
    image_max_pixels: Annotated[_Positive, doc("Maximum number of pixels of an image.")] = 40_000_000
    image_memory: Annotated[
        _Positive,
        doc(
            "Maximum number of bytes of image files that the requests of an API process hold at a time, of which an "
            "organization may hold half; further images get 503. Batches may hold half as much besides."
        ),
    ] = 2 * 1024**3
    image_max_side: Annotated[_Positive, doc("Maximum width and height of an image in pixels.")] = 16_384
    images_per_request: Annotated[Count, doc("Maximum number of images per request.")] = 50

    mcp_hosts: Annotated[
        tuple[str, ...],
        doc(
            "Hosts of MCP servers that requests may use, as host or host:port, or * for any with a public address; "
            "none: MCP servers get 400. May be repeated."
        ),
    ] = ()
    mcp_timeout: Annotated[
        Seconds,
        doc("Seconds that an MCP server may take to list its tools, and for each call of one; 0: no limit."),
    ] = 60.0
    mcp_max_bytes: Annotated[
        _Positive, doc("Maximum size of an MCP server's answer in bytes: a list of tools, or the result of a call.")
    ] = 1024 * 1024
    mcp_calls_per_response: Annotated[
        _Positive, doc("Maximum number of MCP calls per response; then the model answers without them.")
    ] = 32

    # The tables of the file, which have no flags.
    models: tuple[ModelSpec, ...] = ()
    pools: tuple[PoolSpec, ...] = ()


# The settings with a flag and an environment variable.
FIELDS: Mapping[str, msgspec.structs.FieldInfo] = {
    f.name: f for f in msgspec.structs.fields(Config) if f.name not in TABLES
}
HINTS: Mapping[str, Any] = get_type_hints(Config, include_extras=True)


def describe(name: str) -> str:
    """Return the description of a setting."""
    for meta in HINTS[name].__metadata__:
        if isinstance(meta, Meta) and meta.description:
            return meta.description
    raise KeyError(name)


def setting_type(name: str) -> Any:
    """Return the type of a setting without constraints: `int`, `str`, `tuple[str, ...]`, a `Literal`."""
    return base_type(HINTS[name])


def variable(name: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + name.upper()
