"""Generated requests, valid and invalid, against the OpenAPI document of the server.

No request may cause a 5xx; errors have the envelope; responses fit their schema; and what the schema forbids is
rejected. The requests are deterministic, so a failure is reproducible.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from typing import Any

import hypothesis
import jsonschema
import msgspec
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from syringa.api.error_formats import ERROR_BODIES
from syringa.api.fields.constraint_fields import ConstraintFields
from syringa.api.models.served_model import FixedModels
from syringa.api.openapi.document import request_fields
from syringa.config import Config
from syringa.engine.interface import SingleEngineProvider
from syringa.http.app import create_app
from syringa.http.endpoints import PUBLISHED
from syringa.service.app_state import AppState
from tests.chat_models import plain_model
from tests.client import events
from tests.embedding_models import embedding_model
from tests.fake_engine import FakeEngine
from tests.http.anthropic_client import parse_stream
from tests.http.responses_client import stream_events
from tests.tiers import examples

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
    negative_data_rejection,
]
# Rejected by rules that a schema cannot express: between fields, the model's vocabulary, a grammar that does not
# compile, a result without its call, an image for a text model, an id that is not stored.
BEYOND_SCHEMA = (
    *("best_of", "min_tokens", "max_tokens", "stream_options", "grammar", "response_format", "tools", "tool_choice"),
    *("json_schema", "structured_outputs", "guided_", "n_predict"),
    *("suffix", "prompt", "tokens", "stop_token_ids", "logit_bias", "messages", "max_completion_tokens"),
    *("top_logprobs", "continue_final_message", "chat_template", "reasoning_effort"),
    *("allowed_token_ids", "logprob_token_ids", "truncate_prompt_tokens", "use_beam_search", "prompt_logprobs"),
    *("input", "items", "previous_response_id", "conversation", "text", "background", "max_output_tokens"),
    *("starting_after", "stream", "after", "before", "status"),  # a pattern's end allows a line break
    *("expires_at", "organization", "name", "models", "since", "until", "range", "step"),
    *("input_file_id", "completion_window", "expires_after"),  # an object is text in a form
    *("documents", "query", "queries", "dimensions", "prompt_name", "normalize"),
)
# Errors of `/v1/messages` begin with the path of the field.
BEYOND_MESSAGES = ("n:", "output_config.format.schema", "output_format", "prompt is too long", "The model", "the chat")
ERROR_FORMATS = {each.path: each.error_format for each in PUBLISHED}
FIELDS = {
    each.path: {
        name: jsonschema.Draft202012Validator(schema) for name, schema in request_fields(each.operation.request).items()
    }
    for each in PUBLISHED
    if each.operation.request is not None
}
EMBEDDING_PATHS = {each.path for each in PUBLISHED if each.operation.tag == "Embeddings"}
PUBLIC_PATHS = {each.path for each in PUBLISHED if each.public}
_ASKED = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
ENDS = ("response.completed", "response.incomplete", "response.failed")
KEY = {"authorization": "Bearer secret", "x-api-key": "secret"}  # both, so that none is made up


def state_with_admin_key() -> AppState:
    """Return a state whose only key is an administrator's and has no rate limits."""
    folder = tempfile.mkdtemp(prefix="syringa-test-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    app_state = AppState(Config(api_key=("secret",), database=f"{folder}/syringa.db", requests_per_minute=0))
    authenticate = app_state.keys.authenticate
    app_state.keys.authenticate = lambda header: msgspec.structs.replace(authenticate(header), admin=True)  # type: ignore[method-assign]
    return app_state


app = create_app(
    Config(api_key=("secret",)),
    SingleEngineProvider(FakeEngine("hi", at_once=8)),
    FixedModels([plain_model(), embedding_model()]),
    state_with_admin_key(),
)
schema = schemathesis.openapi.from_asgi("/openapi.json", app)
schema.config.max_stream_events = 100_000  # the default would stop reading before the end
bounded = hypothesis.settings(
    max_examples=examples(20),
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@schema.parametrize()
@bounded
def test_every_request_conforms_to_the_document(case: schemathesis.Case) -> None:
    if isinstance(case.body, dict) and case.operation.path in FIELDS:
        reconcile(case.body, FIELDS[case.operation.path], "tiny" if case.operation.path in EMBEDDING_PATHS else "fake")
    response = case.call(headers=KEY)
    # A form cannot express an empty object: its field is missing, which is valid.
    is_form = (case.method, case.operation.path) == ("POST", "/v1/files")
    checks = [each for each in CHECKS if each is not negative_data_rejection] if is_form else CHECKS
    case.validate_response(response, checks=checks)
    content = response.content or b""
    if response.status_code >= 400:
        if case.method != "HEAD":
            assert_envelope(json.loads(content), case)
    elif "application/x-ndjson" in "".join(response.headers.get("content-type", [])):
        last = json.loads(content.splitlines()[-1])
        assert last.get("done") or last.keys() == {"error"}
    elif "text/event-stream" in "".join(response.headers.get("content-type", [])):
        if case.operation.path == "/v1/responses":
            assert stream_events(content.decode())[-1]["type"] in ENDS
        elif case.operation.path == "/v1/messages":
            assert parse_stream(content.decode())[-1]["type"] in ("message_stop", "error")
        else:
            assert events(content.decode())[-1] == "[DONE]"


@schema.parametrize()
@hypothesis.settings(bounded, max_examples=3)
def test_every_operation_requires_a_key_unless_public(case: schemathesis.Case) -> None:
    response = case.call(headers={"authorization": "Bearer other"})
    public = case.operation.path in PUBLIC_PATHS
    assert response.status_code in ((200, 400, 404, 405) if public else (401, 405))
    assert public or case.method != case.operation.method.upper() or response.status_code == 401


def reconcile(body: dict[str, Any], known: dict[str, Any], model: str) -> None:
    """Adapt a body to the rules that a schema cannot express, so that it is not rejected by the first of them.

    Only valid fields are changed: an invalid body remains invalid for the reason that it was generated for.
    """
    good = {name for name, value in body.items() if name in known and known[name].is_valid(value)}
    if "model" in good:
        body["model"] = model
    if {"stream", "stream_options"} <= good or ("stream_options" in good and "stream" not in body):
        body["stream"] = True
    if "top_logprobs" in good and ("logprobs" in good or "logprobs" not in body):
        body["logprobs"] = True
    limits = {
        "max_tokens": (1, 64),
        "max_completion_tokens": (1, 64),
        "min_tokens": (0, 1),
        "n": (1, 4),
        "best_of": (4, 4),
    }
    for name, (low, high) in limits.items():
        if name in good and body[name] is not None:
            body[name] = min(max(int(body[name]), low), high)
    unfit = {"best_of"} if body.get("stream") else set()
    # Generated grammars and token ids are rarely valid: they are left to the shorter bodies.
    if len(body) > 3:
        unfit |= {"tools", "tool_choice", "stop_token_ids", "logit_bias"}
        unfit |= {
            "chat_template",
            "chat_template_kwargs",
            "continue_final_message",
            *ConstraintFields.__struct_fields__,
        }
        unfit |= set() if isinstance(body.get("prompt"), str) else {"prompt"}
        if "messages" in good and body["messages"]:
            body["messages"] = [each for each in body["messages"] if each["role"] == "system"][:2] + _ASKED
    elif not body.get("tools"):
        unfit.add("tool_choice")
    for name in unfit & good:
        del body[name]


def is_positive(case: schemathesis.Case) -> bool:
    return case.meta is not None and case.meta.generation.mode.is_positive


def assert_envelope(body: dict[str, Any], case: schemathesis.Case) -> None:
    format = ERROR_FORMATS[case.operation.path]
    if format != "openai":
        found: Any = msgspec.convert(body, ERROR_BODIES[format])
        message = found.error
        if isinstance(message, msgspec.Struct):
            message = message.message
        assert message
        if format == "anthropic" and is_positive(case):
            assert message.startswith((*BEYOND_SCHEMA, *BEYOND_MESSAGES)), f"the schema allows it: {message}"
        return
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if is_positive(case) and error["param"] not in (None, "model"):
        assert error["param"].startswith(BEYOND_SCHEMA), f"the schema allows it, the server does not: {error}"
