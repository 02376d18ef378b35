"""Which tokens the next step computes.

There are no phases. A sequence has known tokens and computed ones, and a step lets some catch up: one token for a
choice that is being generated, a chunk for a prompt, everything again for one that was preempted. Torch-free.

Tenants share fairly: the part of the budget that generation leaves goes to the prompt of whoever was given the least,
be it running or waiting, and a tenant with nothing running gets a place from one that has more than its share.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from operator import attrgetter

from syringa.engine.scheduling import blocks as cache_blocks
from syringa.engine.scheduling import preemption
from syringa.engine.scheduling.fair_queue import FairQueue, Turns
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE, BlockPool, OutOfBlocks
from syringa.engine.scheduling.limits import SCORING_CHUNK, SCORING_ROWS, TURN_STEPS, Entry, Limits, QueueFull
from syringa.engine.scheduling.oom import Relief
from syringa.engine.scheduling.scheduler_output import Plan, Scheduled
from syringa.engine.scheduling.sequence import Sequence

__all__ = ["SCORING_CHUNK", "TURN_STEPS", "Limits", "QueueFull", "Scheduler"]


class Scheduler:
    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self.pool = pool
        self.limits = limits
        # Every running choice can take a step, however small the budget was set, unless memory is short.
        self.budget = max(limits.step_tokens, limits.max_running)
        self.relief = Relief(self.budget)
        self.waiting = FairQueue()
        self.turns = Turns(TURN_STEPS * self.budget)
        self.running: dict[Sequence, None] = {}  # in the order of admission
        self.preemptions = 0
        self._counts: Counter[str] = Counter()  # how many each tenant has running; no zeros

    def add(self, sequence: Sequence) -> None:
        """Raises `QueueFull` at once rather than let a client wait for nothing."""
        if len(self.waiting) >= self.limits.max_queue:
            raise QueueFull
        self.waiting.add(sequence)

    def displaced_by(self, tenant: str) -> Sequence | None:
        """Which waiting sequence has to go when the queue is full and `tenant` has less than its share of it."""
        return self.waiting.displaced_by(tenant, self.limits.max_queue)

    def schedule(self) -> Plan:
        if plan := self._part():
            return plan
        plan = Plan()
        budget = self.relief.limit
        decoding: list[Sequence] = []
        prompts: dict[str, deque[Sequence]] = {}
        for sequence in sorted(self.running, key=attrgetter("arrival")):
            if sequence.needed > 1:
                prompts.setdefault(sequence.request.tenant, deque()).append(sequence)
            elif sequence.needed:
                decoding.append(sequence)
        self.turns.begin(prompts.keys() | self.waiting.tenants)
        entry = self._give_places(plan, prompts)
        # Choices that need one token come first: a long prompt must not stall them.
        for sequence in decoding:
            if budget > 0 and sequence in self.running:
                taken = self._take(plan, sequence, budget)
                budget -= taken
                self.turns.charge(sequence.request.tenant, taken)
        if budget > 0:
            for sequence in self._prompts(plan, prompts, entry):
                taken = self._take(plan, sequence, budget)
                budget -= taken
                done = taken > 0 and bool(plan.items[-1].draws)
                self.turns.charge_prompt(sequence.request.tenant, taken, done=done)
                if budget <= 0:
                    break
        return plan

    def undo(self, plan: Plan, *, copied: bool) -> list[Sequence]:
        """A plan found too little memory: what it was to compute is not, and smaller ones follow. Returns those whose
        requests are to be given up.

        Who has lost nothing keeps what was computed before. Choices that were to part from another begin again by
        themselves, and so does, if blocks were not `copied`, who was to get a copy.
        """
        targets = set() if copied else {target for _, target in plan.copies}
        lost = {s for s in self.running if targets.intersection(s.blocks)}
        lost.update(plan.forks, cache_blocks.take_back(self.pool, plan))
        for sequence in sorted(lost, key=preemption.age, reverse=True):
            if sequence in self.running:
                self._send_back(plan, sequence)
        left = [item for item in plan.items if item.sequence in self.running]
        tokens = sum(item.count for item in plan.items)
        return self.relief.failed(left, tokens=tokens, alone=len(plan.items) == 1)

    def complete(self, item: Scheduled) -> None:
        """Books an executed item: its tokens are computed, and its full blocks can be found by others."""
        sequence = item.sequence
        sequence.computed = item.start + item.count
        for fork in item.draws:
            fork.computed = sequence.computed
        self.publish(sequence)

    def publish(self, sequence: Sequence) -> None:
        """Names the blocks that are full, as far as their tokens are known."""
        cache_blocks.publish(self.pool, sequence)

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is, and gives its blocks back."""
        if sequence in self.running:
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)
        cache_blocks.vacate(self.pool, sequence)
        self.relief.forget(sequence)

    def _part(self) -> Plan | None:
        """A part of a plan that found too little memory."""
        while (group := self.relief.group) is not None:
            plan = Plan()
            budget = self.relief.limit
            for sequence in group:
                if budget > 0 and sequence in self.running and sequence.needed:
                    taken = self._take(plan, sequence, budget)
                    budget -= taken
                    self.turns.charge(sequence.request.tenant, taken)
            if plan.items:
                return plan
            self.relief.skip()
        return None

    def _take(self, plan: Plan, sequence: Sequence, budget: int) -> int:
        """Adds what fits of a sequence to the plan, and says how much of the budget that takes: a token for each, and
        where streams are waiting for this step, more for those that have much to look back on."""
        span = stretch = self.limits.attention_span
        if sequence.needed > 1 and any(item.draws for item in plan.items):
            stretch += sequence.computed
        count = min(sequence.needed, max(1, budget * span // stretch), self.relief.share(sequence))
        if sequence.scoring:
            rows = SCORING_ROWS - sum(item.count for item in plan.items if item.sequence.scoring)
            count = min(count, SCORING_CHUNK, rows)
            if count < 1:
                return 0
        if sequence.pictures is not None:
            count = sequence.pictures.chunk_end(sequence.computed, sequence.computed + count) - sequence.computed
        while True:
            try:
                cache_blocks.reserve(self.pool, plan, sequence, sequence.computed + count)
                break
            except OutOfBlocks:
                if not self._preempt(plan, sequence):
                    return 0
        if not sequence.begun:
            sequence.begun = True
            plan.begun.append(sequence)
        item = Scheduled(sequence, sequence.computed, count)
        if item.start + count == len(sequence.tokens):
            forks = self._fork(sequence)
            item.draws = [sequence, *forks]
            plan.forks += forks
        plan.items.append(item)
        return -(-count * stretch // span)

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        """The siblings of a sequence whose prompt is done after this step: same blocks, same logits, own noise."""
        forks = [sequence.fork(sequence.choice + 1 + i) for i in range(sequence.siblings)]
        sequence.siblings = 0
        for fork in forks:
            for block in fork.blocks:
                self.pool.share(block)
            self._enter(fork)
        return forks

    def _preempt(self, plan: Plan, needy: Sequence) -> bool:
        """Sends somebody back to the queue to be recomputed: the youngest, or what fairness between tenants has in its
        place. False: that was the needy one itself."""
        planned = {s for item in plan.items for s in (item.sequence, *item.draws)}
        idle = [s for s in self.running if s not in planned]
        movable = {item.sequence for item in plan.items if item.count == 1 and item.draws == [item.sequence]}
        victim = preemption.victim(self.running, idle, movable, needy)
        if victim in planned:
            plan.items.remove(next(item for item in plan.items if item.sequence is victim))
            self.turns.charge(victim.request.tenant, -1)
        self._send_back(plan, victim)
        return victim is not needy

    def _send_back(self, plan: Plan, victim: Sequence) -> None:
        self._leave(victim)
        # A copy that was planned for it must not land in a block that somebody else gets.
        plan.copies[:] = [(source, target) for source, target in plan.copies if target not in victim.blocks]
        cache_blocks.vacate(self.pool, victim)
        self.waiting.add(victim, first=True)
        self.preemptions += 1

    def _enter(self, sequence: Sequence) -> None:
        self.running[sequence] = None
        self._counts[sequence.request.tenant] += 1

    def _leave(self, sequence: Sequence) -> None:
        del self.running[sequence]
        tenant = sequence.request.tenant
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]

    def _give_places(self, plan: Plan, prompts: dict[str, deque[Sequence]]) -> Entry:
        """Lets in the first in line of each tenant that has nothing running and was given the least, if need be at the
        expense of one that has more than its share. Before anything is planned, so that everybody can be sent back."""
        asking = [*prompts, *(tenant for tenant in self.waiting.tenants if tenant not in prompts)]
        if len(asking) + len(self._counts) < 2 or not len(self.waiting):
            return Entry.OPEN
        for tenant in self.turns.order(asking, self._size):
            if tenant in self._counts:
                break
            sequence = self.waiting.head(tenant)
            if not self._admit(plan, sequence, claim=True):
                return Entry.CLOSED
            prompts[tenant] = deque([sequence])
        return Entry.OPEN

    def _prompts(self, plan: Plan, prompts: dict[str, deque[Sequence]], entry: Entry) -> Iterator[Sequence]:
        """Prompts in the order in which they are due. Those that wait are let in as their turn comes, until one of them
        does not fit: others that would must not overtake it for ever."""
        while True:
            asking = [*prompts, *(t for t in self.waiting.tenants if t not in prompts and self._may_enter(t, entry))]
            if not asking:
                return
            tenant = asking[0] if len(asking) == 1 else self.turns.order(asking, self._size)[0]
            if line := prompts.get(tenant):
                sequence = line.popleft()
                if not line:
                    del prompts[tenant]
                if sequence in self.running:
                    yield sequence
            elif self._admit(plan, sequence := self.waiting.head(tenant)):
                yield sequence
            else:
                entry = Entry.IDLE if tenant in self._counts else Entry.CLOSED

    def _size(self, tenant: str) -> int:
        return self._counts[tenant] + self.waiting.count(tenant)

    def _may_enter(self, tenant: str, entry: Entry) -> bool:
        return entry is Entry.OPEN or (entry is Entry.IDLE and tenant not in self._counts)

    def _admit(self, plan: Plan, sequence: Sequence, *, claim: bool = False) -> bool:
        """Lets a waiting sequence run if there is room for all its known tokens; its cached prefix is taken over.

        With `claim`, room is made at the expense of tenants that have more than their share.
        """
        if sequence.pending:  # it was sent back a moment ago: its last token is still to come
            return False
        # Choices that are still to fork have their places already.
        taken = sum(1 + running.siblings for running in self.running)
        places = taken + 1 + sequence.siblings - self.limits.max_running
        if self.running and places > 0 and not claim:
            return False
        blocks: list[int] = []
        names: list[bytes] = []
        if sequence.request.use_cache and not sequence.scoring:
            blocks, names = sequence.prefix_in(self.pool)
        for block in blocks:
            self.pool.share(block)
        # One block more than it needs now, so that admitting it does not at once preempt somebody.
        wanted = -(-len(sequence.tokens) // BLOCK_SIZE) - len(blocks) + 1 + self._promised(sequence.request.tenant)
        missing = wanted - self.pool.available
        if self.running and (places > 0 or missing > 0) and not (claim and self._claim(plan, places, missing)):
            self.pool.release(blocks)
            return False
        sequence.blocks, sequence.names = blocks, names
        sequence.computed = len(blocks) * BLOCK_SIZE
        if sequence.cached < 0:
            sequence.cached = sequence.computed
        self.waiting.remove(sequence)
        self._enter(sequence)
        return True

    def _promised(self, tenant: str) -> int:
        """Blocks that are still to be had by prompts which were let in because there was room for them: those of other
        tenants, and those that wait until there is a place for their scores."""
        return sum(s.blocks_for(len(s.tokens)) for s in self.running if s.scoring or s.request.tenant != tenant)

    def _claim(self, plan: Plan, places: int, blocks: int) -> bool:
        """Sends those back that hold what a tenant with nothing running is short of, if that is enough."""
        tenants = len(self.waiting.tenants | self._counts.keys())
        shortage = preemption.Shortage(places, blocks, self.limits.max_running / tenants, self.pool.total / tenants)
        users = Counter({block: self.pool.users(block) for s in self.running for block in s.blocks})
        givers = preemption.givers(self.running, users, shortage)
        for giver in givers:
            self._send_back(plan, giver)
        return bool(givers)
