"""Logging, set up the same way in every process: a line for people, or one JSON object a line.

What clients send and are sent is nobody's business but theirs, so nothing here can show it by accident:

- Only Syringa's own loggers heed the level that was set. Libraries are heard from warnings on: below that, some log
  URLs, headers and frames.
- The messages of exceptions that nobody foresaw may quote what was being worked on: only those of types that never do
  are shown (`_TELLING`). Of the others, the type and the place remain.
- Text that people wrote goes to one logger, `PROMPTS`, which is off unless the administrator wants it.
- Control characters are escaped: nobody can forge a line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import sys
import time
import traceback
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

import msgspec

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The request that is being worked on, to be named in every line about it."""

PROMPTS = logging.getLogger("syringa.prompts")
MAX_TEXT = 10_000  # characters of a body or an answer in one line

_OFF = logging.CRITICAL + 1
PROMPTS.setLevel(_OFF)

# Control characters of either set, what separates or turns lines, and halves of characters.
_ODD = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# Exceptions whose messages are about our code or the machine, not about what was being worked on.
_TELLING = (
    AssertionError, AttributeError, ImportError, MemoryError, NameError, NotImplementedError, OSError, RuntimeError,
    TypeError,
)  # fmt: skip
_MAX_CHAIN = 8


def configure(level: str, format: Literal["text", "json"] = "text", *, prompts: bool = False) -> None:
    """Sets up this process. To be called once, when it begins; a second call changes the set-up."""
    root = logging.getLogger()
    for old in [each for each in root.handlers if isinstance(each, _Handler)]:
        root.removeHandler(old)
    handler = _Handler(JsonFormatter(prompts=prompts) if format == "json" else TextFormatter(prompts=prompts))
    handler.addFilter(name_request)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("syringa").setLevel(level.upper())
    PROMPTS.setLevel(logging.INFO if prompts else _OFF)
    logging.captureWarnings(True)
    # Which thread and process a line comes from is asked for by no format, and costs every line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    sys.excepthook = _last_words


def name_request(record: logging.LogRecord) -> bool:
    """A filter that adds the request's id to a record, where there is one and none was given."""
    if not hasattr(record, "request_id"):
        record.request_id = request_id.get()
    return True


def line(logger: logging.Logger, level: int, message: str, fields: dict[str, Any], id: str) -> None:
    """Logs a message about the request `id` with fields of its own, which JSON lines have apart. Looks for no caller:
    it is for lines that every request has."""
    if (ours := _sole_listener(logger)) is not None:  # then no record has to be made
        ours.say(_Line(time.time(), logging.getLevelName(level), logger.name, message, id, fields), level)
    else:
        record = logging.LogRecord(logger.name, level, "", 0, message, None, None)
        record.fields, record.request_id = fields, id
        logger.handle(record)


def _sole_listener(logger: logging.Logger) -> _Handler | None:
    """Our handler, if nobody else hears or looks at what `logger` says."""
    each: logging.Logger | None = logger
    if logger.filters:
        return None
    while each is not None and each is not logging.root:
        if each.handlers or not each.propagate:
            return None
        each = each.parent
    match logging.root.handlers:
        case [_Handler() as ours]:
            return ours
    return None


def escaped(text: str) -> str:
    """The text on one line, with nothing in it that a terminal would obey."""
    return _ODD.sub(_escape, text) if _ODD.search(text) else text


def cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text)} characters)"


class _Line(msgspec.Struct):
    """What is to be said; `told`: the lines of an exception."""

    created: float
    level: str
    name: str
    message: str
    request_id: str
    fields: dict[str, Any] | None = None
    told: list[str] | None = None


class _Formatter(logging.Formatter):
    """What both formats have in common."""

    def __init__(self, *, prompts: bool = False) -> None:
        super().__init__()
        self._prompts = prompts

    def format(self, record: logging.LogRecord) -> str:
        line = _Line(record.created, record.levelname, record.name, _message(record, self._prompts), "")
        line.request_id, line.fields = getattr(record, "request_id", ""), getattr(record, "fields", None)
        if record.exc_info and record.exc_info[1] is not None:
            line.told = _told(record.exc_info[1], self._prompts)
        return self.write(line)

    def write(self, line: _Line) -> str:
        raise NotImplementedError


