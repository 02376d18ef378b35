"""A line in the log for each request that has ended, and, only where the administrator wants it, what was said."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.types import Scope

from syringa import logs
from syringa.events import Event, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from syringa.generation import Emit
from syringa.service.auth.caller import Caller
from syringa.service.usage.account import CANCELLED, Account

logger = logging.getLogger("syringa.access")

# Asked for by machines, again and again.
_QUIET = frozenset({"/health", "/ready", "/metrics", "/status"})
_MAX_PATH = 200


def access_line(scope: Scope, began: float) -> None:
    """One line for a request that began at `began`, by `time.perf_counter`. Says nothing of its query, its headers or
    its body."""
    path: str = scope["path"]
    level = logging.DEBUG if path in _QUIET else logging.INFO
    if not logger.isEnabledFor(level):
        return
    state = scope["state"]
    status = state["status"] or CANCELLED  # nothing was sent: its client left
    method = scope.get("method", "WEBSOCKET")
    if len(path) > _MAX_PATH:
        path = path[:_MAX_PATH] + "…"
    seconds = round(time.perf_counter() - began, 6)
    fields: dict[str, Any] = {"method": method, "path": path, "status": status, "seconds": seconds}
    account: Account | None = state.get("account")
    more = _identify(state.get("caller"), fields)
    if account is not None and account.later:
        fields["model"], fields["outcome"] = account.model, "later"
        more += f" model={account.model} goes on in the background"
    elif account is not None:
        more += _describe(account, fields)
    logs.line(logger, level, f"{method} {path} {status} {seconds:.3f} s{more}", fields, state["request_id"])


def account_line(account: Account) -> None:
    """The same for a response that no HTTP request waits for: one that ran in the background, or over a WebSocket."""
    if not logger.isEnabledFor(logging.INFO):
        return
    seconds = round(account.total_seconds, 6)
    fields: dict[str, Any] = {"path": account.endpoint, "status": account.status, "seconds": seconds}
    more = _identify(account.caller, fields) + _describe(account, fields)
    message = f"a response of {account.endpoint} ended {account.status} {seconds:.3f} s{more}"
    logs.line(logger, logging.INFO, message, fields, account.request_id)


def _identify(caller: Caller | None, fields: dict[str, Any]) -> str:
    if caller is None or not caller.organisation:
        return ""
    fields["organisation"], fields["key"] = caller.organisation, caller.key
    return f" organisation={caller.organisation} key={caller.key}"


def _describe(account: Account, fields: dict[str, Any]) -> str:
    used = account.trace
    fields["model"], fields["outcome"] = account.model, account.outcome
    fields["input_tokens"], fields["output_tokens"] = used.prompt_tokens, used.completion_tokens
    return f" model={account.model} tokens={used.prompt_tokens}+{used.completion_tokens} {account.outcome}"


def log_body(body: bytes) -> None:
    """What a client sent. Nothing happens unless prompts are to be logged."""
    if logs.PROMPTS.isEnabledFor(logging.INFO):
        logs.PROMPTS.info("request: %s", logs.cut(body[: 4 * logs.MAX_TEXT].decode("utf-8", "replace")))


@contextlib.contextmanager
def heard(emit: Emit) -> Iterator[Emit]:
    """`emit` itself, or where answers are to be logged, one that also remembers what it was given."""
    if not logs.PROMPTS.isEnabledFor(logging.INFO):
        yield emit
        return
    said: list[str] = []

    def listen(events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, TextDelta | ReasoningDelta):
                said.append(event.text)
            elif isinstance(event, ToolCallStart):
                said.append(f" {event.name}: ")
            elif isinstance(event, ToolCallDelta):
                said.append(event.arguments)
        emit(events)

    try:
        yield listen
    finally:
        logs.PROMPTS.info("answer: %s", logs.cut("".join(said)))
