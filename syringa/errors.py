"""The exception tree of Syringa.

    SyringaError
    ├── RequestError                 the request is wrong; has a status, a type, a code and a param
    │   ├── InvalidRequest           400
    │   │   └── ContextLengthExceeded
    │   ├── Unauthorized             401
    │   ├── Forbidden                403
    │   ├── NotFound                 404
    │   ├── PayloadTooLarge          413
    │   ├── UnsupportedMediaType     415
    │   ├── FailedDependency         424: an MCP server that the request names has failed
    │   └── RateLimited              429, with Retry-After
    ├── EngineError                  500, internal error
    │   ├── RequestSuspected         500: the request crashed workers and is not run again
    │   ├── EngineUnavailable        503, with Retry-After: the worker died or is loading
    │   │   └── WorkerLost
    │   └── EngineOverloaded         503, with Retry-After: the queue is full
    │       └── EngineOverdue        the request has waited in it for `queue_timeout`
    ├── StoreError                   500, internal error
    │   └── StoreUnavailable         503, with Retry-After: the database is unreachable, full, locked or read-only
    │       └── StoreOutcomeUnknown  503: a transaction without an answer, which may take effect all the same
    └── StartupError                 a command cannot start; one line with the remedy
        ├── ModelError               model files are missing, corrupt or unsupported
        └── ConfigError              an option is missing or invalid

Errors are raised, never returned. The HTTP layer renders them from the attributes of the class.
"""

from __future__ import annotations

OUT_OF_MEMORY_CODE = "out_of_memory"  # of an `EngineOverloaded`: too little memory for the request, even alone


class SyringaError(Exception):
    """The root of the tree. `message` is shown to the client or operator."""

    status = 500
    type = "server_error"
    code: str | None = None
    retry_after: float | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class RequestError(SyringaError):
    status = 400
    type = "invalid_request_error"


class InvalidRequest(RequestError):
    pass


class ContextLengthExceeded(InvalidRequest):
    """Clients recognize it by the words of its message: "This model's maximum context length is N tokens"."""

    code = "context_length_exceeded"


class Unauthorized(RequestError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(RequestError):
    status = 403
    type = "permission_error"


class NotFound(RequestError):
    status = 404
    type = "not_found_error"


class PayloadTooLarge(RequestError):
    status = 413


class UnsupportedMediaType(RequestError):
    status = 415


class FailedDependency(RequestError):
    status = 424
    type = "external_connector_error"


class RateLimited(RequestError):
    """A rate limit was exceeded. `headers` are the rate limit headers of the response."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(
        self,
        message: str,
        *,
        retry_after: float = 1.0,
        headers: list[tuple[bytes, bytes]] | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after
        self.headers = headers or []


class EngineError(SyringaError):
    code = "engine_error"


class RequestSuspected(EngineError):
    code = "request_suspected"


class EngineUnavailable(EngineError):
    status = 503
    code = "engine_unavailable"
    retry_after = 2.0


class WorkerLost(EngineUnavailable):
    """The connection to a worker was lost."""


class EngineOverloaded(EngineError):
    status = 503
    type = "overloaded_error"
    code = "engine_overloaded"
    retry_after = 1.0


class EngineOverdue(EngineOverloaded):
    """A request waited for `queue_timeout` and was not begun."""

    def __init__(self, waited: float) -> None:
        super().__init__(f"The request waited {waited:.1f} s in the queue and was not begun: try again later.")
        self.waited = waited


class StoreError(SyringaError):
    code = "store_error"


class StoreUnavailable(StoreError):
    status = 503
    code = "store_unavailable"
    retry_after = 2.0


class StoreOutcomeUnknown(StoreUnavailable):
    """A transaction has no answer. It may take effect all the same."""


class StartupError(SyringaError):
    pass


class ModelError(StartupError):
    pass


class ConfigError(StartupError):
    pass
