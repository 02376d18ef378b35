"""Which tokens the next step computes.

There are no phases. A sequence has known tokens and computed ones, and a step lets some catch up: one token for a
choice that is being generated, a chunk for a prompt, everything again for one that was preempted. Torch-free.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from syringa.engine.kv_cache import BLOCK_SIZE, ROOT, BlockPool, OutOfBlocks, chain
from syringa.engine.sequence import Sequence

# Scoring a prompt keeps one row of logits per token: a chunk of these is as much as memory should hold.
# So many tokens before it make a prompt's token cost about twice as much (measured on a CPU, in int8). Counting that
# keeps a step that others wait for as short at the end of a long prompt as at its beginning.
ATTENTION_SPAN = 1536
SCORING_CHUNK = 128


@dataclass(frozen=True)
class Limits:
    step_tokens: int = 512
    max_running: int = 256
    max_queue: int = 1024


@dataclass(slots=True)
class Scheduled:
    """`count` tokens of a sequence, from position `start`. `draws`: who draws a token from the last one's logits."""

    sequence: Sequence
    start: int
    count: int
    draws: list[Sequence] = field(default_factory=list)


@dataclass
class Plan:
    items: list[Scheduled] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # blocks to copy first: (source, target)
    forks: list[Sequence] = field(default_factory=list)  # sequences that came to be in this step


class QueueFull(Exception):
    pass


