"""Pictures in prompts as the scheduler and the block pool treat them. No model, no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from syringa.engine.scheduling.kv_cache import BLOCK_SIZE
from syringa.engine.scheduling.scheduler import Limits
from syringa.engine.scheduling.sequence import Sequence
from syringa.engine.vision.images import Pictures, Run, picture_key, plane_positions
from syringa.types import Image
from tests.engine.scheduling.builders import DryEngine, sequence


def pictures(*runs: tuple[int, int, bytes], joint: bool = False) -> Pictures:
    return Pictures((), [Run(begin, end, key, None) for begin, end, key in runs], joint)


def seeing(length: int, *runs: tuple[int, int, bytes], joint: bool = False, **options: Any) -> Sequence:
    made = sequence([7] * length, **options)
    made.pictures = pictures(*runs, joint=joint)
    return made


def test_only_low_detail_looks_different() -> None:
    keys = [picture_key(Image(data=b"", digest=b"x", detail=detail)) for detail in ("low", "high", "auto")]
    assert keys[1] == keys[2] != keys[0]
    assert picture_key(Image(data=b"", digest=b"y")) != keys[1]


def test_marks_tell_pictures_and_their_places_apart() -> None:
    one = pictures((4, 20, b"a"), (24, 40, b"b"))
    assert one.mark(0, 4) == one.mark(20, 24) == one.mark(40, 60) == b""
    marks = {one.mark(0, 16), one.mark(16, 32), one.mark(24, 40), one.mark(16, 20), one.mark(32, 48)}
    assert len(marks) == 5
    assert one.mark(16, 32) == pictures((4, 20, b"a"), (24, 40, b"b")).mark(16, 32)
    assert one.mark(16, 32) != pictures((4, 20, b"a"), (24, 40, b"c")).mark(16, 32)
    assert one.mark(0, 16) != pictures((5, 20, b"a")).mark(0, 16)


def test_chunks_do_not_end_within_tokens_that_see_one_another() -> None:
    apart, joint = pictures((4, 20, b"a")), pictures((4, 20, b"a"), (20, 30, b"b"), joint=True)
    assert [apart.chunk_end(0, end) for end in (4, 5, 20)] == [4, 5, 20]
    assert [joint.chunk_end(0, end) for end in (3, 4, 5, 19, 20, 21, 30, 31)] == [3, 4, 4, 4, 20, 20, 30, 31]
    assert [joint.chunk_end(4, end) for end in (5, 19, 20, 25)] == [20, 20, 20, 20]
    assert [joint.chunk_begin(begin) for begin in (0, 4, 5, 19, 20, 21, 30)] == [0, 4, 4, 4, 20, 20, 30]


def test_positions_in_the_plane() -> None:
    positions, shift = plane_positions(9, [(2, (2, 2))])
    assert positions.tolist() == [[0, 1, 2, 2, 2, 2, 4, 5, 6], [0, 1, 2, 2, 3, 3, 4, 5, 6], [0, 1, 2, 3, 2, 3, 4, 5, 6]]
    assert shift == -2
    positions, shift = plane_positions(8, [(0, (1, 3)), (4, (3, 1))])
    assert positions[:, 3].tolist() == [3, 3, 3]
    assert positions[:, 4:7].tolist() == [[4, 4, 4], [4, 5, 6], [4, 4, 4]]
    assert (positions[:, 7].tolist(), shift) == ([7, 7, 7], 0)
    text, shift = plane_positions(5, [])
    assert (text == np.arange(5)).all()
    assert shift == 0


def cached(engine: DryEngine, one: Sequence) -> int:
    engine.submit(one)
    while one in engine.live:
        engine.step()
    return one.cached


def test_a_prefix_is_found_behind_the_same_pictures_only() -> None:
    engine = DryEngine(64)
    assert cached(engine, seeing(60, (8, 40, b"a"))) == 0
    assert cached(engine, seeing(60, (8, 40, b"a"))) == 48
    assert cached(engine, seeing(60, (8, 40, b"b"))) == 0
    assert cached(engine, seeing(60, (20, 40, b"a"))) == 0  # the first block shows none, and the other did
    assert cached(engine, sequence([7] * 60)) == 16  # and that is a text's too
    assert cached(engine, seeing(60, (40, 60, b"c"))) == 32


@pytest.mark.parametrize("joint", [False, True])
def test_what_is_reused_ends_before_a_joint_run(joint: bool) -> None:
    engine = DryEngine(64)
    assert cached(engine, seeing(52, (20, 50, b"a"), joint=joint)) == 0
    assert cached(engine, seeing(70, (20, 60, b"a"), joint=joint)) == (16 if joint else 48)


@pytest.mark.parametrize("budget", [4, 20, 64])
def test_joint_runs_are_computed_whole_and_starve_nobody(budget: int) -> None:
    engine = DryEngine(400, Limits(step_tokens=budget, max_running=4))
    engine._check_plan = lambda *_: None  # type: ignore[method-assign]
    engine.submit(sequence([1] * 5, max_tokens=60))
    one = engine.submit(seeing(90, (6, 38, b"a"), (38, 70, b"b"), joint=True, max_tokens=2))
    seen = []
    while one in engine.live:
        seen += [(item.start, item.start + item.count) for item in engine.step().items if item.sequence is one]
    assert all(not begin < end < until for _, end in seen for begin, until in ((6, 38), (38, 70)))
    assert seen[0][0] == 0
    engine.run()


def test_a_fork_and_a_preempted_sequence_keep_their_pictures() -> None:
    engine = DryEngine(8, Limits(max_running=8))
    one = engine.submit(seeing(40, (8, 30, b"a"), choices=2, max_tokens=30))
    other = engine.submit(seeing(40, (8, 30, b"b"), max_tokens=30))
    forks = []
    while engine.live:
        forks += engine.step().forks
    assert engine.scheduler.preemptions
    assert [fork.pictures for fork in forks] == [one.pictures]
    assert other.pictures is not None
    assert BLOCK_SIZE * 8 == 128
