"""An engine without a model for tests of the scheduler.

Its cache holds, per slot, a hash of the tokens it was computed from, so an error in the block bookkeeping shows as a
slot that does not match the sequence that reads it.
"""

from __future__ import annotations

from syringa.engine.sampling.sampler_input import SamplerState
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE, BlockPool
from syringa.engine.scheduling.limits import SCORING_CHUNK, SchedulerLimits
from syringa.engine.scheduling.scheduler import Scheduler
from syringa.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from syringa.engine.scheduling.sequence import Sequence, StepTime
from syringa.types import EngineRequest, Isolation, SamplingParams, StopConditions, TokenLogprobs
from tests.engine.scheduling.test_kv_cache import check_pool

SAMPLING = SamplingParams(seed=0)


def sequence(
    prompt: list[int],
    *,
    tenant: str = "",
    choices: int = 1,
    max_tokens: int = 4,
    use_cache: bool = True,
    scoring: bool = False,
    isolation: Isolation = "none",
    background: bool = False,
) -> Sequence:
    request = EngineRequest(
        id="",
        prompt=prompt,
        sampling=SAMPLING,
        stopping=StopConditions(max_tokens=max_tokens),
        choices=choices,
        tenant=tenant,
        cache_key=tenant.encode(),
        use_cache=use_cache,
        isolation=isolation,
        background=background,
    )
    return Sequence(
        request,
        0,
        SamplerState(SAMPLING),
        tokens=list(prompt),
        siblings=choices - 1,
        prompt_scores=[None] if scoring else None,
    )


