"""Descriptions of Ollama's endpoints for the OpenAPI document."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from syringa.api.ollama import embed, manage, models, pull, request, writer
from syringa.api.openapi.operations import POST_ERRORS, Operation

_TAG = "Ollama"
_ERRORS = (*POST_ERRORS, 403, 503)
_EMPTY: dict[str, Any] = {}
_MODEL = {"model": "SmolLM2-135M-Instruct"}
_DIGEST = {"digest": "Checksum of a file."}

OLLAMA_CHAT = Operation(
    id="ollamaChat",
    tag=_TAG,
    summary="Generate the next message of a conversation",
    description="Unless `stream` is false, the response is a stream of lines of JSON; an error during generation is the"
    " last line. Bodies may have the content type of forms, which `curl -d` sends.",
    request=request.OllamaChatRequest,
    example=_MODEL | {"messages": [{"role": "user", "content": "Which shrub is in bloom?"}], "stream": False},
    response=writer.OllamaChatResponse,
    chunks=(writer.OllamaChatResponse,),
    lines=True,
    errors=_ERRORS,
)
OLLAMA_GENERATE = Operation(
    id="ollamaGenerate",
    tag=_TAG,
    summary="Generate the answer to a prompt",
    description="Unless `stream` is false, the response is a stream of lines of JSON, like that of `/api/chat`.",
    request=request.OllamaGenerateRequest,
    example=_MODEL | {"prompt": "Which shrub is in bloom?", "stream": False},
    response=writer.OllamaGenerateResponse,
    chunks=(writer.OllamaGenerateResponse,),
    lines=True,
    errors=_ERRORS,
)
OLLAMA_EMBED = Operation(
    id="ollamaEmbed",
    tag=_TAG,
    summary="Embed texts",
    request=embed.OllamaEmbedRequest,
    example={"model": "all-MiniLM-L6-v2", "input": ["Which shrub is in bloom?"]},
    response=embed.OllamaEmbedResponse,
    errors=_ERRORS,
)
OLLAMA_EMBEDDINGS = Operation(
    id="ollamaEmbeddings",
    tag=_TAG,
    summary="Embed one text: the older form of `/api/embed`",
    request=embed.OllamaEmbeddingsRequest,
    example={"model": "all-MiniLM-L6-v2", "prompt": "Which shrub is in bloom?"},
    response=embed.OllamaEmbeddingsResponse,
    errors=_ERRORS,
)
OLLAMA_TAGS = Operation(id="ollamaTags", tag=_TAG, summary="List the models", response=models.OllamaModelList)
OLLAMA_PS = Operation(id="ollamaPs", tag=_TAG, summary="List the models in memory", response=models.OllamaRunningModels)
OLLAMA_VERSION = Operation(
    id="ollamaVersion",
    tag=_TAG,
    summary="The version of Ollama whose API this is",
    response={"type": "object", "required": ["version"], "properties": {"version": {"type": "string"}}},
)
OLLAMA_SHOW = Operation(
    id="ollamaShow",
    tag=_TAG,
    summary="Describe a model",
    request=models.OllamaShowRequest,
    example=_MODEL,
    response=models.OllamaShowResponse,
    errors=_ERRORS,
)
OLLAMA_PULL = Operation(
    id="ollamaPull",
    tag=_TAG,
    summary="Download a model, and serve it",
    description="Unless `stream` is false, the response is a stream of lines of JSON. The download is canceled when its"
    " client disconnects, and the next one continues it.",
    request=pull.OllamaPullRequest,
    example={"model": "hf.co/Qwen/Qwen3-0.6B-GGUF:Q8_0"},
    response=manage.OllamaProgress,
    chunks=(manage.OllamaProgress,),
    lines=True,
    errors=(*_ERRORS, 424),
)
OLLAMA_CREATE = Operation(
    id="ollamaCreate",
    tag=_TAG,
    summary="Make a model of another one",
    description="The new model has the files of the other one, and shares its workers.",
    request=manage.OllamaCreateRequest,
    example={"model": "botanist", "from": "SmolLM2-135M-Instruct", "system": "You are a botanist."},
    response=manage.OllamaProgress,
    chunks=(manage.OllamaProgress,),
    lines=True,
    errors=_ERRORS,
)
OLLAMA_COPY = Operation(
    id="ollamaCopy",
    tag=_TAG,
    summary="Give a model another name",
    request=manage.OllamaCopyRequest,
    example={"source": "botanist", "destination": "botanist-2"},
    response=_EMPTY,
    media_type="",
    errors=_ERRORS,
)
OLLAMA_DELETE = Operation(
    id="ollamaDelete",
    tag=_TAG,
    summary="Remove a model that was created, copied or pulled",
    request=manage.OllamaDeleteRequest,
    example={"model": "botanist"},
    response=_EMPTY,
    media_type="",
    errors=_ERRORS,
)
OLLAMA_PUSH = Operation(
    id="ollamaPush",
    tag=_TAG,
    summary="Refused: models cannot be pushed",
    response=_EMPTY,
    media_type="",
    errors=(400, 500),
)
OLLAMA_CREATE_BLOB = replace(
    OLLAMA_PUSH, id="ollamaCreateBlob", summary="Refused: files cannot be uploaded", parameters=_DIGEST
)
OLLAMA_FIND_BLOB = replace(
    OLLAMA_CREATE_BLOB, id="ollamaFindBlob", summary="Always 404: there are no blobs", errors=(404,)
)
