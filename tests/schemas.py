"""Validation against the schemas of OpenAI and Open Responses, and reassembly of completion streams."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema

SPEC = Path(__file__).parent / "data" / "specs" / "openai-openapi-subset.json"
OPEN_SPEC = SPEC.with_name("openresponses-openapi.json")


@functools.cache
def _schemas() -> dict[str, Any]:
    """Return the schemas of the file, with corrections for values that the API returns and the file does not allow."""
    schemas = _with_null(json.loads(SPEC.read_text())["components"]["schemas"])
    completion = schemas["CreateCompletionResponse"]["properties"]
    choice = completion["choices"]["items"]["properties"]
    choice["finish_reason"] = {"enum": ["stop", "length", "content_filter", "tool_calls", None]}
    lists = choice["logprobs"]["anyOf"][0]["properties"]
    lists["token_logprobs"]["items"] = {"type": ["number", "null"]}
    lists["top_logprobs"]["items"]["type"] = ["object", "null"]
    completion["usage"] = {"anyOf": [completion["usage"], {"type": "null"}]}
    return schemas


def _with_null(schema: Any) -> Any:
    """Replace OpenAPI 3.0's `nullable`, which is not a JSON Schema keyword, by an alternative."""
    if isinstance(schema, list):
        return [_with_null(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {name: _with_null(value) for name, value in schema.items()}
    if schema.get("nullable") is True:
        del schema["nullable"]
        return {"anyOf": [schema, {"type": "null"}]}
    return schema


@functools.cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": {"schemas": _schemas()}}
    )


def validate_openai(body: dict[str, Any], name: str = "CreateCompletionResponse") -> None:
    """Validate a body against OpenAI's schema of that name."""
    _validator(name).validate(body)


@functools.cache
def _open_validator(name: str) -> jsonschema.Draft202012Validator:
    schemas = json.loads(OPEN_SPEC.read_text())["components"]["schemas"]
    events = [each for each in schemas if each.endswith("StreamingEvent")]
    # The file lists stream events only in the description of the path.
    schemas["StreamingEvent"] = {"oneOf": [{"$ref": f"#/components/schemas/{each}"} for each in events]}
    return jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}})


def validate_open_responses(body: dict[str, Any], name: str = "ResponseResource") -> None:
    """Validate a body against Open Responses' schema of that name; `StreamingEvent` is any stream event."""
    _open_validator(name).validate(body)


def reassemble(seen: list[Any]) -> dict[str, Any]:
    """Join the chunks of a completion like a client. Requires `stream_options.include_usage`."""
    assert seen.pop() == "[DONE]"
    same = ("id", "object", "created", "model", "system_fingerprint")
    whole: dict[str, Any] = {name: seen[0][name] for name in same}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in seen:
        validate_openai(chunk)
        assert {name: chunk[name] for name in same} == whole
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"index": part["index"], "text": "", "logprobs": None})
            assert choice.get("finish_reason") is None
            choice["text"] += part["text"]
            choice["finish_reason"] = part["finish_reason"]
            if part["finish_reason"] is not None:
                choice["stop_reason"] = part["stop_reason"]
            if "token_ids" in part:
                choice["token_ids"] = choice.get("token_ids", []) + part["token_ids"]
            for name in ("prompt_token_ids", "prompt_token_offsets", "prompt_logprobs"):
                if name in part:
                    assert name not in choice
                    choice[name] = part[name]
            if part["logprobs"] is not None:
                lists = choice["logprobs"] or {name: [] for name in part["logprobs"]}
                choice["logprobs"] = {name: lists[name] + part["logprobs"][name] for name in lists}
        if not chunk["choices"]:
            usage = chunk["usage"]
    return whole | {"choices": [choices[index] for index in sorted(choices)], "usage": usage}
