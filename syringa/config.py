"""The settings of a server, read in one place and frozen after that.

Flags win over `SYRINGA_*` variables, those over one `syringa.toml`, that over the defaults below. A setting has the
same name everywhere: `max_model_len` in the file is `--max-model-len` and `SYRINGA_MAX_MODEL_LEN`.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from syringa.dialect import CallFormat, ThoughtFormat
from syringa.errors import ConfigError

PREFIX = "SYRINGA_"
FILE_NAME = "syringa.toml"
OTHER_VARIABLES = ("SYRINGA_CONFIG", "SYRINGA_HOME")  # where this file is, and where models are kept

_Count = Annotated[int, Meta(ge=0)]
_Positive = Annotated[int, Meta(ge=1)]
_Seconds = Annotated[float, Meta(ge=0)]


def _says(text: str) -> Meta:
    return Meta(description=text)


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What an administrator may set. The descriptions are also the command line's help."""

    model: Annotated[str, _says("A known model's name, a GGUF file, or a Hugging Face folder.")] = "default"
    served_model_name: Annotated[
        tuple[str, ...], _says("Names the API answers to; the first is the one it shows. May be repeated.")
    ] = ()
    host: Annotated[str, _says("Address to listen on. Beyond loopback, a key is needed.")] = "127.0.0.1"
    port: Annotated[Annotated[int, Meta(ge=0, le=65535)], _says("Port to listen on; 0 takes a free one.")] = 8000
    api_key: Annotated[tuple[str, ...], _says("A key that clients must send as a Bearer token. May be repeated.")] = ()
    cors_origins: Annotated[
        tuple[str, ...], _says("Origins whose pages may call the API, or * for any. May be repeated.")
    ] = ()
    workers: Annotated[_Positive, _says("API processes.")] = 1
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _says("How much is logged.")] = "info"
    log_format: Annotated[Literal["text", "json"], _says("Log lines for people, or one JSON object a line.")] = "text"
    log_prompts: Annotated[
        bool, _says("Log what clients send and are sent, too. Never keys; never without this setting.")
    ] = False

    requests_per_minute: Annotated[
        _Count, _says("Requests a minute of an organisation that has no limit of its own; 0: no limit.")
    ] = 200
    tokens_per_minute: Annotated[
        _Count, _says("Tokens a minute, read and written, of an organisation without a limit of its own; 0: no limit.")
    ] = 0
    concurrent_requests: Annotated[
        _Count, _says("Requests at the same time of an organisation without a limit of its own; 0: no limit.")
    ] = 0
    usage_days: Annotated[_Count, _says("Days that the records of requests are kept; 0: for ever.")] = 400
    public_metrics: Annotated[bool, _says("Answer /metrics without a key, where keys are needed.")] = False
    metrics_prefix: Annotated[
        str, _says("What the names at /metrics begin with; vllm: makes dashboards for vLLM work.")
    ] = "syringa_"

    database: Annotated[
        str,
        _says("Where responses are kept: a file, or postgresql://user@host/name; empty: a file in your data folder."),
    ] = ""

    response_days: Annotated[_Count, _says("Days that a stored response is kept; 0: for ever.")] = 30
    responses_mode: Annotated[
        Literal["openai", "open-responses"],
        _says("Whose names a response's stream uses where a request does not say (x-syringa-responses-mode)."),
    ] = "openai"
    max_background: Annotated[
        _Positive, _says("Background responses that one API process runs at the same time; one more gets 503.")
    ] = 64
    websocket_idle: Annotated[
        _Seconds, _says("Seconds after which a WebSocket that asks for nothing is closed; 0: never.")
    ] = 3600.0

    chat_template: Annotated[str, _says("A file with a chat template; empty: the model's own.")] = ""
    tool_format: Annotated[
        Literal["auto", CallFormat], _says("How the model writes calls of tools; auto: read off its chat template.")
    ] = "auto"
    reasoning_format: Annotated[
        Literal["auto", "none", ThoughtFormat],
        _says("How the model marks its thoughts; auto: read off its chat template and its tokens."),
    ] = "auto"

    max_model_len: Annotated[_Count, _says("Longest prompt plus answer, in tokens; 0: what the model allows.")] = 0
    dtype: Annotated[Literal["auto", "int8", "bf16", "fp32"], _says("Precision of the weights.")] = "auto"
    threads: Annotated[_Count, _says("CPU threads of the model; 0: chosen for the machine.")] = 0
    kv_cache_tokens: Annotated[_Count, _says("Tokens that the cache holds; 0: sized from memory.")] = 0
    kv_cache_gb: Annotated[Annotated[float, Meta(ge=0)], _says("Memory for the cache in GiB; 0: chosen.")] = 0.0
    prefix_caching: Annotated[bool, _says("Reuse computed prompt prefixes across requests.")] = True
    max_running: Annotated[_Positive, _says("Sequences computed at the same time.")] = 256
    max_queue: Annotated[_Positive, _says("Requests that may wait; one more is refused with 503.")] = 1024
    queue_timeout: Annotated[
        _Seconds, _says("Seconds that a request may wait to be begun; then it is refused with 503. 0: no limit.")
    ] = 0.0
    step_tokens: Annotated[_Positive, _says("Tokens computed in one step at most.")] = 512

    max_body_bytes: Annotated[_Positive, _says("Largest request body; a larger one gets 413.")] = 32 * 1024 * 1024
    unknown_fields: Annotated[
        Literal["ignore", "refuse"], _says("What happens to request fields that are not known.")
    ] = "ignore"
    request_timeout: Annotated[_Seconds, _says("Seconds one request may take; 0: no limit.")] = 0.0
    read_timeout: Annotated[
        _Seconds, _says("Seconds that a client may take to send a request, from its first byte; 0: no limit.")
    ] = 60.0
    keep_alive: Annotated[_Seconds, _says("Seconds between comments on a stream that waits.")] = 10.0
    drain_timeout: Annotated[_Seconds, _says("Seconds that running requests get when the server ends.")] = 10.0

    image_hosts_private: Annotated[
        bool, _says("Fetch images from this machine and from private networks too, not only from public addresses.")
    ] = False
    image_max_bytes: Annotated[_Positive, _says("Largest image, in bytes.")] = 20 * 1024 * 1024
    image_timeout: Annotated[_Seconds, _says("Seconds that fetching one image may take; 0: no limit.")] = 10.0
    image_max_pixels: Annotated[_Positive, _says("Largest image, width times height.")] = 40_000_000
    images_per_request: Annotated[_Count, _says("Images in one request at most.")] = 50


