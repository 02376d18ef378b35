"""The wire format of `/v1/responses`.

`prepare` and `compact` are the entry points of the endpoints. `request` and `schemas` declare the bodies; `input`,
`content_parts`, `message_builder` and `prompt_builder` turn input items into a prompt; `tool_definitions` reads tools
of all types, and `tools` selects those that the model is offered; `tool_names`, `custom_input`, `lark_to_regex` and
`text` help with tools and the text format. `writer` and `item_builders` write the output in the types of `items`,
`stream` and `response_object`. `mcp` has tools that the server calls itself. Storage of responses is not part of this
package.
"""

from syringa.api.responses.compact import Compaction, CompactionWriter, prepare_compaction
from syringa.api.responses.context import Cipher, Item, PreparedResponse, ResponseContext
from syringa.api.responses.prepare import PreparedCount, prepare_count, prepare_response, referenced_item_ids
from syringa.api.responses.request import CompactRequest, InputTokensRequest, ResponseRequest
from syringa.api.responses.response_object import Response
from syringa.api.responses.stream import StreamEvent, error_event, event_type_for_mode
from syringa.api.responses.writer import ResponseWriter

__all__ = [
    "Cipher",
    "CompactRequest",
    "Compaction",
    "CompactionWriter",
    "InputTokensRequest",
    "Item",
    "PreparedCount",
    "PreparedResponse",
    "Response",
    "ResponseContext",
    "ResponseRequest",
    "ResponseWriter",
    "StreamEvent",
    "error_event",
    "event_type_for_mode",
    "prepare_compaction",
    "prepare_count",
    "prepare_response",
    "referenced_item_ids",
]
