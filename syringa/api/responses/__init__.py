"""The wire layer of `/v1/responses`.

`request` and `schemas` say what a body may hold; `input`, `parts` and `turns` lower its items to the messages of a
chat, `tools` and `text` its tools and formats, and `lowering` renders them; `prepare`, `count` and `compact` are the
endpoints. `writer` writes what the model answers: `growth` knows the items while they grow, `items`, `object` and
`stream` are the shapes on the wire, and `modes` knows where two dialects of them differ. What is stored, and where, is
none of this package's business.
"""

from syringa.api.responses.compact import Compaction, CompactionWriter, prepare_compaction
from syringa.api.responses.context import Context, Item, ResponseCall, Seal
from syringa.api.responses.count import count_input
from syringa.api.responses.modes import error_event, in_mode
from syringa.api.responses.prepare import prepare, referenced
from syringa.api.responses.request import CompactRequest, InputTokensRequest, ResponseRequest
from syringa.api.responses.response_object import Response
from syringa.api.responses.stream import StreamEvent
from syringa.api.responses.writer import ResponseWriter

__all__ = [
    "CompactRequest",
    "Compaction",
    "CompactionWriter",
    "Context",
    "InputTokensRequest",
    "Item",
    "Response",
    "ResponseCall",
    "ResponseRequest",
    "ResponseWriter",
    "Seal",
    "StreamEvent",
    "count_input",
    "error_event",
    "in_mode",
    "prepare",
    "prepare_compaction",
    "referenced",
]