FIELDS: Mapping[str, msgspec.structs.FieldInfo] = {f.name: f for f in msgspec.structs.fields(Config)}
_HINTS = get_type_hints(Config, include_extras=True)


def describe(name: str) -> str:
    """The sentence that explains a setting."""
    for meta in _HINTS[name].__metadata__:
        if isinstance(meta, Meta) and meta.description:
            return meta.description
    raise KeyError(name)


def bare_type(name: str) -> Any:
    """A setting's type without its constraints: `int`, `str`, `tuple[str, ...]`, a `Literal`."""
    hint = _HINTS[name]
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return hint


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
    file: Path | None = None,
) -> Config:
    """Reads every source once. A flag that is None was not given. Raises `ConfigError` with one line."""
    environ = os.environ if environ is None else environ
    if file is None and environ.get(variable("config")):
        file = Path(environ[variable("config")])
    values = _from_file(file, folder or Path.cwd())
    for name in environ:
        _check_variable(name)
    for name in FIELDS:
        if text := environ.get(variable(name)):
            values[name] = _convert(name, text, variable(name), from_text=True)
    for name, value in (flags or {}).items():
        if value is not None and value != () and value != []:
            values[name] = _convert(name, value, "--" + name.replace("_", "-"), from_text=True)
    config = Config(**values)
    _check(config)
    return config


def _check_variable(name: str) -> None:
    """A mistyped variable must not be taken for one that was never set."""
    if not name.startswith(PREFIX) or name in OTHER_VARIABLES:
        return
    known = [variable(field) for field in FIELDS]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise ConfigError(f"{name}: unknown variable" + (f"; did you mean {near[0]}?" if near else ""), param=name)


def _from_file(file: Path | None, folder: Path) -> dict[str, Any]:
    path = file or folder / FILE_NAME
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if file is None:
            return {}
        raise ConfigError(f"{file}: there is no such file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(FIELDS)}"
            raise ConfigError(f"{path}: unknown setting {key!r}; {hint}", param=key)
        values[name] = _convert(name, value, f"{path}: {key}")
    return values


def _convert(name: str, value: Any, source: str, *, from_text: bool = False) -> Any:
    if get_origin(bare_type(name)) is tuple:
        value = value.split(",") if isinstance(value, str) else value
        value = [item.strip() if isinstance(item, str) else item for item in value] if _is_list(value) else value
    try:
        # Variables are always text; in a file, "8000" is a string and a mistake.
        return msgspec.convert(value, _HINTS[name], strict=not from_text)
    except msgspec.ValidationError as error:
        shown = "" if name == "api_key" else f" {value!r}"
        raise ConfigError(f"{source}{shown}: expected {_expected(name, str(error))}", param=name) from None


def _expected(name: str, said: str) -> str:
    kind = bare_type(name)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    wanted = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "text")
    for sign, words in ((">= ", "at least"), ("<= ", "at most")):
        if sign in said:
            return f"{wanted}, {words} {said.split(sign)[1].split(' ')[0]}"
    return wanted


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _check(config: Config) -> None:
    if any(not key or not key.isascii() or key != key.strip() for key in config.api_key):
        raise ConfigError("api_key: a key is one or more ASCII characters without surrounding spaces", param="api_key")
    if any(not name for name in config.served_model_name):
        raise ConfigError("served_model_name: a name cannot be empty", param="served_model_name")
    for name in FIELDS:
        value = getattr(config, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name}: expected a finite number", param=name)
    if not config.api_key and not is_loopback(config.host):
        raise ConfigError(
            f"listening on {config.host} lets others in: set a key with --api-key, {variable('api_key')} or api_key in "
            f"{FILE_NAME}, or listen on 127.0.0.1",
            param="host",
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
