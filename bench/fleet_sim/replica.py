"""A simulated replica: continuous batching, prefill in chunks beside it, a prefix cache, a queue.

Nothing is computed per token. Between two events the batch is constant, so all its streams advance by the same number
of tokens: `_tokens` counts them, and a stream ends when the counter reaches its own mark.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.fleet_sim.event_loop import EventLoop
from bench.fleet_sim.scenario import Scenario, SimulatedModel
from syringa.fleet.provider import ReplicaCondition

if TYPE_CHECKING:
    from bench.fleet_sim.engine import ModelClients
    from bench.fleet_sim.streams import Stream

PREFILL_SHARE = 0.7  # of the time of a replica that also has streams to continue
_NOTHING = 1e-6  # of a token


@dataclass(slots=True)
class Work:
    """What replicas of a model have done. The first two count each token of a request once, whatever happens to it."""

    output_tokens: float = 0.0
    prompt_tokens: float = 0.0
    repeated_tokens: float = 0.0  # of prompts: because of a move, or because another replica had them cached
    busy_seconds: float = 0.0  # with at least one request


@dataclass(slots=True)
class _Prefill:
    stream: Stream
    left: float
    new_share: float  # of its tokens: those that no replica has computed


@dataclass(eq=False)
class BatchedReplica:
    id: str
    model: SimulatedModel
    node: str
    scenario: Scenario
    loop: EventLoop
    clients: ModelClients
    work: Work
    started_at: float
    condition: ReplicaCondition = "queued"
    ready_at: float = 0.0
    idle_since: float = 0.0
    drained_at: float = 0.0  # when its grace period ends
    lost_at: float = 0.0  # when its node was lost
    frozen: bool = False  # the node is gone: nothing happens any more
    waiting: deque[Stream] = field(default_factory=deque)
    resumed: deque[Stream] = field(default_factory=deque)  # wait too, and come first
    version: int = 0  # of the next planned event
    _prefills: deque[_Prefill] = field(default_factory=deque)
    _decoding: list[tuple[float, int, Stream]] = field(default_factory=list)  # by the mark at which each one ends
    _tokens: float = 0.0  # of each stream, since the start of the replica
    _at: float = 0.0
    _prefill_speed: float = 0.0
    _pace: float = 0.0  # tokens per second of each stream
    _cache: OrderedDict[int, int] = field(default_factory=OrderedDict)  # tokens by chat
    _cached: int = 0
    _applications: set[int] = field(default_factory=set)  # whose system prompt is cached

    @property
    def running(self) -> int:
        return len(self._prefills) + len(self._decoding)

    def streams(self) -> list[Stream]:
        running = [*(each.stream for each in self._prefills), *(each[2] for each in self._decoding)]
        return [*running, *self.resumed, *self.waiting]

    def not_begun(self) -> list[Stream]:
        """Return the requests whose prompts have never been computed."""
        prefills = [each.stream for each in self._prefills]
        return [each for each in (*prefills, *self.waiting) if not each.prefilled]

    @property
    def queued(self) -> int:
        return len(self.waiting) + len(self.resumed)

    # Requests

    def submit(self, stream: Stream) -> None:
        stream.replica = self
        if self.frozen or self.running >= self.model.max_running:
            queue = self.resumed if stream.prefilled else self.waiting
            position = len(queue)
            while position and queue is self.waiting and stream.waits_since < queue[position - 1].waits_since:
                position -= 1  # it has waited elsewhere
            queue.insert(position, stream)
            return
        if self._prefills:
            self._admit(stream)  # what comes next does not change
            return
        self.advance()
        self._admit(stream)
        self._plan()

    def _admit(self, stream: Stream) -> None:
        now = self.loop.now
        if stream.admitted_at is None:
            stream.admitted_at = now
        chat = stream.chat
        known = self._cache.get(chat.id, 0)
        if not known and chat.application in self._applications:
            known = self.scenario.system_tokens
        whole = stream.prompt + int(stream.generated)
        tokens = max(1, whole - min(known, whole - 1))
        stream.cached = whole - tokens
        new = min(1.0, stream.new_tokens / tokens) if not stream.prefilled else 0.0
        self._prefills.append(_Prefill(stream, float(tokens), new))

    def take(self, streams: Collection[Stream]) -> None:
        """Remove streams, which go on elsewhere from what they have generated."""
        self.advance()
        taken = {stream.id for stream in streams}
        for mark, _, stream in self._decoding:
            if stream.id in taken:
                stream.generated = stream.output - (mark - self._tokens)
                stream.mark = None
        self._decoding = [each for each in self._decoding if each[1] not in taken]
        heapq.heapify(self._decoding)
        self._prefills = deque(each for each in self._prefills if each.stream.id not in taken)
        self.waiting = deque(each for each in self.waiting if each.id not in taken)
        self.resumed = deque(each for each in self.resumed if each.id not in taken)
        self._fill()
        self._plan()

    def expire(self) -> None:
        """End the requests that have waited for too long."""
        limit = self.loop.now - self.scenario.queue_timeout
        while self.waiting and self.waiting[0].waits_since <= limit and not self.frozen:
            self.clients.reject(self.waiting.popleft())

    def seconds_left(self, stream: Stream) -> float:
        """Return how long a stream would take if it generated all the tokens it may, at its present pace."""
        if stream.mark is None or not self._pace:
            return float("inf")
        generated = stream.output - (stream.mark - self._tokens)
        return (stream.output * self.scenario.max_tokens_factor - generated) / self._pace

    def freeze(self) -> None:
        """Stop here: the node is gone, or the replica has ended."""
        if not self.frozen:
            self.advance()
            self.frozen, self.lost_at = True, self.loop.now
            self.version += 1

    # Time

    def advance(self) -> None:
        """Account for the time since the last event."""
        seconds = self.loop.now - self._at
        self._at = self.loop.now
        if seconds <= 0.0 or self.frozen or not (self._prefills or self._decoding):
            return
        work = self.work
        work.busy_seconds += seconds
        if self._prefills:
            head = self._prefills[0]
            tokens = seconds * self._prefill_speed
            head.left -= tokens
            work.prompt_tokens += tokens * head.new_share
            work.repeated_tokens += tokens * (1 - head.new_share)
        if self._decoding:
            tokens = seconds * self._pace
            self._tokens += tokens
            work.output_tokens += tokens * len(self._decoding)

    def _plan(self) -> None:
        """Set the speeds, and schedule the next event."""
        self.version += 1
        if self.frozen:
            return
        prefills, batch, model = bool(self._prefills), len(self._decoding), self.model
        if not prefills and not batch:
            self.idle_since = self.loop.now
            if self.condition == "draining":
                self.clients.drained(self)
            return
        next_at = float("inf")
        if prefills:
            self._prefill_speed = model.prefill * (PREFILL_SHARE if batch else 1.0)
            next_at = self._prefills[0].left / self._prefill_speed
        if batch:
            self._pace = (1 - PREFILL_SHARE if prefills else 1.0) / (model.base + model.per_stream * batch)
            next_at = min(next_at, (self._decoding[0][0] - self._tokens) / self._pace)
        self.loop.after(max(next_at, 0.0), self._wake, self.version)

    def _wake(self, version: int) -> None:
        if version != self.version or self.frozen:
            return
        self.advance()
        while self._prefills and self._prefills[0].left <= _NOTHING:
            self._begin(self._prefills.popleft().stream)
        limit = self._tokens + _NOTHING
        while self._decoding and self._decoding[0][0] <= limit:
            self._finish(heapq.heappop(self._decoding)[2])
        self._fill()
        self._plan()

    def _fill(self) -> None:
        if self.frozen:
            return
        while self.resumed and self.running < self.model.max_running:
            self._admit(self.resumed.popleft())
        while self.waiting and self.running < self.model.max_running:
            stream = self.waiting.popleft()
            if stream.waits_since <= self.loop.now - self.scenario.queue_timeout:
                self.clients.reject(stream)
            else:
                self._admit(stream)

    def _begin(self, stream: Stream) -> None:
        """The prompt is computed: the first token, or after a move the next one."""
        stream.mark = self._tokens + stream.output - stream.generated
        heapq.heappush(self._decoding, (stream.mark, stream.id, stream))
        self._applications.add(stream.chat.application)
        self.clients.began(stream)

    def _finish(self, stream: Stream) -> None:
        stream.mark = None
        self._remember(stream.chat.id, stream.prompt + stream.output)
        self.clients.finished(stream)

    def _remember(self, chat: int, tokens: int) -> None:
        self._cached += tokens - self._cache.pop(chat, 0)
        self._cache[chat] = tokens
        while self._cached > self.scenario.cached_tokens:
            self._cached -= self._cache.popitem(last=False)[1]