class TextFormatter(_Formatter):
    def write(self, line: _Line) -> str:
        said = f"{_time(line.created)} {line.level} {line.name}: {escaped(line.message)}"
        if line.request_id:
            said += f" [{escaped(line.request_id)}]"
        return said if line.told is None else "\n".join([said, *line.told])


class JsonFormatter(_Formatter):
    def write(self, line: _Line) -> str:
        said: dict[str, Any] = {
            "time": _time(line.created),
            "level": line.level.lower(),
            "logger": line.name,
            "message": escaped(line.message),
        }
        if line.request_id:
            said["request_id"] = line.request_id
        if line.fields:
            said |= line.fields
        if line.told is not None:
            said["exception"] = "\n".join(line.told)
        try:
            return msgspec.json.encode(said, enc_hook=str).decode()
        except UnicodeEncodeError:  # half a character in a field
            plain = {name: escaped(value) if isinstance(value, str) else value for name, value in said.items()}
            return msgspec.json.encode(plain, enc_hook=str).decode()


class _Handler(logging.Handler):
    """Writes to whatever stderr is now, which has a line's end for the end of a buffer.

    Requests end together, when a step of the engine ends: what an event loop has to say in one turn is one write, at
    the turn's end, unless something is wrong.
    """

    def __init__(self, form: _Formatter) -> None:
        super().__init__()
        self._form = form
        self.setFormatter(form)
        self._lines: list[str] = []
        self._turn: asyncio.AbstractEventLoop | None = None  # whose end is waited for

    def emit(self, record: logging.LogRecord) -> None:
        # A line that cannot be written is lost: nobody is there to be told, and the request is not to blame.
        with contextlib.suppress(Exception):
            self._add(self.format(record), record.levelno)

    def say(self, line: _Line, level: int) -> None:
        """The same without a record."""
        with self.lock or contextlib.nullcontext(), contextlib.suppress(Exception):
            self._add(self._form.write(line), level)

    def _add(self, said: str, level: int) -> None:
        self._lines.append(said + "\n")
        if level >= logging.WARNING or (loop := asyncio._get_running_loop()) is None:
            self.flush()
        elif self._turn is not loop:
            self._turn = loop
            loop.call_soon(self.flush)

    def flush(self) -> None:
        with self.lock or contextlib.nullcontext(), contextlib.suppress(Exception):
            lines, self._lines, self._turn = self._lines, [], None
            if lines:
                sys.stderr.write("".join(lines))


_second, _shown = -1, ""  # the last one, which the next line is likely to share


def _time(created: float) -> str:
    global _second, _shown
    second = int(created)
    if second != _second:
        _second, _shown = second, datetime.fromtimestamp(second, UTC).isoformat()[:-6]
    return f"{_shown}.{int((created - second) * 1000):03d}Z"


def _message(record: logging.LogRecord, prompts: bool) -> str:
    said = record.getMessage()
    if record.name == "asyncio" and not prompts:
        # The lines that follow show a task, and with it the exception that it ended with, whatever that quotes.
        return said.partition("\n")[0]
    return said


def _escape(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


def _told(error: BaseException, prompts: bool) -> list[str]:
    """An exception and what led to it, the first cause first, like Python's own traceback."""
    chain: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in chain and len(chain) < _MAX_CHAIN:
        chain.append(found)
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    lines: list[str] = []
    for each in reversed(chain):
        if lines:
            lines.append("which led to:")
        lines += [part.rstrip("\n") for part in traceback.format_tb(each.__traceback__)]
        lines.append(_named(each, prompts))
    return lines


def _named(error: BaseException, prompts: bool) -> str:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    said = str(error)
    if not said:
        return name
    if prompts or isinstance(error, _TELLING):
        return f"{name}: {escaped(cut(said))}"
    return f"{name} (what it says is not shown without --log-prompts: {len(said)} characters)"


def _last_words(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, tb)
        return
    logging.getLogger("syringa").critical("this process ends, by an error", exc_info=error)