class ModelFreeEngine:
    """`step` schedules, checks the output, "computes" it and samples made-up tokens."""

    def __init__(self, blocks: int, limits: SchedulerLimits | None = None, *, caching: bool = True) -> None:
        self.pool = BlockPool(blocks, caching=caching)
        self.scheduler = Scheduler(self.pool, limits or SchedulerLimits())
        self.slots: dict[int, int] = {}  # by slot: hash of the tokens up to and including its own
        self.histories: dict[Sequence, list[int]] = {}
        self.live: list[Sequence] = []
        self.waiting: dict[str, list[Sequence]] = {}  # not yet admitted, by tenant, in order of arrival
        self.finished: list[Sequence] = []
        self.steps = 0
        self.first_arrival: int | None = None  # makes tokens independent of earlier tests

    def submit(self, one: Sequence) -> Sequence:
        self.first_arrival = one.arrival if self.first_arrival is None else self.first_arrival
        self.scheduler.add(one)
        self.live.append(one)
        if not one.request.background:
            self.waiting.setdefault(one.request.tenant, []).append(one)
        return one

    def drop(self, one: Sequence) -> None:
        self.scheduler.finish(one)
        self.live.remove(one)
        queue = self.waiting.get(one.request.tenant, [])
        if one in queue:
            queue.remove(one)

    def step(self) -> SchedulerOutput:
        decoding = [s for s in self.scheduler.running if s.needed == 1]
        before = set(self.scheduler.running)
        output = self.scheduler.schedule()
        self.steps += 1
        self.live += output.forks
        self._check_admission_order(before)
        self._check_output(output, decoding)
        self._compute(output)
        for item in output.scheduled:
            self._score(item)
            self.scheduler.complete(item)
        for item in output.scheduled:
            for one in item.sampled:
                self._append_token(one)
        self.check()
        return output

    def run(self, steps: int = 3000) -> None:
        """Step until all sequences are finished, and check that nothing is left."""
        for _ in range(steps):
            if not self.live:
                break
            assert self.step().scheduled, "an empty step would repeat for ever"
        assert not self.live, "some sequences did not finish"
        assert not self.scheduler.running
        assert not self.scheduler.has_requests
        assert self.pool.free + self.pool.cached == self.pool.total

    def check(self) -> None:
        check_pool(self.pool, [one.block_table for one in self.live])
        tenants = {(block, one.request.tenant) for one in self.live for block in one.block_table}
        assert len({block for block, _ in tenants}) == len(tenants), "two tenants share a block"
        for one in self.live:
            assert one.computed <= len(one.tokens)
            assert len(one.block_table) == -(-one.computed // BLOCK_SIZE)
            if one not in self.scheduler.running:
                assert one.computed == 0

    def _check_admission_order(self, before: set[Sequence]) -> None:
        """Check that sequences of a tenant are admitted in order of arrival."""
        for one in self.scheduler.running:
            queue = self.waiting.get(one.request.tenant, [])
            if one not in before and one in queue:
                assert queue[0] is one
                queue.remove(one)

    def _check_output(self, output: SchedulerOutput, decoding: list[Sequence]) -> None:
        assert sum(item.count for item in output.scheduled) <= self.scheduler.budget
        scheduled = [item.sequence for item in output.scheduled]
        assert len(set(scheduled)) == len(scheduled)
        tables = {s: set(s.block_table) for s in self.live}
        for item in output.scheduled:
            one = item.sequence
            assert one in self.scheduler.running
            assert 0 < item.count <= one.needed
            assert item.start == one.computed
            assert bool(item.sampled) == (item.start + item.count == len(one.tokens))
            if one.scoring:
                assert item.count <= SCORING_CHUNK
                assert item.start == 0 or item.start < len(one.prompt_scores or [])
            # It writes only to its own blocks, or those it shares with forks of this step.
            written = {one.block_table[p // BLOCK_SIZE] for p in range(item.start, item.start + item.count)}
            assert all(s is one or s in item.sampled for s in self.live if tables[s] & written)
        targets = [target for _, target in output.copies]
        assert len(set(targets)) == len(targets)
        for target in targets:
            owners = [s for s in self.live if target in tables[s]]
            assert owners
            assert len({id(s.request) for s in owners}) == 1
        if len(decoding) <= self.scheduler.budget and not self.scheduler.isolation.active:
            for one in decoding:  # a decoding sequence is scheduled unless it was preempted or runs in the background
                assert one in scheduled or one not in self.scheduler.running or one.request.background

    def _compute(self, output: SchedulerOutput) -> None:
        copied = [
            (target * BLOCK_SIZE + i, self.slots.get(source * BLOCK_SIZE + i))
            for source, target in output.copies
            for i in range(BLOCK_SIZE)
        ]
        for slot, content in copied:
            if content is not None:
                self.slots[slot] = content
        for item in output.scheduled:
            one, histories = item.sequence, self._histories(item.sequence)
            for position in range(item.start, item.start + item.count):
                self.slots[one.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE] = histories[
                    position
                ]
        for item in output.scheduled:  # what attention would read
            self._check_contents(item.sequence, item.start + item.count)

    def _check_contents(self, one: Sequence, count: int) -> None:
        slots = (block * BLOCK_SIZE + i for block in one.block_table for i in range(BLOCK_SIZE))
        assert [self.slots.get(slot) for slot, _ in zip(slots, range(count), strict=False)] == self._histories(one)[
            :count
        ]

    def _histories(self, one: Sequence) -> list[int]:
        known = self.histories.setdefault(one, [])
        for token in one.tokens[len(known) :]:  # tokens are only appended
            known.append(hash((known[-1] if known else 0, token)))
        return known

    def _score(self, item: ScheduledSequence) -> None:
        scores = item.sequence.prompt_scores
        if scores is not None and item.sequence.scoring:
            end = min(item.start + item.count + 1, item.sequence.prompt_length)
            scores += [TokenLogprobs(0, 0.0)] * (end - len(scores))

    def _append_token(self, one: Sequence) -> None:
        assert not one.scoring
        one.tokens.append(hash((one.arrival - (self.first_arrival or 0), one.choice, one.generated)) % 3)
        one.last_step = StepTime()
        if one.generated >= one.request.stopping.max_tokens:
            self.finished.append(one)
            self.drop(one)
