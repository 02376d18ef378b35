"""The process that runs chat templates of requests: `python -m syringa.prompt.chat.template_process`.

A template can loop for hours or write gigabytes, and Python can neither interrupt nor bound it. So it runs in a process
of its own, which limits its CPU time and memory, has no secrets in its environment, and can be killed. The process
serves one template, which is compiled here too: the compiler computes constants such as `"x" * 10**9`.

Messages are lines of JSON: a `TemplateOptions` first, then calls `[method, arguments]`, each answered by a `Reply`.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from syringa.errors import SyringaError
from syringa.prompt.chat.template import ChatTemplate

IDLE_SECONDS = 60  # after which the process ends


class TemplateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The template of a process, and the limits of each call."""

    source: str
    special_tokens: dict[str, Any]
    cpu_seconds: int
    memory_bytes: int


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a call, or the message of an error and the field that it is about."""

    result: Any = None
    error: str | None = None
    param: str | None = None
    out_of_memory: bool = False


def main() -> None:
    options = msgspec.convert(_read_line(), TemplateOptions)
    _limit_process(options.memory_bytes)
    template: ChatTemplate | None = None
    while True:
        method, arguments = _read_line()
        # The limit counts from the start of the process, in whole seconds.
        limit = math.ceil(time.process_time()) + options.cpu_seconds
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        try:
            if template is None:
                template = ChatTemplate(options.source, options.special_tokens)
            reply = Reply(result=_call(template, method, arguments))
        except SyringaError as error:
            reply = Reply(
                error=error.message, param=error.param, out_of_memory=isinstance(error.__cause__, MemoryError)
            )
        except Exception as error:  # a template can cause any
            reply = Reply(error=f"{type(error).__name__}: {error}", out_of_memory=isinstance(error, MemoryError))
        _write_line(msgspec.to_builtins(reply))


def _call(template: ChatTemplate, method: str, arguments: dict[str, Any]) -> Any:
    match method:
        case "describe":
            return {"variables": sorted(template.variables), "capabilities": msgspec.to_builtins(template.capabilities)}
        case "supports_role":
            return template.supports_role(**arguments)
        case _:
            return template.render(**arguments)


def _limit_process(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return
    limit = pages * os.sysconf("SC_PAGE_SIZE") + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _read_line() -> Any:
    """Return the next message. The process ends when there is none for a while, or when the parent is gone."""
    signal.alarm(IDLE_SECONDS)
    line = sys.stdin.buffer.readline()
    signal.alarm(0)
    if not line:
        sys.exit()
    return json.loads(line)


def _write_line(message: Any) -> None:
    # Not msgspec, which rejects text that is not valid Unicode.
    sys.stdout.buffer.write(json.dumps(message).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
