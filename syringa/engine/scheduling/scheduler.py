"""Decide which tokens the next step computes. Torch-free.

There are no prefill and decode phases. A sequence has known tokens and computed tokens, and a step lets some sequences
catch up: by one token for a choice that is being generated, by a chunk for a prompt, from the start after a preemption.

Tenants share the engine fairly: the budget that generation leaves goes to the prompt, running or waiting, of the tenant
that was served the fewest tokens, and a tenant with nothing running is admitted at the expense of one above its share.

Background requests get what is left of a step after all others (`request_class`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from operator import attrgetter

from syringa.engine.scheduling import preemption
from syringa.engine.scheduling.isolation import IsolationQueue
from syringa.engine.scheduling.kv_cache import (
    BLOCK_SIZE,
    BlockPool,
    OutOfBlocks,
    cache_full_blocks,
    free_blocks,
    reserve_blocks,
    roll_back_blocks,
)
from syringa.engine.scheduling.limits import (
    PROMPT_QUANTUM_STEPS,
    SCORING_CHUNK,
    SCORING_ROWS,
    AdmissionMode,
    QueueFull,
    SchedulerLimits,
)
from syringa.engine.scheduling.oom import OOMBackoff
from syringa.engine.scheduling.preemption import promised_blocks
from syringa.engine.scheduling.request_class import BackgroundSteps, RequestClass, is_background
from syringa.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from syringa.engine.scheduling.sequence import Sequence
from syringa.engine.scheduling.state_cache import StateCache


class Scheduler:
    def __init__(self, pool: BlockPool, limits: SchedulerLimits, states: StateCache | None = None) -> None:
        self.pool = pool
        self.states = states  # of a hybrid model
        self.limits = limits
        # Every running choice gets its token in each step, however small the budget was set, unless memory is short.
        self.budget = max(limits.step_tokens, limits.max_running)
        self.oom_backoff = OOMBackoff(self.budget)
        quantum = PROMPT_QUANTUM_STEPS * self.budget
        self.interactive = RequestClass(quantum, background=False)
        self.background = RequestClass(quantum, background=True)
        self.background_steps = BackgroundSteps(self.budget)
        self.waiting = self.interactive.waiting
        self.isolation = IsolationQueue()
        self.running: dict[Sequence, None] = {}  # in the order of admission
        self.preemptions = 0

    @property
    def has_requests(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self.running or len(self.waiting) or len(self.background.waiting) or self.isolation.active)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises `QueueFull`, but not for one that has begun in another worker.

        A background sequence waits however many others do: the API servers bound what they run of batches.
        """
        queue = self._class_of(sequence).waiting
        accepted = sequence.begun or is_background(sequence)
        if not accepted and len(queue) + len(self.isolation) >= self.limits.max_queue:
            raise QueueFull
        (queue if sequence.request.isolation == "none" else self.isolation).add(sequence)

    def displaced_by(self, sequence: Sequence) -> Sequence | None:
        """Return the waiting sequence that a full queue drops for another; None if its tenant has its share of it."""
        return self.waiting.displaced_by(sequence.request.tenant, self.limits.max_queue)

    def schedule(self, *, in_flight: bool = False) -> SchedulerOutput:
        """`in_flight`: whether the step before may still be running on a device."""
        if retry := self._schedule_oom_group():
            return retry
        if self.isolation.active and (alone := self._schedule_isolated(in_flight=in_flight)) is not None:
            return alone
        output = SchedulerOutput()
        left = self._schedule_class(output, self.interactive, self.oom_backoff.limit)
        if left > 0 and not len(self.waiting) and (self.background.running_counts or len(self.background.waiting)):
            self._schedule_class(output, self.background, min(left, self.background_steps.limit(output)))
        return output

    def _schedule_class(self, output: SchedulerOutput, requests: RequestClass, budget: int) -> int:
        """Add the requests of a class to the output, and return what is left of the budget."""
        decoding: list[Sequence] = []
        prompts: dict[str, deque[Sequence]] = {}
        for sequence in sorted(self.running, key=attrgetter("arrival")):
            if sequence.request.background is not requests.background:
                continue
            if sequence.needed > 1:
                prompts.setdefault(sequence.request.tenant, deque()).append(sequence)
            elif sequence.needed:
                decoding.append(sequence)
        counters = requests.token_counters
        counters.begin_step(prompts.keys() | requests.waiting.tenants)
        if budget <= 0:
            return 0
        mode = self._admit_idle_tenants(output, requests, prompts)
        # Choices that need one token come first: a long prompt must not stall them.
        for sequence in decoding:
            if budget > 0 and sequence in self.running:
                cost = self._schedule_sequence(output, sequence, budget)
                budget -= cost
                counters.charge(sequence.request.tenant, cost)
        if budget > 0:
            for sequence in self._next_prompts(output, requests, prompts, mode):
                cost = self._schedule_sequence(output, sequence, budget)
                budget -= cost
                done = cost > 0 and bool(output.scheduled[-1].sampled)
                counters.charge_prompt(sequence.request.tenant, cost, done=done)
                if budget <= 0:
                    break
        return budget

    def may_interrupt(self, output: SchedulerOutput) -> bool:
        """Return whether a step may be given up for a request that arrives: one of background requests alone."""
        if self.states is not None or self.isolation.active or self.oom_backoff.group is not None:
            return False
        if self.background_steps.protected:
            return False
        return all(is_background(item.sequence) for item in output.scheduled)

    def interrupt(self, output: SchedulerOutput) -> None:
        """Undo an output that was given up."""
        self._undo(output, copied=True)
        self.background_steps.record_interruption()

    def roll_back(self, output: SchedulerOutput, *, copied: bool) -> list[Sequence]:
        """Undo an output that ran out of memory; smaller ones follow. Return the sequences whose requests must fail."""
        remaining = self._undo(output, copied=copied)
        return self.oom_backoff.record_failure(remaining, tokens=output.tokens, alone=len(output.scheduled) == 1)

    def drop_forked_states(self, output: SchedulerOutput) -> None:
        """Go on after an output that was computed, but whose states could not be copied: new forks start over."""
        assert self.states is not None
        self.states.roll_back(output, copied=True)
        for fork in output.forks:
            if fork in self.running:
                self._preempt(output, fork)

    def _undo(self, output: SchedulerOutput, *, copied: bool) -> list[ScheduledSequence]:
        """Undo an output that was not computed, and return its items whose sequences still run.

        Sequences keep what they had computed before. New forks start over, and so do, if blocks and states were not
        `copied`, sequences that were to get a copy. Those of a hybrid model all start over: some layers may have
        advanced their states already.
        """
        targets = set() if copied else {target for _, target in output.copies}
        slots = set() if copied else {target for _, target in output.state_copies}
        lost = {s for s in self.running if targets.intersection(s.block_table) or s.state_slot in slots}
        lost.update(output.forks, roll_back_blocks(self.pool, output))
        for sequence in sorted(lost, key=preemption.age, reverse=True):
            if sequence in self.running:
                self._preempt(output, sequence)
        remaining = [item for item in output.scheduled if item.sequence in self.running]
        if self.states is not None:
            self.states.roll_back(output, copied=copied)
            for item in remaining:
                free_blocks(self.pool, item.sequence)
                self.states.restart(output, item.sequence)
        return remaining

    def complete(self, item: ScheduledSequence) -> None:
        """Mark an item as computed, and add its full blocks to the prefix cache."""
        sequence = item.sequence
        sequence.computed = item.start + item.count
        for fork in item.sampled:
            if fork.block_table:  # a fork without a slot for its state was preempted
                fork.computed = sequence.computed
        self.cache_full_blocks(sequence)

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Add the full blocks of a sequence to the prefix cache, as far as the host knows their tokens."""
        cache_full_blocks(self.pool, sequence)
        if self.states is not None:
            self.states.save_snapshots(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Remove a running or waiting sequence and release its blocks."""
        if sequence in self.running:
            self._remove_running(sequence)
        elif not self.isolation.remove(sequence):
            self._class_of(sequence).waiting.remove(sequence)
        free_blocks(self.pool, sequence)
        if self.states is not None:
            self.states.release(None, sequence)
        self.oom_backoff.forget(sequence)

    def _schedule_oom_group(self) -> SchedulerOutput | None:
        """Return a part of an output that ran out of memory, if any is left to retry."""
        while (group := self.oom_backoff.group) is not None:
            output = SchedulerOutput()
            budget = self.oom_backoff.limit
            for sequence in group:
                if budget > 0 and sequence in self.running and sequence.needed:
                    cost = self._schedule_sequence(output, sequence, budget)
                    budget -= cost
                    self._class_of(sequence).token_counters.charge(sequence.request.tenant, cost)
            if output.scheduled:
                return output
            self.oom_backoff.skip_group()
        return None

    def _schedule_isolated(self, *, in_flight: bool) -> SchedulerOutput | None:
        """Return an output with nothing but the request that is computed alone; None if there is none any more."""
        isolation, output = self.isolation, SchedulerOutput()
        isolation.release(self.running)
        if isolation.current is None:
            if not len(isolation):
                return None
            if in_flight:
                return output  # let it end: it may have other requests
            first = isolation.head()
            self._class_of(first).waiting.add(first, first=True)
            while not self._admit(output, first):
                self._preempt(output, max(self.running, key=preemption.age))
            isolation.start()
        assert isolation.current is not None
        request, budget = isolation.current.request, self.oom_backoff.limit
        for sequence in [each for each in self.running if each.request is request]:
            if budget > 0 and sequence in self.running and sequence.needed:
                cost = self._schedule_sequence(output, sequence, budget)
                budget -= cost
                self._class_of(sequence).token_counters.charge(request.tenant, cost)
        return output

    def _schedule_sequence(self, output: SchedulerOutput, sequence: Sequence, budget: int) -> int:
        """Add as much of a sequence to the output as fits, and return what it costs of the budget.

        A token costs one, and more behind a long context in a step that streams are waiting for.
        """
        span = stretch = self.limits.attention_span
        if sequence.needed > 1 and any(item.sampled for item in output.scheduled):
            stretch += sequence.computed
        count = min(sequence.needed, max(1, budget * span // stretch), self.oom_backoff.token_limit(sequence))
        if sequence.scoring:
            rows = SCORING_ROWS - sum(item.count for item in output.scheduled if item.sequence.scoring)
            count = min(count, SCORING_CHUNK, rows)
            if count < 1:
                return 0
        if sequence.prompt_images is not None:
            count = sequence.prompt_images.chunk_end(sequence.computed, sequence.computed + count) - sequence.computed
        if self.states is not None:
            count = self.states.chunk_end(sequence, sequence.computed + count) - sequence.computed
        while True:
            try:
                reserve_blocks(self.pool, output, sequence, sequence.computed + count)
                break
            except OutOfBlocks:
                if not self._preempt_for(output, sequence):
                    return 0
        if not sequence.begun:
            sequence.begun = True
            output.begun.append(sequence)
        item = ScheduledSequence(sequence, sequence.computed, count)
        if self.states is not None:
            self.states.plan_snapshot(output, item)
        if item.start + count == len(sequence.tokens):
            forks = self._fork(output, sequence)
            item.sampled = [sequence, *forks]
            output.forks += forks
        output.scheduled.append(item)
        return -(-count * stretch // span)

    def _fork(self, output: SchedulerOutput, sequence: Sequence) -> list[Sequence]:
        """Create the siblings of a sequence whose prompt completes: same blocks, same logits, own noise."""
        forks = [sequence.fork(sequence.choice + 1 + i) for i in range(sequence.siblings)]
        sequence.siblings = 0
        for fork in forks:
            for block in fork.block_table:
                self.pool.share(block)
            self._add_running(fork)
            if self.states is not None and not self.states.fork(output, sequence, fork):
                self._preempt(output, fork)
        return forks

    def _preempt_for(self, output: SchedulerOutput, requester: Sequence) -> bool:
        """Preempt the sequence that has to give its blocks to `requester`. False if that is `requester` itself."""
        if self._preempt_background(output, requester):
            return True
        running = [s for s in self.running if is_background(s) == is_background(requester)]
        scheduled = {s for item in output.scheduled for s in (item.sequence, *item.sampled)}
        unscheduled = [s for s in running if s not in scheduled]
        removable = {item.sequence for item in output.scheduled if item.count == 1 and item.sampled == [item.sequence]}
        victim = preemption.select_victim(running, unscheduled, removable, requester)
        if victim in scheduled:
            output.scheduled.remove(next(item for item in output.scheduled if item.sequence is victim))
            self._class_of(victim).token_counters.charge(victim.request.tenant, -1)
        self._preempt(output, victim)
        return victim is not requester

    def _preempt(self, output: SchedulerOutput, victim: Sequence) -> None:
        """Move a running sequence back to the head of its queue, to be recomputed."""
        self._remove_running(victim)
        # A copy planned for the victim must not overwrite a block that another sequence gets.
        output.copies[:] = [(source, target) for source, target in output.copies if target not in victim.block_table]
        free_blocks(self.pool, victim)
        if self.states is not None:
            self.states.release(output, victim)
        self._class_of(victim).waiting.add(victim, first=True)
        self.preemptions += 1

    def _preempt_background(self, output: SchedulerOutput, requester: Sequence) -> bool:
        """Preempt the youngest background sequence for one that is not. False if there is none."""
        if is_background(requester) or not self.background.running_counts:
            return False
        scheduled = {s for item in output.scheduled for s in (item.sequence, *item.sampled)}
        candidates = [s for s in self.running if is_background(s) and s not in scheduled]
        if candidates:
            self._preempt(output, max(candidates, key=preemption.age))
        return bool(candidates)

    def _class_of(self, sequence: Sequence) -> RequestClass:
        return self.background if is_background(sequence) else self.interactive

    def _add_running(self, sequence: Sequence) -> None:
        self.running[sequence] = None
        self._class_of(sequence).add_running(sequence.request.tenant)

    def _remove_running(self, sequence: Sequence) -> None:
        del self.running[sequence]
        self._class_of(sequence).remove_running(sequence.request.tenant)

    def _admit_idle_tenants(
        self, output: SchedulerOutput, requests: RequestClass, prompts: dict[str, deque[Sequence]]
    ) -> AdmissionMode:
        """Admit the first waiting sequence of the least served tenants with nothing running, preempting if needed.

        Called before anything is scheduled, so that every running sequence can be preempted.
        """
        active = [*prompts, *(tenant for tenant in requests.waiting.tenants if tenant not in prompts)]
        if len(active) + len(requests.running_counts) < 2 or not len(requests.waiting):
            return AdmissionMode.OPEN
        for tenant in requests.token_counters.order(active, requests.request_count):
            if tenant in requests.running_counts:
                break
            sequence = requests.waiting.head(tenant)
            if not self._admit(output, sequence, reclaim=True):
                return AdmissionMode.CLOSED
            prompts[tenant] = deque([sequence])
        return AdmissionMode.OPEN

    def _next_prompts(
        self,
        output: SchedulerOutput,
        requests: RequestClass,
        prompts: dict[str, deque[Sequence]],
        mode: AdmissionMode,
    ) -> Iterator[Sequence]:
        """Yield prompts in fair order, admitting waiting ones as they come up.

        Admission stops at the first one that does not fit, because others that fit could overtake it for ever.
        """
        while True:
            waiting = [t for t in requests.waiting.tenants if t not in prompts and requests.may_admit(t, mode)]
            if not (active := [*prompts, *waiting]):
                return
            order = requests.token_counters.order
            tenant = active[0] if len(active) == 1 else order(active, requests.request_count)[0]
            if queue := prompts.get(tenant):
                sequence = queue.popleft()
                if not queue:
                    del prompts[tenant]
                if sequence in self.running:
                    yield sequence
            elif self._admit(output, sequence := requests.waiting.head(tenant)):
                yield sequence
            else:
                mode = AdmissionMode.IDLE_TENANTS if tenant in requests.running_counts else AdmissionMode.CLOSED

    def _admit(self, output: SchedulerOutput, sequence: Sequence, *, reclaim: bool = False) -> bool:
        """Move a waiting sequence to the running ones if all its known tokens fit, reusing its cached prefix.

        Background sequences are preempted for others, and with `reclaim`, so are those of tenants above their fair
        share.
        """
        if sequence.pending:  # just preempted: its last token has not been read yet
            return False
        most = self.limits.max_running
        while (missing_slots := preemption.missing_slots(self.running, sequence, most)) > 0:
            if not self._preempt_background(output, sequence):
                break
        if self.running and missing_slots > 0 and not reclaim:
            return False
        blocks: list[int] = []
        hashes: list[bytes] = []
        if sequence.request.use_cache and not sequence.scoring:
            blocks, hashes = sequence.find_cached_prefix(self.pool)
        if self.states is not None:
            blocks, hashes = self.states.usable_prefix(sequence, blocks, hashes)
        for block in blocks:
            self.pool.share(block)
        # One block more than it needs now, so that admitting it does not cause a preemption right away.
        wanted = -(-len(sequence.tokens) // BLOCK_SIZE) - len(blocks) + 1 + promised_blocks(self.running, sequence)
        while (missing := wanted - self.pool.available) > 0 and self._preempt_background(output, sequence):
            pass
        short = self.running and (missing_slots > 0 or missing > 0)
        if short and not (reclaim and self._reclaim(output, self._class_of(sequence), missing_slots, missing)):
            self.pool.release(blocks)
            return False
        while self.states is not None and not self.states.admit(output, sequence, hashes):
            if not self._preempt_background(output, sequence):
                self.pool.release(blocks)
                return False
        sequence.block_table, sequence.block_hashes = blocks, hashes
        sequence.computed = len(blocks) * BLOCK_SIZE
        if sequence.cached < 0:
            sequence.cached = sequence.computed
        self._class_of(sequence).waiting.remove(sequence)
        self._add_running(sequence)
        return True

    def _reclaim(self, output: SchedulerOutput, requests: RequestClass, slots: int, blocks: int) -> bool:
        """Preempt sequences of tenants above their fair share to free `slots` and `blocks`. False if impossible."""
        tenants = len(requests.waiting.tenants | requests.running_counts.keys())
        target = preemption.ReclaimTarget(slots, blocks, self.limits.max_running / tenants, self.pool.total / tenants)
        ref_counts = Counter({block: self.pool.ref_count(block) for s in self.running for block in s.block_table})
        running = [s for s in self.running if is_background(s) is requests.background]
        victims = preemption.select_victims(running, ref_counts, target)
        for victim in victims:
            self._preempt(output, victim)
        return bool(victims)
