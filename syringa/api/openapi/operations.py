"""Descriptions of the endpoints for the OpenAPI document: inference, tokens, and the server's own endpoints.

Paths, methods and access are declared in `syringa.http.endpoints`, which refers to these operations.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from syringa.api import me, server_info
from syringa.api import tokenize as tokens
from syringa.api.anthropic import models as anthropic_models
from syringa.api.chat import request as chat
from syringa.api.chat import writer as chat_writer
from syringa.api.completions import request as completions
from syringa.api.completions import writer as completions_writer
from syringa.api.models import entries


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What one endpoint takes and returns. `errors` lists its error statuses, without those of authentication."""

    id: str
    tag: str
    summary: str
    description: str = ""
    request: type[msgspec.Struct] | None = None
    request_media_type: str = "application/json"
    example: dict[str, Any] = field(default_factory=dict)
    response: type[msgspec.Struct] | dict[str, Any] | None = None
    alternative: type[msgspec.Struct] | None = None  # what it returns to clients of another API
    media_type: str = "application/json"  # empty: the response has no body
    text_media_type: str = ""  # an alternative representation of the response, as text
    chunks: tuple[type[msgspec.Struct], ...] = ()  # data of the server-sent events, where the endpoint can stream
    done: bool = True  # the stream ends with `[DONE]`
    lines: bool = False  # the stream consists of lines of JSON, instead of server-sent events
    parameters: dict[str, str] = field(default_factory=dict)  # descriptions of the path parameters
    query: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: tuple[int, ...] = ()


POST_ERRORS = (400, 404, 413, 415, 500)


def query_parameter(description: str, **schema: Any) -> dict[str, Any]:
    return {"description": description, "schema": schema}


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties, "additionalProperties": False}


# Inference

CREATE_CHAT_COMPLETION = Operation(
    id="createChatCompletion",
    tag="Chat",
    summary="Create a chat completion",
    description="Generates `n` replies to the messages, using the model's chat template. With `stream`, the response is"
    " a stream of server-sent events with deltas, then `[DONE]`; an error during generation is the last event.",
    request=chat.ChatRequest,
    example={"messages": [{"role": "user", "content": "Which shrub is in bloom?"}], "max_completion_tokens": 64},
    response=chat_writer.ChatCompletion,
    chunks=(chat_writer.ChatChunk,),
    errors=(*POST_ERRORS, 503),
)
CREATE_CHAT_COMPLETION_V2 = replace(CREATE_CHAT_COMPLETION, id="createChatCompletionV2")

CREATE_COMPLETION = Operation(
    id="createCompletion",
    tag="Completions",
    summary="Create a completion",
    description="Continues each prompt `n` times. With `stream`, the response is a stream of server-sent events with"
    " chunks of the same shape, terminated by `[DONE]`; an error during generation is the last event.",
    request=completions.CompletionRequest,
    example={"prompt": "The lilac is in bloom and", "max_tokens": 16, "temperature": 0.7, "seed": 1},
    response=completions_writer.Completion,
    chunks=(completions_writer.Completion,),
    errors=(*POST_ERRORS, 503),
)
CREATE_COMPLETION_V2 = replace(CREATE_COMPLETION, id="createCompletionV2")

# Models and tokens

_SHAPES = (
    "In Anthropic's shape if the request has the header `anthropic-version`, or its key in `x-api-key` and none in "
    "`authorization`; otherwise in OpenAI's."
)
LIST_MODELS_V2 = Operation(id="listModelsV2", tag="Models", summary="List the models", response=entries.ModelList)
LIST_MODELS = replace(
    LIST_MODELS_V2,
    id="listModels",
    description=_SHAPES,
    alternative=anthropic_models.AnthropicModelList,
    query={
        "limit": query_parameter("In Anthropic's shape: the maximum number of models, 1 to 1000.", type="string"),
        "after_id": query_parameter("In Anthropic's shape: return models after the one with this id.", type="string"),
        "before_id": query_parameter("In Anthropic's shape: return models before the one with this id.", type="string"),
        "lifecycle": query_parameter("In Anthropic's shape: the stage of the models; all are `active`.", type="string"),
    },
    errors=(400, 404),
)

SHOW_MODEL = Operation(
    id="showModel",
    tag="Models",
    summary="Retrieve a model",
    description=_SHAPES,
    response=entries.ModelEntry,
    alternative=anthropic_models.AnthropicModel,
    parameters={"id": "The id or alias of a model, or `default`. May contain slashes."},
    errors=(404,),
)

TOKENIZE = Operation(
    id="tokenize",
    tag="Tokens",
    summary="Convert text or messages to tokens",
    request=tokens.TokenizeRequest,
    example={"prompt": "Hello, world", "return_token_strs": True},
    response=tokens.TokenizeResponse,
    errors=POST_ERRORS,
)

DETOKENIZE = Operation(
    id="detokenize",
    tag="Tokens",
    summary="Convert tokens to text",
    request=tokens.DetokenizeRequest,
    example={"tokens": [72, 105]},
    response=tokens.DetokenizeResponse,
    errors=POST_ERRORS,
)

# The server

STATUS_WINDOWS = ["5m", "1h", "24h", "30d"]

ROOT = Operation(
    id="root",
    tag="Service",
    summary="The console as a web page",
    description="Where it is switched off, and on Ollama's port, text that says that there is a server.",
    response={"type": "string"},
    media_type="text/html",
    text_media_type="text/plain",
)

CONSOLE = replace(ROOT, id="console")

