"""An engine without a model, for tests of the scheduler: the cache holds, per slot, the history it was computed from.

Whatever the scheduler gets wrong about blocks shows here as a slot that holds another history than its reader's.
"""

from __future__ import annotations

from syringa.engine.sampling.rows import SamplerState
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE, BlockPool
from syringa.engine.scheduling.scheduler import SCORING_CHUNK, Limits, Plan, Scheduled, Scheduler
from syringa.engine.scheduling.sequence import Sequence
from syringa.types import EngineRequest, Sampling, Stopping, TokenLogprobs
from tests.engine.scheduling.test_kv_cache import check_pool

SAMPLING = Sampling(seed=0)


def sequence(
    prompt: list[int],
    *,
    tenant: str = "",
    choices: int = 1,
    max_tokens: int = 4,
    use_cache: bool = True,
    scoring: bool = False,
) -> Sequence:
    request = EngineRequest(
        id="",
        prompt=prompt,
        sampling=SAMPLING,
        stopping=Stopping(max_tokens=max_tokens),
        choices=choices,
        tenant=tenant,
        use_cache=use_cache,
    )
    return Sequence(
        request,
        0,
        SamplerState(SAMPLING),
        tokens=list(prompt),
        siblings=choices - 1,
        prompt_scores=[None] if scoring else None,
    )


class DryEngine:
    """`step` schedules, checks the plan, "computes" it and draws made-up tokens."""

    def __init__(self, blocks: int, limits: Limits | None = None, *, caching: bool = True) -> None:
        self.pool = BlockPool(blocks, caching=caching)
        self.scheduler = Scheduler(self.pool, limits or Limits())
        self.slots: dict[int, int] = {}  # slot → the hash of the tokens up to and including its own
        self.histories: dict[Sequence, list[int]] = {}
        self.live: list[Sequence] = []
        self.waiting: dict[str, list[Sequence]] = {}  # not yet begun, by tenant, in order of arrival
        self.finished: list[Sequence] = []
        self.steps = 0
        self.origin: int | None = None  # what arrivals are counted from: a run must not depend on those before it

    def submit(self, one: Sequence) -> Sequence:
        self.origin = one.arrival if self.origin is None else self.origin
        self.scheduler.add(one)
        self.live.append(one)
        self.waiting.setdefault(one.request.tenant, []).append(one)
        return one

    def drop(self, one: Sequence) -> None:
        self.scheduler.finish(one)
        self.live.remove(one)
        line = self.waiting.get(one.request.tenant, [])
        if one in line:
            line.remove(one)

    def step(self) -> Plan:
        decoding = [s for s in self.scheduler.running if s.needed == 1]
        before = set(self.scheduler.running)
        plan = self.scheduler.schedule()
        self.steps += 1
        self.live += plan.forks
        self._check_order(before)
        self._check_plan(plan, decoding)
        self._compute(plan)
        for item in plan.items:
            self._score(item)
            self.scheduler.complete(item)
        for item in plan.items:
            for one in item.draws:
                self._advance(one)
        self.check()
        return plan

    def run(self, steps: int = 3000) -> None:
        """To the end. Nothing may be left over."""
        for _ in range(steps):
            if not self.live:
                break
            assert self.step().items, "a step in which nothing happens would repeat for ever"
        assert not self.live, "not everybody finishes"
        assert not self.scheduler.running
        assert not len(self.scheduler.waiting)
        assert self.pool.free + self.pool.cached == self.pool.total

    def check(self) -> None:
        check_pool(self.pool, [one.blocks for one in self.live])
        for one in self.live:
            assert one.computed <= len(one.tokens)
            assert len(one.blocks) == -(-one.computed // BLOCK_SIZE)
            if one not in self.scheduler.running:
                assert one.computed == 0

    def _check_order(self, before: set[Sequence]) -> None:
        """Inside a tenant nobody overtakes: those who begin are the first of the line."""
        for one in self.scheduler.running:
            line = self.waiting.get(one.request.tenant, [])
            if one not in before and one in line:
                assert line[0] is one
                line.remove(one)

    def _check_plan(self, plan: Plan, decoding: list[Sequence]) -> None:
        assert sum(item.count for item in plan.items) <= self.scheduler.budget
        planned = [item.sequence for item in plan.items]
        assert len(set(planned)) == len(planned)
        held = {s: set(s.blocks) for s in self.live}
        for item in plan.items:
            one = item.sequence
            assert one in self.scheduler.running
            assert 0 < item.count <= one.needed
            assert item.start == one.computed
            assert bool(item.draws) == (item.start + item.count == len(one.tokens))
            if one.scoring:
                assert item.count <= SCORING_CHUNK
                assert item.start == 0 or item.start < len(one.prompt_scores or [])
            # What it writes is its own, or its own forks' of this very step.
            written = {one.blocks[p // BLOCK_SIZE] for p in range(item.start, item.start + item.count)}
            assert all(s is one or s in item.draws for s in self.live if held[s] & written)
        targets = [target for _, target in plan.copies]
        assert len(set(targets)) == len(targets)
        for target in targets:
            owners = [s for s in self.live if target in held[s]]
            assert owners
            assert len({id(s.request) for s in owners}) == 1
        if len(decoding) <= self.scheduler.budget:
            for one in decoding:  # a choice that needs a token gets it, unless its memory was taken
                assert one in planned or one not in self.scheduler.running

    def _compute(self, plan: Plan) -> None:
        copied = [
            (target * BLOCK_SIZE + i, self.slots.get(source * BLOCK_SIZE + i))
            for source, target in plan.copies
            for i in range(BLOCK_SIZE)
        ]
        for slot, content in copied:
            if content is not None:
                self.slots[slot] = content
        for item in plan.items:
            one, histories = item.sequence, self._histories(item.sequence)
            for position in range(item.start, item.start + item.count):
                self.slots[one.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE] = histories[
                    position
                ]
        for item in plan.items:  # what attention would read
            self._check_contents(item.sequence, item.start + item.count)

    def _check_contents(self, one: Sequence, count: int) -> None:
        slots = (block * BLOCK_SIZE + i for block in one.blocks for i in range(BLOCK_SIZE))
        assert [self.slots.get(slot) for slot, _ in zip(slots, range(count), strict=False)] == self._histories(one)[
            :count
        ]

    def _histories(self, one: Sequence) -> list[int]:
        known = self.histories.setdefault(one, [])
        for token in one.tokens[len(known) :]:  # tokens are only ever added
            known.append(hash((known[-1] if known else 0, token)))
        return known

    def _score(self, item: Scheduled) -> None:
        scores = item.sequence.prompt_scores
        if scores is not None and item.sequence.scoring:
            end = min(item.start + item.count + 1, item.sequence.prompt_length)
            scores += [TokenLogprobs(0, 0.0)] * (end - len(scores))

    def _advance(self, one: Sequence) -> None:
        assert not one.scoring
        one.tokens.append(hash((one.arrival - (self.origin or 0), one.choice, one.generated)) % 3)
        one.started = True
        if one.generated >= one.request.stopping.max_tokens:
            self.finished.append(one)
            self.drop(one)
