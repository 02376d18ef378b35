"""Images of prompts in the scheduler and the block pool, without a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from syringa.engine.scheduling.kv_cache import BLOCK_SIZE
from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.engine.scheduling.sequence import Sequence
from syringa.engine.vision.prompt_images import PlaceholderRange, PromptImages, hash_image, mrope_positions
from syringa.types import Image
from tests.engine.scheduling.model_free_engine import ModelFreeEngine, sequence


def prompt_images(*ranges: tuple[int, int, bytes], bidirectional: bool = False) -> PromptImages:
    return PromptImages((), [PlaceholderRange(begin, end, key, None) for begin, end, key in ranges], bidirectional)


def with_images(length: int, *ranges: tuple[int, int, bytes], bidirectional: bool = False, **options: Any) -> Sequence:
    made = sequence([7] * length, **options)
    made.prompt_images = prompt_images(*ranges, bidirectional=bidirectional)
    return made


def test_hash_image_distinguishes_low_detail_only() -> None:
    keys = [hash_image(Image(data=b"", digest=b"x", detail=detail), b"k") for detail in ("low", "high", "auto")]
    assert keys[1] == keys[2] != keys[0]
    assert hash_image(Image(data=b"", digest=b"y"), b"k") != keys[1]


def test_hash_image_depends_on_cache_key() -> None:
    image = Image(data=b"", digest=b"x")
    assert len({hash_image(image, key) for key in (b"", b"a", b"b", b"ab")}) == 4


def test_block_hash_extra_covers_image_and_its_position() -> None:
    one = prompt_images((4, 20, b"a"), (24, 40, b"b"))
    assert one.block_hash_extra(0, 4) == one.block_hash_extra(20, 24) == one.block_hash_extra(40, 60) == b""
    blocks = [(0, 16), (16, 32), (24, 40), (16, 20), (32, 48)]
    assert len({one.block_hash_extra(*block) for block in blocks}) == 5
    assert one.block_hash_extra(16, 32) == prompt_images((4, 20, b"a"), (24, 40, b"b")).block_hash_extra(16, 32)
    assert one.block_hash_extra(16, 32) != prompt_images((4, 20, b"a"), (24, 40, b"c")).block_hash_extra(16, 32)
    assert one.block_hash_extra(0, 16) != prompt_images((5, 20, b"a")).block_hash_extra(0, 16)


def test_chunks_do_not_split_bidirectional_ranges() -> None:
    causal, bidirectional = (
        prompt_images((4, 20, b"a")),
        prompt_images((4, 20, b"a"), (20, 30, b"b"), bidirectional=True),
    )
    assert [causal.chunk_end(0, end) for end in (4, 5, 20)] == [4, 5, 20]
    assert [bidirectional.chunk_end(0, end) for end in (3, 4, 5, 19, 20, 21, 30, 31)] == [3, 4, 4, 4, 20, 20, 30, 31]
    assert [bidirectional.chunk_end(4, end) for end in (5, 19, 20, 25)] == [20, 20, 20, 20]
    assert [bidirectional.chunk_begin(begin) for begin in (0, 4, 5, 19, 20, 21, 30)] == [0, 4, 4, 4, 20, 20, 30]


def test_mrope_positions() -> None:
    positions, delta = mrope_positions(9, [(2, (2, 2))])
    assert positions.tolist() == [[0, 1, 2, 2, 2, 2, 4, 5, 6], [0, 1, 2, 2, 3, 3, 4, 5, 6], [0, 1, 2, 3, 2, 3, 4, 5, 6]]
    assert delta == -2
    positions, delta = mrope_positions(8, [(0, (1, 3)), (4, (3, 1))])
    assert positions[:, 3].tolist() == [3, 3, 3]
    assert positions[:, 4:7].tolist() == [[4, 4, 4], [4, 5, 6], [4, 4, 4]]
    assert (positions[:, 7].tolist(), delta) == ([7, 7, 7], 0)
    text, delta = mrope_positions(5, [])
    assert (text == np.arange(5)).all()
    assert delta == 0


def cached(engine: ModelFreeEngine, one: Sequence) -> int:
    engine.submit(one)
    while one in engine.live:
        engine.step()
    return one.cached


def test_prefix_cache_distinguishes_images() -> None:
    engine = ModelFreeEngine(64)
    assert cached(engine, with_images(60, (8, 40, b"a"))) == 0
    assert cached(engine, with_images(60, (8, 40, b"a"))) == 48
    assert cached(engine, with_images(60, (8, 40, b"b"))) == 0
    assert (
        cached(engine, with_images(60, (20, 40, b"a"))) == 0
    )  # the first block has no image tokens, unlike that of the others
    assert cached(engine, sequence([7] * 60)) == 16  # the block without image tokens is shared with text
    assert cached(engine, with_images(60, (40, 60, b"c"))) == 32


@pytest.mark.parametrize("bidirectional", [False, True])
def test_prefix_cache_does_not_split_bidirectional_range(bidirectional: bool) -> None:
    engine = ModelFreeEngine(64)
    assert cached(engine, with_images(52, (20, 50, b"a"), bidirectional=bidirectional)) == 0
    assert cached(engine, with_images(70, (20, 60, b"a"), bidirectional=bidirectional)) == (16 if bidirectional else 48)


@pytest.mark.parametrize("budget", [4, 20, 64])
def test_scheduler_computes_bidirectional_ranges_whole_without_starvation(budget: int) -> None:
    engine = ModelFreeEngine(400, SchedulerLimits(step_tokens=budget, max_running=4))
    engine._check_output = lambda *_: None  # type: ignore[method-assign]
    engine.submit(sequence([1] * 5, max_tokens=60))
    one = engine.submit(with_images(90, (6, 38, b"a"), (38, 70, b"b"), bidirectional=True, max_tokens=2))
    seen = []
    while one in engine.live:
        seen += [(item.start, item.start + item.count) for item in engine.step().scheduled if item.sequence is one]
    assert all(not begin < end < until for _, end in seen for begin, until in ((6, 38), (38, 70)))
    assert seen[0][0] == 0
    engine.run()


def test_forked_and_preempted_sequences_keep_their_images() -> None:
    engine = ModelFreeEngine(8, SchedulerLimits(max_running=8))
    one = engine.submit(with_images(40, (8, 30, b"a"), choices=2, max_tokens=30))
    other = engine.submit(with_images(40, (8, 30, b"b"), max_tokens=30))
    forks = []
    while engine.live:
        forks += engine.step().forks
    assert engine.scheduler.preemptions
    assert [fork.prompt_images for fork in forks] == [one.prompt_images]
    assert other.prompt_images is not None
    assert BLOCK_SIZE * 8 == 128
