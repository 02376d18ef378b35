"""Descriptions of the Responses and Conversations endpoints for the OpenAPI document."""

from __future__ import annotations

import msgspec

from syringa.api import conversations, responses
from syringa.api.openapi.operations import POST_ERRORS, Operation, query_parameter
from syringa.api.responses import listing, stream
from syringa.api.responses.schemas import EMPTY_INCLUDES, HONORED_INCLUDES

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
    stream.McpArgumentsDoneEvent,
    stream.ItemStateEvent,
)
_STORE_ERRORS = (500, 503)
_POST_ERRORS = (*POST_ERRORS, 503)
_RESPONSE = {"response_id": "The id of a stored response."}
_CONVERSATION = {"conversation_id": "The id of a conversation."}
_ITEM = _CONVERSATION | {"item_id": "The id of an item."}

_INCLUDE = {
    "include": query_parameter(
        "Validated only: a stored object is returned with all that was stored.",
        type="array",
        items={"enum": [*HONORED_INCLUDES, *EMPTY_INCLUDES]},
    )
}
_LIST = {
    "limit": query_parameter("The maximum number of items.", type="integer", minimum=1, maximum=100, default=20),
    "order": query_parameter("`asc`: oldest first; `desc`: newest first.", enum=["asc", "desc"], default="desc"),
    "after": query_parameter("Return items after the one with this id.", type="string"),
    "before": query_parameter("Return items before the one with this id.", type="string"),
}
_PAGE = _LIST | _INCLUDE
_STATUS = "|".join(listing.STATUSES)
_STREAM = {
    "stream": query_parameter("Stream the events of a background response.", type="boolean", default=False),
    "starting_after": query_parameter(
        "The sequence number of the last event received.", type="integer", minimum=0, maximum=2**63 - 1
    ),
    "include_obfuscation": query_parameter("Not supported: `true` is rejected.", enum=[False], default=False),
    **_INCLUDE,
}

CREATE_RESPONSE = Operation(
    id="createResponse",
    tag="Responses",
    summary="Create a response",
    description="Generates a response to `input` and the history it continues. With `stream`, the response is a"
    " stream of named server-sent events (`event: …`); an error during generation is a `response.failed` event. The"
    " same path accepts a WebSocket, on which the client sends `response.create`.",
    request=responses.ResponseRequest,
    example={"input": "Which shrub is in bloom?", "max_output_tokens": 64},
    response=responses.Response,
    chunks=EVENTS,
    done=False,
    errors=(*_POST_ERRORS, 424),
)

COUNT_INPUT_TOKENS = Operation(
    id="countInputTokens",
    tag="Responses",
    summary="Count the tokens of an input",
    request=responses.InputTokensRequest,
    example={"input": "Which shrub is in bloom?"},
    response={
        "type": "object",
        "required": ["object", "input_tokens"],
        "properties": {"object": {"const": "response.input_tokens"}, "input_tokens": {"type": "integer"}},
    },
    errors=(*_POST_ERRORS, 424),
)

COMPACT_RESPONSE = Operation(
    id="compactResponse",
    tag="Responses",
    summary="Compact a conversation",
    request=responses.CompactRequest,
    example={"input": [{"role": "user", "content": "Which shrub is in bloom?"}]},
    response=responses.Compaction,
    errors=_POST_ERRORS,
)

LIST_RESPONSES = Operation(
    id="listResponses",
    tag="Responses",
    summary="List the stored responses",
    description="Those of your organization, without their items.",
    response=listing.ResponseList,
    query={
        **_LIST,
        "model": query_parameter("Only responses of this model.", type="string"),
        "status": query_parameter(
            "Only responses with this status, or with one of several, separated by commas.",
            type="string",
            pattern=f"^({_STATUS})(,({_STATUS}))*$",
        ),
        "conversation": query_parameter("Only responses of this conversation.", type="string"),
        "previous_response_id": query_parameter("Only responses that continue this one.", type="string"),
        "background": query_parameter("Only background responses, or only others.", type="boolean"),
    },
    errors=(400, 404, *_STORE_ERRORS),
)

