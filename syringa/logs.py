"""Logging set-up, the same in every process: lines of text, or one JSON object per line.

A record may carry fields of its own, which JSON lines show separately, and the id of its request:

    logger.info(message, extra={"fields": {"status": 200}, "request_id": "req_1"})

Client data must not reach the log by accident:

- The configured level applies to Syringa's loggers only. Libraries log warnings and above, because some log URLs,
  headers and frames below that.
- The message of an unexpected exception may quote client data, so it is shown only for the types in `_SAFE_ERRORS`. Of
  other exceptions, the type and the traceback are shown.
- Prompts and answers go to the logger `PROMPTS`, which is off by default.
- Control characters are escaped, so that a client cannot forge a line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import sys
import traceback
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

import msgspec

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the current request, which is added to every record about it."""

PROMPTS = logging.getLogger("syringa.prompts")
MAX_TEXT = 10_000  # characters of a body or an answer in one line

_OFF = logging.CRITICAL + 1
PROMPTS.setLevel(_OFF)

# Control characters, line separators, bidirectional controls and lone surrogates.
_ESCAPED = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# Exceptions whose messages are about code or the machine, never about client data.
_SAFE_ERRORS = (
    AssertionError, AttributeError, ImportError, MemoryError, NameError, NotImplementedError, OSError, RuntimeError,
    TypeError,
)  # fmt: skip
_MAX_CHAIN = 8


def configure(level: str, format: Literal["text", "json"] = "text", *, prompts: bool = False) -> None:
    """Set up logging of this process. A second call replaces the set-up."""
    root = logging.getLogger()
    for handler in [each for each in root.handlers if isinstance(each, _StderrHandler)]:
        root.removeHandler(handler)
    handler = _StderrHandler()
    handler.setFormatter(JsonFormatter(prompts=prompts) if format == "json" else TextFormatter(prompts=prompts))
    handler.addFilter(add_request_id)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("syringa").setLevel(level.upper())
    PROMPTS.setLevel(logging.INFO if prompts else _OFF)
    logging.getLogger("python_multipart").setLevel(_OFF)  # warns of parts of bodies, which are answered with a 400
    logging.captureWarnings(True)
    # The formats do not show threads and processes, and looking them up costs time for every record.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    sys.excepthook = _log_uncaught


def add_request_id(record: logging.LogRecord) -> bool:
    """A filter that adds the id of the current request to a record without one."""
    if not hasattr(record, "request_id"):
        record.request_id = request_id.get()
    return True


def escaped(text: str) -> str:
    """Return the text as one line without characters that a terminal would obey."""
    return _ESCAPED.sub(_escape, text) if _ESCAPED.search(text) else text


def truncated(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text)} characters)"


class TextFormatter(logging.Formatter):
    """Formats a record as `TIME LEVEL LOGGER: MESSAGE [REQUEST]`, followed by the lines of an exception."""

    def __init__(self, *, prompts: bool = False) -> None:
        super().__init__()
        self._prompts = prompts

    def format(self, record: logging.LogRecord) -> str:
        message = escaped(_message(record, self._prompts))
        text = f"{_format_time(record.created)} {record.levelname} {record.name}: {message}"
        if id := getattr(record, "request_id", ""):
            text += f" [{escaped(id)}]"
        return "\n".join([text, *_exception_lines(record, self._prompts)])


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object on one line."""

    def __init__(self, *, prompts: bool = False) -> None:
        super().__init__()
        self._prompts = prompts

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _format_time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": escaped(_message(record, self._prompts)),
        }
        if id := getattr(record, "request_id", ""):
            line["request_id"] = id
        line |= getattr(record, "fields", {})
        if exception := _exception_lines(record, self._prompts):
            line["exception"] = "\n".join(exception)
        try:
            return msgspec.json.encode(line, enc_hook=str).decode()
        except UnicodeEncodeError:  # a lone surrogate in a field
            line = {name: escaped(value) if isinstance(value, str) else value for name, value in line.items()}
            return msgspec.json.encode(line, enc_hook=str).decode()


class _StderrHandler(logging.Handler):
    """Writes to the current `sys.stderr`.

    Many requests end in the same iteration of the event loop, when an engine step ends. Lines below warnings are
    therefore written together, at the end of the iteration.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []
        self._scheduled: asyncio.AbstractEventLoop | None = None  # the loop that will flush

    def emit(self, record: logging.LogRecord) -> None:
        # A line that cannot be written is dropped: the request must not fail for it.
        with contextlib.suppress(Exception):
            self._lines.append(self.format(record) + "\n")
            if record.levelno >= logging.WARNING or (loop := _running_loop()) is None:
                self.flush()
            elif self._scheduled is not loop:
                self._scheduled = loop
                loop.call_soon(self.flush)

    def flush(self) -> None:
        with self.lock or contextlib.nullcontext(), contextlib.suppress(Exception):
            lines, self._lines, self._scheduled = self._lines, [], None
            if lines:
                sys.stderr.write("".join(lines))


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


_second, _formatted = -1, ""  # of the last record, whose second the next one is likely to share


def _format_time(created: float) -> str:
    global _second, _formatted
    second = int(created)
    if second != _second:
        _second, _formatted = second, datetime.fromtimestamp(second, UTC).isoformat()[:-6]
    return f"{_formatted}.{int((created - second) * 1000):03d}Z"


def _message(record: logging.LogRecord, prompts: bool) -> str:
    message = record.getMessage()
    if record.name == "asyncio" and not prompts:
        # The other lines show a task with its exception, whose message may quote client data.
        return message.partition("\n")[0]
    return message


def _escape(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


def _exception_lines(record: logging.LogRecord, prompts: bool) -> list[str]:
    """Return the traceback of a record's exception and of its causes, the first cause first."""
    error = record.exc_info[1] if record.exc_info else None
    chain: list[BaseException] = []
    while error is not None and error not in chain and len(chain) < _MAX_CHAIN:
        chain.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    lines: list[str] = []
    for each in reversed(chain):
        if lines:
            lines.append("which led to:")
        lines += [part.rstrip("\n") for part in traceback.format_tb(each.__traceback__)]
        lines.append(_describe_error(each, prompts))
    return lines


def _describe_error(error: BaseException, prompts: bool) -> str:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    message = str(error)
    if not message:
        return name
    if prompts or isinstance(error, _SAFE_ERRORS):
        return f"{name}: {escaped(truncated(message))}"
    return f"{name} (message of {len(message)} characters not shown without --log-prompts)"


def _log_uncaught(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, tb)
        return
    logging.getLogger("syringa").critical("process ends with an uncaught exception", exc_info=error)
