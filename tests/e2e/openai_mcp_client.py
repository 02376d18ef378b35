"""MCP servers with the official package, in whose environment it runs: calls, streams and approvals.

MCP_URL=… python openai_mcp_client.py URL KEY MODEL
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from client_checks import run_checks
from openai import OpenAI

URL, KEY, MODEL = sys.argv[1:]
client = OpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0, timeout=300)
# A call returns one of many types, and the checks assert which.
responses: Any = client.responses

REQUEST: dict[str, Any] = {
    "model": MODEL,
    "input": "Roll a die with six sides.",
    "tool_choice": {"type": "mcp", "server_label": "dice", "name": "roll"},
    "max_output_tokens": 96,
    "max_tool_calls": 1,
    "temperature": 0,
}


def tool(approval: str) -> dict[str, Any]:
    return {
        "type": "mcp",
        "server_label": "dice",
        "server_url": os.environ["MCP_URL"],
        "allowed_tools": ["roll"],
        "require_approval": approval,
    }


def types(items: Any) -> list[str]:
    return [item.type for item in items]


def check_call() -> None:
    response = responses.create(**REQUEST, tools=[tool("never")])
    assert types(response.output) == ["mcp_list_tools", "mcp_call", "message"], response
    listed, call, _ = response.output
    assert [each.name for each in listed.tools] == ["roll", "fail", "hang", "much"]
    sides = json.loads(call.arguments)["sides"]
    assert (call.name, call.server_label, call.output) == ("roll", "dice", f"rolled {sides}")
    assert response.output_text
    again = responses.retrieve(response.id)
    assert again.output == response.output


def check_stream() -> None:
    with responses.stream(**REQUEST, tools=[tool("never")]) as stream:
        seen = [event.type for event in stream]
        response = stream.get_final_response()
    for name in ("mcp_list_tools.completed", "mcp_call.in_progress", "mcp_call_arguments.done", "mcp_call.completed"):
        assert seen.count(f"response.{name}") == 1, seen
    assert types(response.output) == ["mcp_list_tools", "mcp_call", "message"], response


def check_approval() -> None:
    asked = responses.create(**REQUEST, tools=[tool("always")])
    assert types(asked.output) == ["mcp_list_tools", "mcp_approval_request"], asked
    approval = {
        "type": "mcp_approval_response",
        "approval_request_id": asked.output[-1].id,
        "approve": True,
    }
    body = REQUEST | {"input": [approval], "tool_choice": "auto"}
    done = responses.create(**body, tools=[tool("always")], previous_response_id=asked.id)
    assert types(done.output) == ["mcp_call", "message"], done
    assert done.output[0].approval_request_id == asked.output[-1].id
    assert done.output[0].output.startswith("rolled ")


if __name__ == "__main__":
    run_checks(globals())
