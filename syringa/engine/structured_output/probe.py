"""The grammar probe of a model: `python -m syringa.engine.structured_output.probe`, started by the supervisor.

llguidance can be neither interrupted nor bounded in memory, so each grammar is first compiled, up to its first token
mask, in a process that can be killed. The probe loads the model's tokenizer once and forks for each grammar; the forked
process has a limit on its CPU time and memory. Must not import torch: it would make each fork expensive and unsafe.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import math
import os
import resource
import signal
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, cast

import msgspec
from llguidance import LLMatcher, LLTokenizer

from syringa.engine.client import protocol
from syringa.engine.cpu.features import release_memory
from syringa.engine.processes import managed_process
from syringa.engine.structured_output.grammar_tokenizer import build_grammar_tokenizer
from syringa.engine.structured_output.probe_protocol import (
    CancelCheck,
    CheckGrammar,
    ProbeOptions,
    Verdict,
    probe_decoder,
)
from syringa.errors import SyringaError
from syringa.grammar import invalid_grammar, parser_limits, to_llguidance
from syringa.grammar.lark import resolve_special_tokens
from syringa.types import Grammar

SLOTS = 2  # forked processes at a time, of which a tenant has one: a hostile tenant never holds the last one
MAX_QUEUED = 64  # grammars of one tenant
MAX_VERDICTS = 4096
IDLE_SECONDS = 900.0  # after which a probe exits; the next grammar starts it again
WALL_FACTOR = 5  # a process is killed after so many times the limit on its CPU time, however little of it it got
_BASE_BYTES = 64 << 10  # charged for any grammar

Compile = Callable[[Grammar], object]
"""Compile a grammar. The result holds what the compiled grammar takes; raises `SyringaError` if it is invalid."""


class _Job:
    def __init__(self, connection: _Connection, message: CheckGrammar) -> None:
        self.connection, self.message = connection, message
        self.pid = 0
        self.cancelled = False

    @property
    def tenant(self) -> str:
        return self.message.tenant


class GrammarProbe:
    """Check grammars in forked processes, in turn for each tenant, and remember the verdicts."""

    def __init__(self, compile: Compile, *, cpu_seconds: float, memory_bytes: int) -> None:
        self._compile = compile
        self._cpu_seconds, self._memory_bytes = cpu_seconds, memory_bytes
        self._queues: dict[str, deque[_Job]] = {}  # by tenant, the next one to serve first
        self._running: dict[str, _Job] = {}  # by tenant
        self._verdicts: OrderedDict[tuple[bytes, bytes], Verdict] = OrderedDict()
        self.idle_since = time.monotonic()

    def add(self, connection: _Connection, message: CheckGrammar) -> None:
        """Answer with the verdict, now or later."""
        self.idle_since = time.monotonic()
        if (known := self._verdicts.get(_verdict_key(message))) is not None:
            self._verdicts.move_to_end(_verdict_key(message))
            connection.send(msgspec.structs.replace(known, id=message.id))
            return
        queue = self._queues.setdefault(message.tenant, deque())
        if len(queue) >= MAX_QUEUED:
            connection.send(Verdict(message.id, "overloaded"))
            return
        queue.append(_Job(connection, message))
        self._start_next()

    def cancel(self, connection: _Connection, id: int | None = None) -> None:
        """Drop a check of a client that no longer waits for it, or all of them."""

        def wanted(job: _Job) -> bool:
            return job.connection is not connection or id not in (None, job.message.id)

        for tenant, queue in list(self._queues.items()):
            self._queues[tenant] = deque(filter(wanted, queue))
            if not self._queues[tenant]:
                del self._queues[tenant]
        for job in self._running.values():
            if not wanted(job):
                job.cancelled = True
                os.kill(job.pid, signal.SIGKILL)

    def _start_next(self) -> None:
        for tenant in list(self._queues):
            if len(self._running) >= SLOTS:
                return
            if tenant in self._running:
                continue
            queue = self._queues.pop(tenant)
            job = queue.popleft()
            if queue:
                self._queues[tenant] = queue  # behind the other tenants
            self._start(job)

    def _start(self, job: _Job) -> None:
        loop = asyncio.get_running_loop()
        reader, writer = os.pipe()
        try:
            job.pid = os.fork()
        except OSError:  # too many processes, or no memory
            os.close(reader)
            os.close(writer)
            job.connection.send(Verdict(job.message.id, "overloaded"))
            return
        if job.pid == 0:
            self._run_forked(job.message, writer)
        os.close(writer)
        self._running[job.tenant] = job
        received = bytearray()
        killing = loop.call_later(WALL_FACTOR * self._cpu_seconds, os.kill, job.pid, signal.SIGKILL)

        def on_readable() -> None:
            if data := os.read(reader, 1 << 16):
                received.extend(data)
                return
            loop.remove_reader(reader)
            os.close(reader)
            killing.cancel()
            _, status = os.waitpid(job.pid, 0)
            self._finish(job, bytes(received), killed=os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL)

        loop.add_reader(reader, on_readable)

    def _finish(self, job: _Job, result: bytes, *, killed: bool) -> None:
        del self._running[job.tenant]
        if not job.cancelled:
            try:
                verdict = msgspec.msgpack.decode(result, type=Verdict)
            except msgspec.DecodeError:  # a limit ended it
                verdict = Verdict(job.message.id, "exceeded", self._limit_message())
            if not killed:  # by the clock, or because the machine is short of memory: another time it may succeed
                self._verdicts[_verdict_key(job.message)] = verdict
                if len(self._verdicts) > MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
            job.connection.send(verdict)
        self._start_next()

    def _limit_message(self) -> str:
        megabytes = self._memory_bytes >> 20
        return (
            f"The grammar is too complex: compiling it takes more than {self._cpu_seconds:g} s of CPU time or "
            f"{megabytes} MB of memory, the limits of this server."
        )

    def _run_forked(self, message: CheckGrammar, writer: int) -> NoReturn:
        """Compile in a forked process, write the verdict, and exit."""
        try:
            null = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)  # a failed allocation writes to stderr
            seconds = math.ceil(self._cpu_seconds)
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # SIGXCPU, then SIGKILL
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if size := _memory_size()[0]:
                limit = size + self._memory_bytes
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            before = _anonymous_bytes()
            try:
                kept = self._compile(message.grammar)
                verdict = Verdict(message.id, "valid", memory=_BASE_BYTES + max(0, _anonymous_bytes() - before))
                del kept
            except SyringaError as error:
                verdict = Verdict(message.id, "invalid", error.message)
            os.write(writer, msgspec.msgpack.encode(verdict))
        finally:
            os._exit(0)


def _verdict_key(message: CheckGrammar) -> tuple[bytes, bytes]:
    text = f"{message.grammar.kind}:{message.grammar.value}"
    return message.cache_key, hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).digest()


def _anonymous_bytes() -> int:
    _, resident, shared = _memory_size()
    return resident - shared


def _memory_size() -> tuple[int, int, int]:
    """Return the size, resident set and file-backed part of this process in bytes; zeros on a system without /proc."""
    try:
        size, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    except OSError:
        return 0, 0, 0
    page = os.sysconf("SC_PAGE_SIZE")
    return size * page, resident * page, shared * page


class _Connection(asyncio.Protocol):
    """The connection of an API server."""

    def __init__(self, probe: GrammarProbe) -> None:
        self._probe = probe
        self._decoder = probe_decoder()
        self.open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            if isinstance(message, CheckGrammar):
                self._probe.add(self, message)
            elif isinstance(message, CancelCheck):
                self._probe.cancel(self, message.id)

    def send(self, verdict: Verdict) -> None:
        if self.open:
            self._transport.write(protocol.frame(verdict))

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        self._probe.cancel(self)


def compiler(tokenizer: LLTokenizer, special_tokens: dict[str, int]) -> Compile:
    """Return a function that compiles a grammar and computes its first mask, as the worker will."""
    limits = parser_limits()

    def compile(grammar: Grammar) -> LLMatcher:
        text = to_llguidance(resolve_special_tokens(grammar, special_tokens))
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise invalid_grammar(matcher.get_error())
        return matcher

    return compile


async def serve(probe: GrammarProbe, path: str) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(lambda: _Connection(probe), sock=protocol.listen(path))
    idle = asyncio.Event()

    def check_idle() -> None:
        if (left := probe.idle_since + IDLE_SECONDS - time.monotonic()) <= 0:
            idle.set()
        else:
            loop.call_later(left, check_idle)

    check_idle()
    loop.add_reader(0, os._exit, 0)  # end of file: the supervisor is gone
    async with server:
        await idle.wait()


def main() -> None:
    options = managed_process.attach_to_parent(ProbeOptions, watch=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the supervisor stops them in order
    from syringa.modelfiles import describe, load_tokenizer, locate

    files = locate(options.model)
    tokenizer, special = build_grammar_tokenizer(
        load_tokenizer(files).to_str(), None, sorted(describe(files).end_tokens)
    )
    release_memory()  # what is left free would hide the memory that a grammar takes
    gc.freeze()
    probe = GrammarProbe(
        compiler(tokenizer, special), cpu_seconds=options.cpu_seconds, memory_bytes=options.memory_bytes
    )
    asyncio.run(serve(probe, options.socket))


if __name__ == "__main__":
    main()
