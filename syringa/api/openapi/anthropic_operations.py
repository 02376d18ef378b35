"""Descriptions of the endpoints of Anthropic's API for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from syringa.api.anthropic import message
from syringa.api.anthropic.request import CountTokensRequest, MessageRequest
from syringa.api.openapi.operations import POST_ERRORS, Operation, query_parameter

_BETA = {"beta": query_parameter("Accepted, and without effect.", type="string")}
_EXAMPLE: dict[str, Any] = {"messages": [{"role": "user", "content": "Which shrub is in bloom?"}]}

CREATE_MESSAGE = Operation(
    id="createMessage",
    tag="Messages",
    summary="Create a message",
    description="Generates the next message of a conversation, in the format of Anthropic's API. With `stream`, the"
    " response is a stream of named server-sent events (`event: …`); an error during generation is an event `error`.",
    request=MessageRequest,
    example=_EXAMPLE | {"max_tokens": 64},
    response=message.AssistantMessage,
    chunks=message.EVENTS,
    done=False,
    query=_BETA,
    errors=(*POST_ERRORS, 503),
)

COUNT_MESSAGE_TOKENS = Operation(
    id="countMessageTokens",
    tag="Messages",
    summary="Count the tokens of a message request",
    request=CountTokensRequest,
    example=_EXAMPLE,
    response=message.TokenCountBody,
    query=_BETA,
    errors=(*POST_ERRORS, 503),
)