CONSOLE_FILE = Operation(
    id="consoleFile",
    tag="Service",
    summary="A file of the console",
    response={"type": "string"},
    media_type="*/*",
    parameters={"path": "The path of the file. May contain slashes."},
    errors=(404,),
)

HEALTH = Operation(
    id="health",
    tag="Service",
    summary="Check that the server is alive",
    description="Independent of the state of the models: see `/ready`.",
    response=_object(status={"const": "ok"}),
)

READY = Operation(
    id="ready",
    tag="Service",
    summary="Check that the default model accepts requests",
    response=_object(status={"const": "ready"}),
    errors=(503,),
)

STATUS = Operation(
    id="status",
    tag="Service",
    summary="Recent speed and availability of the models",
    description="A figure is null where the window has no request for it. Rejected and canceled requests are not"
    " counted.",
    query={"window": query_parameter("The length of the window.", enum=STATUS_WINDOWS, default="5m")},
    response=_object(
        updated_at={"type": "string", "format": "date-time", "description": "When the figures were read."},
        window={"enum": STATUS_WINDOWS},
        window_secs={"type": "integer"},
        stale={
            "type": "boolean",
            "description": "The database did not respond, and these are the last known figures.",
        },
        models={
            "type": "array",
            "items": _object(
                id={"type": "string"},
                name={"type": "string"},
                tps={
                    "type": ["number", "null"],
                    "description": "Tokens per second of a request after its first token.",
                },
                ttfb_seconds={"type": ["number", "null"], "description": "Mean seconds to the first token."},
                uptime_pct={
                    "type": ["number", "null"],
                    "description": "Successful requests, in percent of those that succeeded or failed.",
                },
                ready={
                    "type": "boolean",
                    "description": "False while the model is loading, does not respond or has failed.",
                },
                replicas={
                    "type": "object",
                    "additionalProperties": {"type": "integer"},
                    "description": "Number of replicas by status: `queued`, `fetching`, `loading`, `ready`, `hanging`, "
                    "`draining`.",
                },
            ),
        },
        nodes={
            "type": "object",
            "additionalProperties": {"type": "integer"},
            "description": "Number of nodes by state: `ready`, `draining`, `lost`.",
        },
        pools={
            "type": "object",
            "additionalProperties": {"type": "integer"},
            "description": "Number of pools by state: `active`, `closing`, `inactive`, `degraded`.",
        },
        evictions={
            "type": "object",
            "additionalProperties": {"type": "integer"},
            "description": "Number of replicas that had to leave, by reason: `node_drained`, `pool_closed`, "
            "`owner_returned`, `capacity`, `preempted`. Empty without a cluster.",
        },
        recovery=_object(
            count={"type": "integer", "description": "How often replicas were lost and replaced."},
            mean_seconds={
                "type": ["number", "null"],
                "description": "Mean seconds from a loss until the minimum of the model was ready again.",
            },
        ),
        moves={
            "type": "object",
            "additionalProperties": {"type": "integer"},
            "description": "Number of requests that went on at another replica, by reason: `drain`, `crash`, "
            "`silence`, `balance`.",
        },
        router=_object(
            requests={
                "type": "integer",
                "description": "Number of requests for which one of several replicas was chosen.",
            },
            hit_share={
                "type": ["number", "null"],
                "description": "Share of these of which a replica had served the beginning of the prompt.",
            },
        ),
    ),
    errors=(400,),
)

METRICS = Operation(
    id="metrics",
    tag="Service",
    summary="Prometheus metrics",
    description=(
        "Requires an API key where keys are configured, unless `public_metrics` is set. If there are several "
        "organizations, an ordinary key sees the state of its models and the version of the server only; an "
        "administrator's key sees everything."
    ),
    response={"type": "string"},
    media_type="text/plain",
)

OPENAPI = Operation(
    id="openapi",
    tag="Service",
    summary="This OpenAPI document",
    response={"type": "object"},
)

DOCS = Operation(
    id="docs",
    tag="Service",
    summary="The API reference as a web page",
    response={"type": "string"},
    media_type="text/html",
)

ME = Operation(
    id="me",
    tag="Service",
    summary="Who you are, and what you may do",
    description="Without keys on the server, the caller has neither an organization nor a key, and may administer the"
    " server from its own machine.",
    response=me.CallerEntry,
)

VERSION = Operation(
    id="version",
    tag="Service",
    summary="The version of the server",
    response=server_info.VersionInfo,
)

PING = Operation(
    id="ping",
    tag="Service",
    summary="Check that the default model accepts requests, like `/ready`",
    response=_object(status={"const": "ready"}),
    errors=(503,),
)
PING_POST = replace(PING, id="pingPost")

LOAD = Operation(
    id="load",
    tag="Service",
    summary="The number of sequences that are running or waiting",
    description="If there are several organizations, an administrator's key is needed, as for all of `/metrics`.",
    response=server_info.LoadInfo,
    errors=(403,),
)

_MODEL_QUERY = {"model": query_parameter("The id or alias of a model. Default: the default model.", type="string")}

TOKENIZER_INFO = Operation(
    id="tokenizerInfo",
    tag="Tokens",
    summary="Describe the tokenizer of a model, in vLLM's shape",
    query=_MODEL_QUERY,
    response=server_info.TokenizerInfo,
    errors=(403, 404, 503),
)

PROPS = Operation(
    id="props",
    tag="Models",
    summary="Describe a model and the defaults of its requests, in llama.cpp's shape",
    query=_MODEL_QUERY,
    response=server_info.Props,
    errors=(403, 404, 503),
)
