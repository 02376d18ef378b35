"""The endpoints of responses and conversations, as they are published."""

from __future__ import annotations

from typing import Any

import msgspec

from syringa.api import conversations, responses
from syringa.api.openapi.operations import POST_ERRORS, Operation, in_query
from syringa.api.responses import stream
from syringa.api.responses.schemas import EMPTY_INCLUDES, HONOURED_INCLUDES

EVENTS: tuple[type[msgspec.Struct], ...] = (
    stream.ResponseEvent,
    stream.ItemEvent,
    stream.PartEvent,
    stream.TextDeltaEvent,
    stream.TextDoneEvent,
    stream.ReasoningDeltaEvent,
    stream.ReasoningDoneEvent,
    stream.CallDeltaEvent,
    stream.ArgumentsDoneEvent,
    stream.InputDoneEvent,
)
_STORED = (500, 503)
_ERRORS = (*POST_ERRORS, 503)
_RESPONSE = {"response_id": "The id of a stored response."}
_CONVERSATION = {"conversation_id": "The id of a conversation."}
_ITEM = _CONVERSATION | {"item_id": "The id of an item."}


_INCLUDE = {
    "include": in_query(
        "What a stored object has, it shows; this is checked alone.",
        type="array",
        items={"enum": [*HONOURED_INCLUDES, *EMPTY_INCLUDES]},
    )
}
_PAGE = {
    "limit": in_query("Items at most.", type="integer", minimum=1, maximum=100, default=20),
    "order": in_query("Oldest first, or newest first.", enum=["asc", "desc"], default="desc"),
    "after": in_query("The id of the item before the page.", type="string"),
    "before": in_query("The id of the item after the page.", type="string"),
    **_INCLUDE,
}
_STREAM = {
    "stream": in_query("Follow a background response in server-sent events.", type="boolean", default=False),
    "starting_after": in_query(
        "The number of the last event that was received.", type="integer", minimum=0, maximum=2**63 - 1
    ),
    "include_obfuscation": in_query("Refused where true.", enum=[False], default=False),
    **_INCLUDE,
}


def _conversations(**kwargs: Any) -> Operation:
    path = "/v1/conversations" + kwargs.pop("below")
    return Operation(path=path, tag="Conversations", **kwargs)


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        path="/v1/responses",
        id="createResponse",
        tag="Responses",
        summary="Create a response",
        method="post",
        description="Answers `input`, with what it goes on from. With `stream`, as server-sent events, each under its"
        " name (`event: …`); an error in the middle is a `response.failed`. The same path takes a WebSocket, on which"
        " the client sends `response.create`.",
        request=responses.ResponseRequest,
        example={"input": "Which shrub is in bloom?", "max_output_tokens": 64},
        answer=responses.Response,
        chunks=EVENTS,
        done=False,
        errors=_ERRORS,
    ),
    Operation(
        path="/v1/responses/input_tokens",
        id="countInputTokens",
        tag="Responses",
        summary="Count the tokens of an input",
        method="post",
        request=responses.InputTokensRequest,
        example={"input": "Which shrub is in bloom?"},
        answer={
            "type": "object",
            "required": ["object", "input_tokens"],
            "properties": {"object": {"const": "response.input_tokens"}, "input_tokens": {"type": "integer"}},
        },
        errors=_ERRORS,
    ),
    Operation(
        path="/v1/responses/compact",
        id="compactResponse",
        tag="Responses",
        summary="Make a conversation short",
        method="post",
        request=responses.CompactRequest,
        example={"input": [{"role": "user", "content": "Which shrub is in bloom?"}]},
        answer=responses.Compaction,
        errors=_ERRORS,
    ),
    Operation(
        path="/v1/responses/{response_id}",
        id="getResponse",
        tag="Responses",
        summary="Fetch a response",
        answer=responses.Response,
        chunks=EVENTS,
        done=False,
        parameters=_RESPONSE,
        query=_STREAM,
        errors=(400, 404, *_STORED),
    ),
    Operation(
        path="/v1/responses/{response_id}",
        id="deleteResponse",
        tag="Responses",
        summary="Delete a response",
        method="delete",
        answer={
            "type": "object",
            "required": ["id", "object", "deleted"],
            "properties": {"id": {"type": "string"}, "object": {"const": "response"}, "deleted": {"const": True}},
        },
        parameters=_RESPONSE,
        errors=(404, *_STORED),
    ),
    Operation(
        path="/v1/responses/{response_id}/cancel",
        id="cancelResponse",
        tag="Responses",
        summary="Cancel a background response",
        method="post",
        answer=responses.Response,
        parameters=_RESPONSE,
        errors=(400, 404, *_STORED),
    ),
    Operation(
        path="/v1/responses/{response_id}/input_items",
        id="listInputItems",
        tag="Responses",
        summary="List the input of a response",
        answer=conversations.ItemList,
        parameters=_RESPONSE,
        query=_PAGE,
        errors=(400, 404, *_STORED),
    ),
    _conversations(
        below="",
        id="createConversation",
        summary="Create a conversation",
        method="post",
        request=conversations.CreateConversationRequest,
        example={"items": [{"role": "user", "content": "Which shrub is in bloom?"}]},
        answer=conversations.ConversationObject,
        errors=_ERRORS,
    ),
    _conversations(
        below="/{conversation_id}",
        id="getConversation",
        summary="Fetch a conversation",
        answer=conversations.ConversationObject,
        parameters=_CONVERSATION,
        errors=(404, *_STORED),
    ),
    _conversations(
        below="/{conversation_id}",
        id="updateConversation",
        summary="Change a conversation's metadata",
        method="post",
        request=conversations.UpdateConversationRequest,
        example={"metadata": {"topic": "shrubs"}},
        answer=conversations.ConversationObject,
        parameters=_CONVERSATION,
        errors=_ERRORS,
    ),
    _conversations(
        below="/{conversation_id}",
        id="deleteConversation",
        summary="Delete a conversation",
        method="delete",
        description="Its items go with it; the responses that ran in it stay.",
        answer=conversations.DeletedConversation,
        parameters=_CONVERSATION,
        errors=(404, *_STORED),
    ),
    _conversations(
        below="/{conversation_id}/items",
        id="listConversationItems",
        summary="List the items of a conversation",
        answer=conversations.ItemList,
        parameters=_CONVERSATION,
        query=_PAGE,
        errors=(400, 404, *_STORED),
    ),
    _conversations(
        below="/{conversation_id}/items",
        id="createConversationItems",
        summary="Add items to a conversation",
        method="post",
        request=conversations.CreateItemsRequest,
        example={"items": [{"role": "user", "content": "And which tree?"}]},
        answer=conversations.ItemList,
        parameters=_CONVERSATION,
        query=_INCLUDE,
        errors=_ERRORS,
    ),
    _conversations(
        below="/{conversation_id}/items/{item_id}",
        id="getConversationItem",
        summary="Fetch an item of a conversation",
        answer={"type": "object", "required": ["id", "type"]},
        parameters=_ITEM,
        query=_INCLUDE,
        errors=(400, 404, *_STORED),
    ),
    _conversations(
        below="/{conversation_id}/items/{item_id}",
        id="deleteConversationItem",
        summary="Delete an item of a conversation",
        method="delete",
        answer=conversations.ConversationObject,
        parameters=_ITEM,
        errors=(404, *_STORED),
    ),
)
