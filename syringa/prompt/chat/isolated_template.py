"""Chat templates of requests, which run in processes with limits (`template_process`)."""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import msgspec

from syringa.errors import EngineOverloaded, InvalidRequest
from syringa.fair_thread_pool import FairThreadPool
from syringa.prompt.chat.template import Message
from syringa.prompt.chat.template_capabilities import TemplateCapabilities
from syringa.prompt.chat.template_process import Reply, TemplateOptions
from syringa.types import in_background

Result = TypeVar("Result")

CPU_SECONDS = 2  # of one call
MEMORY_BYTES = 256 * 1024 * 1024  # beside what the interpreter takes
WALL_SECONDS = 30.0  # for one call, however little CPU time the process gets
MAX_REPLY_BYTES = 64 * 1024 * 1024
MAX_IDLE = 4  # processes that wait for the next request with the same template
IDLE_SECONDS = 30.0  # for which they are reused, less than those after which they end by themselves

_MODULE = "syringa.prompt.chat.template_process"
# The environment of a template process; API keys and database passwords are not part of it.
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL", "LC_CTYPE", "LC_TIME")
_LIMITS = (
    f"chat_template: it takes more than {CPU_SECONDS} s of CPU time or {MEMORY_BYTES >> 20} MB of memory, the limits "
    "of this server."
)

# A thread waits for one process, so this is the number of processes at work. No tenant holds them all.
_THREADS = FairThreadPool(4, "template", per_tenant=2)


class IsolatedTemplate:
    """A chat template of a request. Like `ChatTemplate`, but rendering blocks and is allowed only within `run`."""

    variables: frozenset[str]
    capabilities: TemplateCapabilities

    def __init__(self, source: str, special_tokens: dict[str, Any], tenant: str) -> None:
        """Use `open` instead."""
        self.source = source
        self.tool_source: str | None = None
        self._tenant = tenant
        self._options = TemplateOptions(
            source=source, special_tokens=special_tokens, cpu_seconds=CPU_SECONDS, memory_bytes=MEMORY_BYTES
        )
        self._process: _TemplateProcess | None = None  # during `run`

    @classmethod
    async def open(cls, source: str, special_tokens: dict[str, Any], tenant: str = "") -> IsolatedTemplate:
        """Compile and probe a template. Raises `InvalidRequest` if it is invalid or exceeds the limits."""
        template = cls(source, special_tokens, tenant)
        await template.run(template._describe)
        return template

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run a function that renders, in a thread that tenants share fairly."""
        future = _THREADS.submit(self._tenant, partial(self._run, work), background=in_background.get())
        return await asyncio.wrap_future(future)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Return the prompt. Raises `InvalidRequest` if the template fails or exceeds the limits."""
        text: str = self._call(
            "render",
            messages=list(messages),
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            kwargs=kwargs,
        )
        return text

    def supports_role(self, role: str) -> bool:
        return bool(self._call("supports_role", role=role))

    def _describe(self) -> None:
        found = self._call("describe")
        self.variables = frozenset(found["variables"])
        self.capabilities = msgspec.convert(found["capabilities"], TemplateCapabilities)

    def _run(self, work: Callable[[], Result]) -> Result:
        with _processes.borrow(self._tenant, self._options) as process:
            self._process = process
            try:
                return work()
            finally:
                self._process = None

    def _call(self, method: str, **arguments: Any) -> Any:
        assert self._process is not None, "templates of requests render within `run`"
        try:
            reply = self._process.call(method, arguments)
        except RecursionError:
            raise InvalidRequest("A value in the request is nested too deeply.") from None
        if reply is None or reply.out_of_memory:
            raise InvalidRequest(_LIMITS, param="chat_template", code="invalid_chat_template")
        if reply.error is not None:
            # Errors about other fields are those that the model's template has too.
            about_template = reply.param in (None, "messages")
            raise InvalidRequest(
                f"chat_template: {reply.error}" if about_template else reply.error,
                param="chat_template" if about_template else reply.param,
                code="invalid_chat_template" if about_template else None,
            )
        return reply.result


class _TemplateProcess:
    """A template process, and the pipes to and from it."""

    def __init__(self, options: TemplateOptions) -> None:
        self.idle_since = 0.0
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._input, False)
        self._unsent = _line(msgspec.to_builtins(options))

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def call(self, method: str, arguments: dict[str, Any]) -> Reply | None:
        """Return the reply; None if the process exceeded a limit, which ends it."""
        self._unsent += _line([method, arguments])
        received = bytearray()
        deadline = time.monotonic() + WALL_SECONDS
        try:
            while not received.endswith(b"\n"):
                self._exchange(received, deadline)
            return msgspec.convert(json.loads(received), Reply)
        except (OSError, ValueError, msgspec.ValidationError):
            self.kill()
            return None

    def _exchange(self, received: bytearray, deadline: float) -> None:
        """Send and receive what is possible. Raises `OSError` at the end of the process or the deadline."""
        poll = select.poll()  # not `select`, whose file descriptors are limited
        poll.register(self._output, select.POLLIN)
        if self._unsent:
            poll.register(self._input, select.POLLOUT)
        ready = [number for number, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)]
        if not ready:
            raise TimeoutError
        if self._input in ready:
            del self._unsent[: os.write(self._input, self._unsent[: 1 << 16])]
        if self._output in ready:
            data = os.read(self._output, 1 << 16)
            received += data
            if not data or len(received) > MAX_REPLY_BYTES:
                raise BrokenPipeError

    def kill(self) -> None:
        with suppress(OSError):
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class _TemplateProcesses:
    """The processes that are idle. A process is reused only for the same template of the same tenant."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._idle: OrderedDict[int, tuple[tuple[str, TemplateOptions], _TemplateProcess]] = OrderedDict()

    @contextmanager
    def borrow(self, tenant: str, options: TemplateOptions) -> Iterator[_TemplateProcess]:
        """Yield a process for a template: an idle one, or a new one. Raises `EngineOverloaded` if none can start."""
        try:
            process = self._take(tenant, options) or _TemplateProcess(options)
        except OSError:  # too many processes, or no memory
            raise EngineOverloaded("Chat templates of requests cannot be run at the moment: try again.") from None
        try:
            yield process
        finally:
            if process.alive:
                self._put(tenant, options, process)

    def close(self) -> None:
        with self._lock:
            processes = [process for _, process in self._idle.values()]
            self._idle.clear()
        for process in processes:
            process.kill()

    def _take(self, tenant: str, options: TemplateOptions) -> _TemplateProcess | None:
        with self._lock:
            for id_, (key, process) in list(self._idle.items()):
                if time.monotonic() > process.idle_since + IDLE_SECONDS or not process.alive:
                    del self._idle[id_]
                    process.kill()
                elif key == (tenant, options):
                    del self._idle[id_]
                    return process
        return None

    def _put(self, tenant: str, options: TemplateOptions, process: _TemplateProcess) -> None:
        oldest = None
        process.idle_since = time.monotonic()
        with self._lock:
            self._idle[id(process)] = (tenant, options), process
            if len(self._idle) > MAX_IDLE:
                _, (_, oldest) = self._idle.popitem(last=False)
        if oldest is not None:
            oldest.kill()


_processes = _TemplateProcesses()


def _line(message: Any) -> bytearray:
    # Not msgspec, which rejects text that is not valid Unicode.
    return bytearray(json.dumps(message).encode() + b"\n")
