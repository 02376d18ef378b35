"""What happened: the outcome of every request, the faults, and which errors a fault explains."""

from __future__ import annotations

import collections
import time

import msgspec

from bench.soak.wire import Reply

GRACE_SECONDS = 15.0  # after the recovery: requests that waited for the database, or for a worker, still end
SLOWEST = 5
_SAMPLES = 200
# Errors with which the server reports a fault, and those with which it sheds load or ends what the client's own
# deadline ends. `server_error` is the code of every failed response of the Responses API.
FAULT_CODES = frozenset(
    {"engine_unavailable", "store_unavailable", "server_ending", "request_suspected", "engine_overloaded"}
)
LOAD_CODES = frozenset({"engine_overloaded", "too_many_background_responses", "too_many_connections", "timeout"})
RESPONSE_FAILED = "server_error"
INTERNAL = "An internal error occurred."


class Fault(msgspec.Struct, kw_only=True):
    kind: str
    began: float  # time.monotonic()
    ended: float = 0.0  # what was done to the server is undone; the same as `began` for a kill
    recovered: float | None = None  # None: not within the limit
    killed_ports: set[int] = set()  # ports of the clients of a killed API process
    all_connections: bool = False  # all API processes were killed
    note: str = ""

    @property
    def recovery_seconds(self) -> float | None:
        return None if self.recovered is None else max(0.0, self.recovered - self.ended)

    def explains(self, began: float, ended: float) -> bool:
        """Whether a request overlapped with the fault, or with its aftermath."""
        last = (self.recovered if self.recovered is not None else time.monotonic()) + GRACE_SECONDS
        return ended >= self.began and began <= last


class ServerFailure(msgspec.Struct, kw_only=True):
    """A 5xx, or a stream that ended with a server error."""

    began: float
    ended: float
    status: int
    code: str
    where: str  # method and path
    message: str
    request_id: str = ""


class LostConnection(msgspec.Struct, kw_only=True):
    """A response that did not come, or ended before it was complete."""

    began: float
    ended: float
    port: int
    where: str
    started: bool  # something of it had arrived
    stream: bool
    request_id: str = ""


class MeteredRequest(msgspec.Struct, frozen=True):
    """A generating request whose end the client has received. It must have exactly one usage row."""

    request_id: str
    organization: str
    status: int
    refused: bool  # equal refusals share a row, with a count


class Results:
    def __init__(self) -> None:
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.by_endpoint: collections.Counter[str] = collections.Counter()
        self.failures: list[ServerFailure] = []
        self.lost: list[LostConnection] = []
        self.refused: list[LostConnection] = []  # connections that could not be opened
        self.hanging: list[str] = []
        self.unstructured: list[str] = []  # errors without the error envelope
        self.without_terminal: list[LostConnection] = []  # complete responses that lack their last event
        self.metered: list[MeteredRequest] = []
        self.unknown: collections.Counter[str] = collections.Counter()  # per organization: may have a usage row
        self.slowest: list[tuple[float, str]] = []
        self.faults: list[Fault] = []

    def add(self, reply: Reply, where: str, request_id: str = "") -> None:
        """Record the outcome of a request that has ended. `where`: method and path."""
        self.by_endpoint[where] += 1
        match reply.failure:
            case "left":
                self.outcomes["client left"] += 1
                return
            case "hang":
                self.outcomes["hang"] += 1
                self.hanging.append(f"{where} {request_id}")
                return
            case "refused" | "lost":
                self.add_lost(self._lost(reply, where, request_id), opened=reply.failure == "lost")
                return
        self._note_time(reply.seconds, where)
        error = reply.error
        if reply.is_stream and not reply.has_terminal_event:
            self.without_terminal.append(self._lost(reply, where, request_id))
        if reply.status >= 500 or (reply.is_stream and error is not None and _is_server_error(error.code)):
            self.outcomes["server error" if reply.status >= 500 else "stream ended with an error"] += 1
            self._add_failure(reply, where, request_id)
        elif reply.status >= 400:
            self.outcomes[f"refused, {reply.status}"] += 1
        else:
            self.outcomes["ok"] += 1
        if reply.status >= 400 and error is None and "HEAD" not in where:
            self.unstructured.append(f"{where}: {reply.status} {reply.body[:100]!r}")

    def add_lost(self, lost: LostConnection, *, opened: bool) -> None:
        self.outcomes["connection lost" if opened else "connection refused"] += 1
        (self.lost if opened else self.refused).append(lost)

    def add_event_failure(self, began: float, where: str, code: str | None, message: str, status: int) -> None:
        """Record a server error that was sent over a WebSocket."""
        self.outcomes["stream ended with an error"] += 1
        failure = ServerFailure(
            began=began, ended=time.monotonic(), status=status, code=code or "none", where=where, message=message
        )
        self.failures.append(failure)

    def note_ok(self, seconds: float, where: str) -> None:
        """Record a successful response over a WebSocket."""
        self.by_endpoint[where] += 1
        self.outcomes["ok"] += 1
        self._note_time(seconds, where)

    def _add_failure(self, reply: Reply, where: str, request_id: str) -> None:
        error = reply.error
        self.failures.append(
            ServerFailure(
                began=reply.began,
                ended=reply.ended,
                status=reply.status,
                code=(error.code if error else None) or "none",
                where=where,
                message=error.message[:_SAMPLES] if error else "",
                request_id=request_id,
            )
        )

    def _note_time(self, seconds: float, where: str) -> None:
        self.slowest = sorted([*self.slowest, (seconds, where)], reverse=True)[:SLOWEST]

    @staticmethod
    def _lost(reply: Reply, where: str, request_id: str) -> LostConnection:
        return LostConnection(
            began=reply.began,
            ended=reply.ended,
            port=reply.local_port,
            where=where,
            started=reply.status > 0,
            stream=reply.is_stream,
            request_id=request_id,
        )

    # Classification, when all faults are known

    def cause(self, failure: ServerFailure) -> str:
        """Return `fault`, `load` or `ours`."""
        reports_fault = failure.code in FAULT_CODES or (
            failure.code == RESPONSE_FAILED and failure.status == 200 and failure.message != INTERNAL
        )
        if reports_fault and any(each.explains(failure.began, failure.ended) for each in self.faults):
            return "fault"
        return "load" if failure.code in LOAD_CODES else "ours"

    def is_explained(self, lost: LostConnection) -> bool:
        """Whether a connection could not be opened while the whole server was down."""
        return any(fault.all_connections and fault.explains(lost.began, lost.ended) for fault in self.faults)

    def is_killed(self, lost: LostConnection) -> bool:
        """Whether a connection was lost because its API process was killed."""
        return any(
            fault.all_connections or lost.port in fault.killed_ports
            for fault in self.faults
            if lost.began <= fault.ended and fault.explains(lost.began, lost.ended)
        )


def _is_server_error(code: str | None) -> bool:
    """Whether the code of an error event is a server's: a revoked key, for one, is the client's."""
    return code in FAULT_CODES | LOAD_CODES | {"engine_error", "store_error", "internal_error", RESPONSE_FAILED, None}