class FairQueue:
    """First come first served inside a tenant; between tenants, whoever has been given the fewest tokens."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[Sequence]] = {}
        self._served: dict[str, float] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, sequence: Sequence, *, first: bool = False) -> None:
        tenant = sequence.request.tenant
        if not self._queues:
            # While nobody waits, nobody is wronged: what was given until now counts against no one.
            self._served.clear()
        if tenant not in self._queues:
            # One that was away starts level with the rest: idle time is not saved up.
            floor = min((self._served[other] for other in self._queues), default=0.0)
            self._served[tenant] = max(self._served.get(tenant, 0.0), floor)
            self._queues[tenant] = deque()
        queue = self._queues[tenant]
        queue.appendleft(sequence) if first else queue.append(sequence)
        self._length += 1

    def peek(self) -> Sequence | None:
        if not self._queues:
            return None
        return self._queues[min(self._queues, key=lambda tenant: self._served[tenant])][0]

    def remove(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        queue = self._queues[tenant]
        queue.remove(sequence)
        self._length -= 1
        if not queue:
            del self._queues[tenant]

    def charge(self, tenant: str, tokens: int) -> None:
        self._served[tenant] = self._served.get(tenant, 0.0) + tokens
        if len(self._served) > 10_000:  # tenants come and go: forget those with nothing waiting
            self._served = {t: v for t, v in self._served.items() if t in self._queues}


class Scheduler:
    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self.pool = pool
        self.limits = limits
        # Every running choice can take a step, however small the budget was set.
        self.budget = max(limits.step_tokens, limits.max_running)
        self.waiting = FairQueue()
        self.running: dict[Sequence, None] = {}  # in the order of admission
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Raises `QueueFull` at once rather than let a client wait for nothing."""
        if len(self.waiting) >= self.limits.max_queue:
            raise QueueFull
        self.waiting.add(sequence)

    def schedule(self) -> Plan:
        plan = Plan()
        budget = self.budget
        # Choices that need one token come first: a long prompt must not stall them.
        for sequence in sorted(self.running, key=lambda s: (s.needed > 1, s.arrival)):
            if budget > 0 and sequence.needed and sequence in self.running:
                budget -= self._take(plan, sequence, budget)
        while budget > 0 and (admitted := self._admissible()) is not None:
            self.waiting.remove(admitted)
            self.running[admitted] = None
            budget -= self._take(plan, admitted, budget)
        return plan

    def complete(self, item: Scheduled) -> None:
        """Books an executed item: its tokens are computed, and its full blocks can be found by others."""
        sequence = item.sequence
        sequence.computed = item.start + item.count
        for fork in item.draws:
            fork.computed = sequence.computed
        self.waiting.charge(sequence.request.tenant, item.count)
        if not sequence.request.use_cache:
            return
        while (len(sequence.names) + 1) * BLOCK_SIZE <= sequence.computed:
            index = len(sequence.names)
            tokens = sequence.tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
            mark = sequence.pictures.mark(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE) if sequence.pictures else b""
            name = chain(sequence.names[-1] if sequence.names else ROOT, tokens, mark)
            self.pool.name(sequence.blocks[index], name)
            sequence.names.append(name)

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is, and gives its blocks back."""
        if sequence in self.running:
            del self.running[sequence]
        else:
            self.waiting.remove(sequence)
        self._vacate(sequence)

    def _take(self, plan: Plan, sequence: Sequence, budget: int) -> int:
        """Adds what fits of a sequence to the plan, and says how much of the budget that takes: a token for each, and
        where streams are waiting for this step, more for those that have much to look back on."""
        stretch = ATTENTION_SPAN
        if sequence.needed > 1 and any(item.draws for item in plan.items):
            stretch += sequence.computed
        count = min(sequence.needed, max(1, budget * ATTENTION_SPAN // stretch))
        if sequence.scoring:
            count = min(count, SCORING_CHUNK)
        if sequence.pictures is not None:
            count = sequence.pictures.chunk_end(sequence.computed, sequence.computed + count) - sequence.computed
        while True:
            try:
                self._reserve(plan, sequence, sequence.computed + count)
                break
            except OutOfBlocks:
                if not self._preempt(plan, sequence):
                    return 0
        item = Scheduled(sequence, sequence.computed, count)
        if item.start + count == len(sequence.tokens):
            forks = self._fork(sequence)
            item.draws = [sequence, *forks]
            plan.forks += forks
        plan.items.append(item)
        return -(-count * stretch // ATTENTION_SPAN)

    def _reserve(self, plan: Plan, sequence: Sequence, tokens: int) -> None:
        """Sees that blocks for `tokens` tokens are there, and that the ones to be written are its own."""
        last = sequence.computed // BLOCK_SIZE
        if last < len(sequence.blocks) and self.pool.users(sequence.blocks[last]) > 1:
            copy = self.pool.allocate()
            plan.copies.append((sequence.blocks[last], copy))
            self.pool.release([sequence.blocks[last]])
            sequence.blocks[last] = copy
        for _ in range(sequence.blocks_for(tokens)):
            sequence.blocks.append(self.pool.allocate())

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        """The siblings of a sequence whose prompt is done after this step: same blocks, same logits, own noise."""
        forks = [sequence.fork(sequence.choice + 1 + i) for i in range(sequence.siblings)]
        sequence.siblings = 0
        for fork in forks:
            for block in fork.blocks:
                self.pool.share(block)
        self.running.update(dict.fromkeys(forks))
        return forks

    def _preempt(self, plan: Plan, needy: Sequence) -> bool:
        """Sends the youngest back to the queue to be recomputed. False: that was the needy one itself."""
        planned = {s for item in plan.items for s in (item.sequence, *item.draws)}
        idle = [s for s in self.running if s not in planned]
        victim = max(idle, key=lambda s: (s.arrival, s.choice, s is needy))
        del self.running[victim]
        # A copy that was planned for it must not land in a block that somebody else gets.
        plan.copies[:] = [(source, target) for source, target in plan.copies if target not in victim.blocks]
        self._vacate(victim)
        self.waiting.add(victim, first=True)
        self.preemptions += 1
        return victim is not needy

    def _vacate(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.names, sequence.computed = [], [], 0

    def _admissible(self) -> Sequence | None:
        """The next in line, if there is room for all its known tokens; its cached prefix is taken over."""
        sequence = self.waiting.peek()
        if sequence is None:
            return None
        choices = 1 + sequence.siblings
        # Choices that are still to fork have their places already.
        taken = sum(1 + running.siblings for running in self.running)
        if self.running and taken + choices > self.limits.max_running:
            return None
        blocks: list[int] = []
        names: list[bytes] = []
        if sequence.request.use_cache and not sequence.scoring:
            blocks, names = self._cached_prefix(sequence)
        for block in blocks:
            self.pool.share(block)
        # One block more than it needs now, so that admitting it does not at once preempt somebody.
        wanted = -(-len(sequence.tokens) // BLOCK_SIZE) - len(blocks)
        if self.running and self.pool.available < wanted + 1:
            self.pool.release(blocks)
            return None
        sequence.blocks, sequence.names = blocks, names
        sequence.computed = len(blocks) * BLOCK_SIZE
        if sequence.cached < 0:
            sequence.cached = sequence.computed
        return sequence

    def _cached_prefix(self, sequence: Sequence) -> tuple[list[int], list[bytes]]:
        pictures = sequence.pictures
        if pictures is None:
            return self.pool.find(sequence.tokens)
        blocks, names = self.pool.find(sequence.tokens, pictures.mark)
        count = len(blocks)
        while (begin := pictures.chunk_begin(count * BLOCK_SIZE)) < count * BLOCK_SIZE:
            count = begin // BLOCK_SIZE
        return blocks[:count], names[:count]
