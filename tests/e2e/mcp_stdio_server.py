"""A Model Context Protocol server on standard input and output, with one tool; started by the client under test."""

from __future__ import annotations

import json
import sys
from typing import Any

TOOL = {
    "name": "lookup",
    "description": "Look up the word of a number.",
    "annotations": {"readOnlyHint": True},
    "inputSchema": {
        "type": "object",
        "properties": {"number": {"type": "integer"}},
        "required": ["number"],
        "additionalProperties": False,
    },
}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    match method:
        case "initialize":
            server = {"name": "words", "version": "1"}
            return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": server}
        case "tools/list":
            return {"tools": [TOOL]}
        case "tools/call":
            return {"content": [{"type": "text", "text": f"word-{params['arguments']['number']}"}]}
    raise ValueError(method)


for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    reply = {"jsonrpc": "2.0", "id": message["id"]}
    try:
        reply["result"] = answer(message["method"], message.get("params", {}))
    except ValueError as error:
        reply["error"] = {"code": -32601, "message": f"unknown method {error}"}
    print(json.dumps(reply), flush=True)
