from __future__ import annotations

from syringa.engine.gpu.input_batch import InputBatch
from syringa.engine.scheduling.scheduler_output import ScheduledSequence
from tests.engine.scheduling.model_free_engine import sequence


def test_input_batch_tracks_block_tables() -> None:
    batch = InputBatch(100, count=2)
    assert batch.tables.shape[1] == 16
    one, two, three = (sequence([1] * 40) for _ in range(3))
    one.block_table, two.block_table, three.block_table = [4, 5, 6], [7], [1, 2]
    indices = batch.update(
        [ScheduledSequence(one, 0, 40), ScheduledSequence(two, 3, 1), ScheduledSequence(three, 17, 1)]
    )  # more than `count`
    assert [batch.tables[index, :n].tolist() for index, n in zip(indices, (3, 1, 2), strict=True)] == [
        [4, 5, 6],
        [7],
        [1, 2],
    ]
    one.block_table.append(9)
    two.block_table[0] = 3  # copy-on-write: another sequence kept its block
    again = batch.update([ScheduledSequence(one, 48, 1), ScheduledSequence(two, 4, 1)])
    assert again.tolist() == indices[:2].tolist()
    assert batch.tables[indices[0], :4].tolist() == [4, 5, 6, 9]
    assert batch.tables[indices[1], 0] == 3
    one.block_table = [10, 11, 12, 13]  # preempted and recomputed
    batch.update([ScheduledSequence(one, 48, 1)])
    assert batch.tables[indices[0], :4].tolist() == [10, 11, 12, 13]
    for each in (one, two, three):
        batch.remove(each)
    assert not len(batch)