GET_RESPONSE = Operation(
    id="getResponse",
    tag="Responses",
    summary="Retrieve a response",
    response=responses.Response,
    chunks=EVENTS,
    done=False,
    parameters=_RESPONSE,
    query=_STREAM,
    errors=(400, 404, *_STORE_ERRORS),
)

DELETE_RESPONSE = Operation(
    id="deleteResponse",
    tag="Responses",
    summary="Delete a response",
    response={
        "type": "object",
        "required": ["id", "object", "deleted"],
        "properties": {"id": {"type": "string"}, "object": {"const": "response"}, "deleted": {"const": True}},
    },
    parameters=_RESPONSE,
    errors=(404, *_STORE_ERRORS),
)

CANCEL_RESPONSE = Operation(
    id="cancelResponse",
    tag="Responses",
    summary="Cancel a background response",
    response=responses.Response,
    parameters=_RESPONSE,
    errors=(400, 404, *_STORE_ERRORS),
)

LIST_INPUT_ITEMS = Operation(
    id="listInputItems",
    tag="Responses",
    summary="List the input items of a response",
    response=conversations.ItemList,
    parameters=_RESPONSE,
    query=_PAGE,
    errors=(400, 404, *_STORE_ERRORS),
)

CREATE_CONVERSATION = Operation(
    id="createConversation",
    tag="Conversations",
    summary="Create a conversation",
    request=conversations.CreateConversationRequest,
    example={"items": [{"role": "user", "content": "Which shrub is in bloom?"}]},
    response=conversations.ConversationObject,
    errors=_POST_ERRORS,
)

LIST_CONVERSATIONS = Operation(
    id="listConversations",
    tag="Conversations",
    summary="List the conversations",
    description="Those of your organization.",
    response=listing.ConversationList,
    query=_LIST,
    errors=(400, 404, *_STORE_ERRORS),
)

GET_CONVERSATION = Operation(
    id="getConversation",
    tag="Conversations",
    summary="Retrieve a conversation",
    response=conversations.ConversationObject,
    parameters=_CONVERSATION,
    errors=(404, *_STORE_ERRORS),
)

UPDATE_CONVERSATION = Operation(
    id="updateConversation",
    tag="Conversations",
    summary="Update the metadata of a conversation",
    request=conversations.UpdateConversationRequest,
    example={"metadata": {"topic": "shrubs"}},
    response=conversations.ConversationObject,
    parameters=_CONVERSATION,
    errors=_POST_ERRORS,
)

DELETE_CONVERSATION = Operation(
    id="deleteConversation",
    tag="Conversations",
    summary="Delete a conversation",
    description="Deletes its items too. Responses created in it are kept.",
    response=conversations.DeletedConversation,
    parameters=_CONVERSATION,
    errors=(404, *_STORE_ERRORS),
)

LIST_CONVERSATION_ITEMS = Operation(
    id="listConversationItems",
    tag="Conversations",
    summary="List the items of a conversation",
    response=conversations.ItemList,
    parameters=_CONVERSATION,
    query=_PAGE,
    errors=(400, 404, *_STORE_ERRORS),
)

CREATE_CONVERSATION_ITEMS = Operation(
    id="createConversationItems",
    tag="Conversations",
    summary="Add items to a conversation",
    request=conversations.CreateItemsRequest,
    example={"items": [{"role": "user", "content": "And which tree?"}]},
    response=conversations.ItemList,
    parameters=_CONVERSATION,
    query=_INCLUDE,
    errors=_POST_ERRORS,
)

GET_CONVERSATION_ITEM = Operation(
    id="getConversationItem",
    tag="Conversations",
    summary="Retrieve an item of a conversation",
    response={"type": "object", "required": ["id", "type"]},
    parameters=_ITEM,
    query=_INCLUDE,
    errors=(400, 404, *_STORE_ERRORS),
)

DELETE_CONVERSATION_ITEM = Operation(
    id="deleteConversationItem",
    tag="Conversations",
    summary="Delete an item of a conversation",
    response=conversations.ConversationObject,
    parameters=_ITEM,
    errors=(404, *_STORE_ERRORS),
)
