"""Error bodies in the formats of the APIs that the server speaks. An endpoint names the one of its API."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from syringa.api.fields.common import ErrorBody, ErrorEnvelope
from syringa.api.fields.schema import doc
from syringa.errors import ContextLengthExceeded, SyringaError

ErrorFormat = Literal["openai", "anthropic", "ollama"]

# Anthropic's types by status; other statuses of the server are `api_error`, other refusals `invalid_request_error`.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


# Words by which clients of Anthropic's API recognize that they have to compact the conversation.
PROMPT_TOO_LONG = "prompt is too long"


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicErrorEnvelope(msgspec.Struct):
    """The error body of Anthropic's API."""

    type: Annotated[str, doc("`error`.", const="error")]
    error: AnthropicErrorDetail
    request_id: str


class OllamaErrorBody(msgspec.Struct):
    """The error body of Ollama's API."""

    error: Annotated[str, doc("What was wrong.")]


ERROR_BODIES: dict[ErrorFormat, type[msgspec.Struct]] = {
    "openai": ErrorEnvelope,
    "anthropic": AnthropicErrorEnvelope,
    "ollama": OllamaErrorBody,
}


def error_envelope(error: Exception) -> ErrorEnvelope:
    """Return the error body of OpenAI's API. Details of unexpected errors are logged, and not shown to clients."""
    if isinstance(error, SyringaError):
        return ErrorEnvelope(ErrorBody(error.message, error.type, error.param, error.code))
    return ErrorEnvelope(ErrorBody("An internal error occurred.", "server_error", None, "internal_error"))


def convert_error(
    envelope: ErrorEnvelope, status: int, format: ErrorFormat, request_id: str = ""
) -> ErrorEnvelope | AnthropicErrorEnvelope | OllamaErrorBody:
    """Return an error body in the format of another API."""
    if format == "openai":
        return envelope
    if format == "ollama":
        return OllamaErrorBody(envelope.error.message)
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    if envelope.error.code == "timeout":
        kind = "timeout_error"
    message, param = envelope.error.message, envelope.error.param
    if param is not None and param not in message:  # which has no field of its own here
        message = f"{param}: {message}"
    if envelope.error.code == ContextLengthExceeded.code and PROMPT_TOO_LONG not in message:
        message = f"{PROMPT_TOO_LONG}: {message}"
    return AnthropicErrorEnvelope("error", AnthropicErrorDetail(kind, message), request_id)


def error_body(
    error: Exception, format: ErrorFormat, request_id: str = ""
) -> ErrorEnvelope | AnthropicErrorEnvelope | OllamaErrorBody:
    """Return the body of an error in the format of an API."""
    status = error.status if isinstance(error, SyringaError) else 500
    return convert_error(error_envelope(error), status, format, request_id)
