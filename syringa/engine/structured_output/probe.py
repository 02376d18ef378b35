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
from operator import itemgetter
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

# Forked processes at a time. A tenant has one of them, and checks in the background have one: neither a hostile tenant
# nor a batch ever holds the last one.
SLOTS = 2
MAX_QUEUED = 64  # grammars of one tenant; those in the background wait, however many they are
MAX_VERDICTS = 4096
IDLE_SECONDS = 900.0  # after which a probe exits; the next grammar starts it again
WALL_FACTOR = 5  # a process is killed after so many times the limit on its CPU time, however little of it it got
_BASE_BYTES = 64 << 10  # charged for any grammar

Compile = Callable[[Grammar], object]
"""Compile a grammar. The result holds what the compiled grammar takes; raises `SyringaError` if it is invalid."""


class _Job:
    """A check, and the clients that wait for its verdict."""

    def __init__(self, message: CheckGrammar) -> None:
        self.message = message
        self.verdict_key = _verdict_key(message)
        self.waiters: list[tuple[_Connection, int]] = []  # with the ids of their messages
        self.pid = 0

    @property
    def tenant(self) -> str:
        return self.message.tenant

    @property
    def queue(self) -> tuple[bool, str]:
        return self.message.background, self.message.tenant

    def answer(self, verdict: Verdict) -> None:
        for connection, id in self.waiters:
            connection.send(msgspec.structs.replace(verdict, id=id))


class GrammarProbe:
    """Check grammars in forked processes, in turn for each tenant, and remember the verdicts.

    Clients of a tenant that need the same grammar at the same time share a check. Checks in the background begin when
    no other can.
    """

    def __init__(self, compile: Compile, *, cpu_seconds: float, memory_bytes: int) -> None:
        self._compile = compile
        self._cpu_seconds, self._memory_bytes = cpu_seconds, memory_bytes
        # By class (whether in the background) and tenant, the next one of a class to serve first.
        self._queues: dict[tuple[bool, str], deque[_Job]] = {}
        self._running: dict[str, _Job] = {}  # by tenant
        self._verdicts: OrderedDict[tuple[bytes, bytes], Verdict] = OrderedDict()
        self.idle_since = time.monotonic()

    def add(self, connection: _Connection, message: CheckGrammar) -> None:
        """Answer with the verdict, now or later."""
        self.idle_since = time.monotonic()
        job = _Job(message)
        waiter = (connection, message.id)
        if (known := self._known_verdict(job)) is not None:
            connection.send(msgspec.structs.replace(known, id=message.id))
            return
        queue = self._queues.get(job.queue, deque())
        for each in (*queue, *self._running.values()):
            if (each.queue, each.verdict_key) == (job.queue, job.verdict_key) and each.waiters:
                each.waiters.append(waiter)
                return
        if len(queue) >= MAX_QUEUED and not message.background:
            connection.send(Verdict(message.id, "overloaded"))
            return
        job.waiters.append(waiter)
        queue.append(job)
        self._queues[job.queue] = queue
        self._start_next()

    def cancel(self, connection: _Connection, id: int | None = None) -> None:
        """Drop a check of a client that no longer waits for it, or all of them."""

        def drop_waiters(job: _Job) -> bool:
            """Return whether others wait for the check."""
            job.waiters = [each for each in job.waiters if each[0] is not connection or id not in (None, each[1])]
            return bool(job.waiters)

        for key, queue in list(self._queues.items()):
            self._queues[key] = deque(filter(drop_waiters, queue))
            if not self._queues[key]:
                del self._queues[key]
        for job in self._running.values():
            if job.waiters and not drop_waiters(job):
                os.kill(job.pid, signal.SIGKILL)

    def _known_verdict(self, job: _Job) -> Verdict | None:
        known = self._verdicts.get(job.verdict_key)
        if known is not None:
            self._verdicts.move_to_end(job.verdict_key)
        return known

    def _start_next(self) -> None:
        while (job := self._next_job()) is not None:
            if (known := self._known_verdict(job)) is not None:  # since it was queued
                job.answer(known)
            else:
                self._start(job)

    def _next_job(self) -> _Job | None:
        """Remove and return the next check that may begin."""
        if len(self._running) >= SLOTS:
            return None
        in_background = sum(job.message.background for job in self._running.values())
        for key in sorted(self._queues, key=itemgetter(0)):
            background, tenant = key
            if tenant in self._running or (background and in_background >= SLOTS - 1):
                continue
            queue = self._queues.pop(key)
            job = queue.popleft()
            if queue:
                self._queues[key] = queue  # behind the other tenants
            return job
        return None

    def _start(self, job: _Job) -> None:
        loop = asyncio.get_running_loop()
        reader, writer = os.pipe()
        try:
            job.pid = os.fork()
        except OSError:  # too many processes, or no memory
            os.close(reader)
            os.close(writer)
            job.answer(Verdict(job.message.id, "overloaded"))
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
        self.idle_since = time.monotonic()
        if job.waiters:
            try:
                verdict = msgspec.msgpack.decode(result, type=Verdict)
            except msgspec.DecodeError:  # a limit ended it
                verdict = Verdict(job.message.id, "exceeded", self._limit_message())
            if not killed:
                self._verdicts[job.verdict_key] = verdict
                if len(self._verdicts) > MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
            elif job.message.background:  # by the clock, or because the machine is short of memory: it can wait
                verdict = Verdict(job.message.id, "overloaded")
            job.answer(verdict)
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
