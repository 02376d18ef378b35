"""What a sequence holds of the cache: blocks for its tokens, which others find by their names. Torch-free."""

from __future__ import annotations

from syringa.engine.scheduling.kv_cache import BLOCK_SIZE, ROOT, BlockPool, chain
from syringa.engine.scheduling.scheduler_output import Plan
from syringa.engine.scheduling.sequence import Sequence


def reserve(pool: BlockPool, plan: Plan, sequence: Sequence, tokens: int) -> None:
    """Sees that blocks for `tokens` tokens are there, and that the ones to be written are its own. Raises
    `OutOfBlocks`."""
    last = sequence.computed // BLOCK_SIZE
    if last < len(sequence.blocks) and pool.users(sequence.blocks[last]) > 1:
        copy = pool.allocate()
        plan.copies.append((sequence.blocks[last], copy))
        pool.release([sequence.blocks[last]])
        sequence.blocks[last] = copy
    for _ in range(sequence.blocks_for(tokens)):
        sequence.blocks.append(pool.allocate())


def publish(pool: BlockPool, sequence: Sequence) -> None:
    """Names the blocks that are full, as far as their tokens are known."""
    if not sequence.request.use_cache:
        return
    full = min(sequence.computed, sequence.known) // BLOCK_SIZE
    while len(sequence.names) < full:
        index = len(sequence.names)
        tokens = sequence.tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
        mark = sequence.pictures.mark(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE) if sequence.pictures else b""
        name = chain(sequence.names[-1] if sequence.names else ROOT, tokens, mark)
        pool.name(sequence.blocks[index], name)
        sequence.names.append(name)


def vacate(pool: BlockPool, sequence: Sequence) -> None:
    pool.release(sequence.blocks)
    sequence.blocks, sequence.names, sequence.computed = [], [], 0


def take_back(pool: BlockPool, plan: Plan) -> list[Sequence]:
    """A plan will not be: gives back what it reserved beyond what was computed. Those who were to draw draw again, from
    what their last token says. Returns those for which that is not enough: they have to begin anew."""
    lost = []
    for item in plan.items:
        for sequence in item.draws:
            last = len(sequence.tokens) - 1
            pictures = sequence.pictures  # some are computed whole or not at all
            if pictures is not None and pictures.chunk_begin(last) < last < sequence.computed:
                lost.append(sequence)
            sequence.computed = min(sequence.computed, last)
        sequence = item.sequence
        needed = -(-sequence.computed // BLOCK_SIZE)
        pool.release(sequence.blocks[needed:])
        del sequence.blocks[needed:]
    return lost
