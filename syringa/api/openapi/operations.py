"""The endpoints as they are published: what each takes, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from syringa.api import tokenize as tokens
from syringa.api.chat import request as chat
from syringa.api.chat import writer as chat_writer
from syringa.api.completions import request as completions
from syringa.api.completions import writer as completions_writer


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One method on one path. `errors` are the statuses that it can give, beside 401 where keys are set."""

    path: str
    id: str
    tag: str
    summary: str
    method: str = "get"
    description: str = ""
    request: type[msgspec.Struct] | None = None
    example: dict[str, Any] = field(default_factory=dict)
    answer: type[msgspec.Struct] | dict[str, Any] | None = None
    media: str = "application/json"
    also: str = ""  # another media type that the answer may have, as text
    chunks: tuple[type[msgspec.Struct], ...] = ()  # what a stream sends
    done: bool = True  # a stream ends with `[DONE]`
    parameters: dict[str, str] = field(default_factory=dict)
    query: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: tuple[int, ...] = ()
    public: bool = False


POST_ERRORS = (400, 404, 413, 415, 500)


def in_query(description: str, **schema: Any) -> dict[str, Any]:
    """A parameter in the address."""
    return {"description": description, "schema": schema}


def _completions(path: str, id: str) -> Operation:
    return Operation(
        path=path,
        id=id,
        tag="Completions",
        summary="Continue a text",
        method="post",
        description="Continues each prompt `n` times. With `stream`, as server-sent events: chunks of the same shape,"
        " then `[DONE]`; an error in the middle is the last event.",
        request=completions.CompletionRequest,
        example={"prompt": "The lilac is in bloom and", "max_tokens": 16, "temperature": 0.7, "seed": 1},
        answer=completions_writer.Completion,
        chunks=(completions_writer.Completion,),
        errors=(*POST_ERRORS, 503),
    )


def _chat(path: str, id: str) -> Operation:
    return Operation(
        path=path,
        id=id,
        tag="Chat",
        summary="Answer a conversation",
        method="post",
        description="Answers the messages `n` times, through the model's chat template. With `stream`, as server-sent"
        " events: chunks with what is new, then `[DONE]`; an error in the middle is the last event.",
        request=chat.ChatRequest,
        example={"messages": [{"role": "user", "content": "Which shrub is in bloom?"}], "max_completion_tokens": 64},
        answer=chat_writer.ChatCompletion,
        chunks=(chat_writer.ChatChunk,),
        errors=(*POST_ERRORS, 503),
    )


def _models(path: str, id: str) -> Operation:
    return Operation(path=path, id=id, tag="Models", summary="List the models", answer=tokens.ModelList)


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties, "additionalProperties": False}


def _says(word: str) -> dict[str, Any]:
    return _object(status={"const": word})


WINDOWS = ["5m", "1h", "24h", "30d"]
_STATUS = _object(
    updated_at={"type": "string", "format": "date-time", "description": "When the figures were read."},
    window={"enum": WINDOWS},
    window_secs={"type": "integer"},
    stale={"type": "boolean", "description": "The database does not answer: these are the last known figures."},
    models={
        "type": "array",
        "items": _object(
            id={"type": "string"},
            name={"type": "string"},
            tps={"type": ["number", "null"], "description": "Tokens a second of one answer, after its first token."},
            ttfb_seconds={"type": ["number", "null"], "description": "Mean seconds to the first token."},
            uptime_pct={"type": ["number", "null"], "description": "Of what went well or failed, how much went well."},
        ),
    },
)

OPERATIONS: tuple[Operation, ...] = (
    _chat("/v1/chat/completions", "createChatCompletion"),
    _chat("/api/v2/chat/completions", "createChatCompletionV2"),
    _completions("/v1/completions", "createCompletion"),
    _completions("/api/v2/completions", "createCompletionV2"),
    _models("/v1/models", "listModels"),
    _models("/api/v2/models", "listModelsV2"),
    Operation(
        path="/v1/models/{id}",
        id="showModel",
        tag="Models",
        summary="Show a model",
        answer=tokens.ModelEntry,
        parameters={"id": "An id, an alias, or `default`. May contain slashes."},
        errors=(404,),
    ),
    Operation(
        path="/tokenize",
        id="tokenize",
        tag="Tokens",
        summary="Text or messages to tokens",
        method="post",
        request=tokens.TokenizeRequest,
        example={"prompt": "Hello, world", "return_token_strs": True},
        answer=tokens.TokenizeResponse,
        errors=POST_ERRORS,
    ),
    Operation(
        path="/detokenize",
        id="detokenize",
        tag="Tokens",
        summary="Tokens to text",
        method="post",
        request=tokens.DetokenizeRequest,
        example={"tokens": [72, 105]},
        answer=tokens.DetokenizeResponse,
        errors=POST_ERRORS,
    ),
    Operation(
        path="/health",
        id="health",
        tag="Service",
        summary="Whether the server lives",
        description="Says nothing of its models: see `/ready`.",
        answer=_says("ok"),
        public=True,
    ),
    Operation(
        path="/ready",
        id="ready",
        tag="Service",
        summary="Whether the default model can answer now",
        answer=_says("ready"),
        errors=(503,),
        public=True,
    ),
    Operation(
        path="/status",
        id="status",
        tag="Service",
        summary="How the models did lately",
        description="A figure is null where no request tells it. Requests that were refused or cancelled do not count.",
        query={"window": {"description": "How far back.", "schema": {"enum": WINDOWS, "default": "5m"}}},
        answer=_STATUS,
        errors=(400,),
        public=True,
    ),
    Operation(
        path="/metrics",
        id="metrics",
        tag="Service",
        summary="Metrics for Prometheus",
        description="Needs a key where keys are needed, unless the administrator has made it public.",
        answer={"type": "string"},
        media="text/plain",
    ),
    Operation(
        path="/openapi.json",
        id="openapi",
        tag="Service",
        summary="This document",
        answer={"type": "object"},
        public=True,
    ),
    Operation(
        path="/docs",
        id="docs",
        tag="Service",
        summary="A page to read it",
        answer={"type": "string"},
        media="text/html",
        public=True,
    ),
)
