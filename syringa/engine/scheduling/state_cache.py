"""Bookkeeping of the state cache of hybrid models: the slots of running sequences, and snapshots. Torch-free.

Layers of linear attention keep a state of fixed size instead of keys and values. A running sequence has a slot for it.
A cached prefix can be reused only where its state was saved: a snapshot is a slot that is found by the hash of the last
block before it. Snapshots are taken where they are likely to be reused: at the end of a prompt; where a prompt leaves
the cached blocks of another, whose state there was not saved; and now and then while tokens are generated. They take
the slots that sequences leave, and give them up again, the least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from syringa.engine.scheduling.kv_cache import BLOCK_SIZE

if TYPE_CHECKING:
    from syringa.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
    from syringa.engine.scheduling.sequence import Sequence

SNAPSHOT_MULTIPLE = 64  # tokens: snapshots are at its multiples
GENERATED_INTERVAL = 256  # tokens: at its multiples, the state of a sequence that generates is saved
SNAPSHOT_SLOTS = 16  # that are left to snapshots if as many sequences run as may
MIN_SLOTS = 2  # one sequence and one snapshot


def count_slots(max_running: int, bytes_per_slot: int, memory: int) -> int:
    """Return the number of slots: for all sequences and some snapshots, if `memory` bytes are enough for them."""
    return max(MIN_SLOTS, min(max_running + SNAPSHOT_SLOTS, memory // bytes_per_slot))


def running_slots(slots: int) -> int:
    """Return how many of the slots running sequences may take."""
    return max(1, slots - max(1, min(SNAPSHOT_SLOTS, slots // 4)))


class StatePool:
    """Slots, each of which belongs to a sequence, holds a snapshot or is free. Snapshots are evicted by LRU."""

    def __init__(self, slots: int) -> None:
        self.total = slots
        self._free = list(range(slots - 1, -1, -1))  # lowest numbers first: others stay untouched memory
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def snapshots(self) -> int:
        return len(self._snapshots)

    @property
    def available(self) -> int:
        """Number of slots that can be allocated: free or evictable."""
        return len(self._free) + len(self._snapshots)

    def allocate(self) -> int | None:
        """Return a slot, evicting a snapshot if needed; None if sequences have all of them."""
        if self._free:
            return self._free.pop()
        return self._snapshots.popitem(last=False)[1] if self._snapshots else None

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def save(self, block_hash: bytes, slot: int) -> None:
        """Keep a slot as the snapshot after the block with this hash. The first one with a hash is kept."""
        if block_hash in self._snapshots:
            self.release(slot)
        else:
            self._snapshots[block_hash] = slot
        self._snapshots.move_to_end(block_hash)

    def has(self, block_hash: bytes) -> bool:
        return block_hash in self._snapshots

    def find(self, block_hash: bytes) -> int:
        """Return the slot of a snapshot, which becomes the most recently used one."""
        self._snapshots.move_to_end(block_hash)
        return self._snapshots[block_hash]

    def discard(self, block_hash: bytes) -> None:
        if (slot := self._snapshots.pop(block_hash, None)) is not None:
            self.release(slot)

    def discard_slots(self, slots: set[int]) -> None:
        """Discard the snapshots in these slots."""
        for block_hash in [each for each, slot in self._snapshots.items() if slot in slots]:
            self.discard(block_hash)


class StateCache:
    """Assigns slots to sequences, and decides when to save and to restore their states."""

    def __init__(self, slots: int, *, caching: bool = True) -> None:
        self.pool = StatePool(slots)
        self.caching = caching
        self._generated: dict[Sequence, bytes] = {}  # the last snapshot that was taken while a sequence generated

    def usable_prefix(
        self, sequence: Sequence, blocks: list[int], hashes: list[bytes]
    ) -> tuple[list[int], list[bytes]]:
        """Return the part of a cached prefix that ends with a snapshot, and plan the snapshots of the sequence."""
        step = SNAPSHOT_MULTIPLE // BLOCK_SIZE
        branch = count = len(blocks) // step * step
        while count and not self.pool.has(hashes[count - 1]):
            count -= step
        sequence.snapshot_positions = []
        if self.caching and sequence.request.use_cache:
            end = (len(sequence.tokens) - 1) // SNAPSHOT_MULTIPLE * SNAPSHOT_MULTIPLE
            wanted = {branch * BLOCK_SIZE, end}
            sequence.snapshot_positions = sorted(each for each in wanted if each > count * BLOCK_SIZE)
        return blocks[:count], hashes[:count]

    def admit(self, output: SchedulerOutput, sequence: Sequence, hashes: list[bytes]) -> bool:
        """Give a sequence a slot, with the state after the blocks with these hashes. False if there is no slot."""
        source = self.pool.find(hashes[-1]) if hashes else None
        slot = self.pool.allocate()
        if slot is None:
            return False
        sequence.state_slot = slot
        # The snapshot may just have been evicted for the sequence: then its state is where it has to be.
        if source is not None and source != slot:
            output.state_copies.append((source, slot))
        return True

    def fork(self, output: SchedulerOutput, parent: Sequence, fork: Sequence) -> bool:
        """Give a fork a slot, to which the parent's state is copied after the step. False if there is no slot."""
        slot = self.pool.allocate()
        if slot is None:
            return False
        fork.state_slot = slot
        output.forked_states.append((parent.state_slot, slot))
        return True

    def chunk_end(self, sequence: Sequence, end: int) -> int:
        """Return where a chunk has to end so that at most one snapshot lies in it; `end` at most."""
        inside = [each for each in sequence.snapshot_positions if sequence.computed < each <= end]
        return inside[0] if len(inside) > 1 else end

    def plan_snapshot(self, output: SchedulerOutput, item: ScheduledSequence) -> None:
        """Let the state be saved that a sequence has during this step, or has before it, if that is due."""
        sequence, end = item.sequence, item.start + item.count
        positions = sequence.snapshot_positions
        while positions and positions[0] <= item.start:
            del positions[0]
        if positions and positions[0] <= end:
            position = positions[0]
        elif item.count == 1 and item.start % GENERATED_INTERVAL == 0 and self._saves_generated(output, item):
            position = item.start
        else:
            return
        if (slot := self.pool.allocate()) is None:
            return
        sequence.unsaved_snapshots.append((position, slot))
        if item.count > 1:
            item.snapshot = position, slot
        else:  # copied: decode kernels save nothing
            copies = output.state_copies if position == item.start else output.forked_states
            copies.append((sequence.state_slot, slot))

    def save_snapshots(self, sequence: Sequence) -> None:
        """Make the snapshots findable whose blocks' hashes are known by now."""
        hashes = sequence.block_hashes
        while (unsaved := sequence.unsaved_snapshots) and unsaved[0][0] <= len(hashes) * BLOCK_SIZE:
            position, slot = unsaved.pop(0)
            block_hash = hashes[position // BLOCK_SIZE - 1]
            known = self.pool.has(block_hash)
            self.pool.save(block_hash, slot)
            if position > sequence.prompt_length and not known:  # replaces the one before
                if (before := self._generated.get(sequence)) is not None:
                    self.pool.discard(before)
                self._generated[sequence] = block_hash

    def roll_back(self, output: SchedulerOutput, *, copied: bool) -> None:
        """Discard the snapshots that a step that ran out of memory was to copy: all, or if `copied`, those after it."""
        copies = output.forked_states if copied else [*output.state_copies, *output.forked_states]
        self.pool.discard_slots({target for _, target in copies})
        output.forked_states.clear()

    def restart(self, output: SchedulerOutput | None, sequence: Sequence) -> None:
        """Forget the snapshots that a sequence was to leave: its state is not known, and it starts over."""
        slots = {slot for _, slot in sequence.unsaved_snapshots}
        for slot in slots:
            self.pool.release(slot)
        sequence.unsaved_snapshots = []
        _drop_copies(output, slots)

    def release(self, output: SchedulerOutput | None, sequence: Sequence) -> None:
        """Release the slots of a sequence, and drop what an output that has not run would copy to them."""
        self.restart(output, sequence)
        self._generated.pop(sequence, None)
        if sequence.state_slot >= 0:
            _drop_copies(output, {sequence.state_slot})
            self.pool.release(sequence.state_slot)
            sequence.state_slot = -1

    def _saves_generated(self, output: SchedulerOutput, item: ScheduledSequence) -> bool:
        sequence = item.sequence
        if not (self.caching and sequence.request.use_cache and item.start > sequence.prompt_length):
            return False
        # A state that this output restores is that of a snapshot, and is not in its slot yet when copies are read.
        return all(target != sequence.state_slot for _, target in output.state_copies)


def _drop_copies(output: SchedulerOutput | None, targets: set[int]) -> None:
    if output is None or not targets:
        return
    for copies in (output.state_copies, output.forked_states):
        copies[:] = [(source, target) for source, target in copies if target not in targets]
