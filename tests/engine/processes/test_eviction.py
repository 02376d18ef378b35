from __future__ import annotations

from typing import Any

import pytest

from syringa.engine.processes.eviction import (
    GPU_OVERHEAD,
    GROWTH,
    MARGIN,
    OVERHEAD,
    Loaded,
    Newcomer,
    Verdict,
    due,
    estimate,
    room,
    share,
)

GB = 1 << 30


def loaded(key: str, used_at: float = 0.0, **kwargs: Any) -> Loaded:
    return Loaded(**({"key": key, "used_at": used_at, "memory": GB, "held": GB} | kwargs))


def ask(*there: Loaded, need: int = GB, free: int = 8 * GB, most: int = 0, **kwargs: Any) -> Verdict:
    known = {name: kwargs.pop(name) for name in ("too_little", "hopeless", "device") if name in kwargs}
    new = Newcomer(estimate=need, **known)
    return room(new, there, free=free, most=most, **kwargs)


def test_the_estimate() -> None:
    assert estimate(0, "auto", "cpu") == OVERHEAD
    assert estimate(10 * GB, "auto", "cpu") == estimate(10 * GB, "int8", "cpu") == 10 * GB * GROWTH + OVERHEAD
    assert estimate(10 * GB, "fp32", "cpu") == estimate(20 * GB, "bf16", "cpu") == 40 * GB * GROWTH + OVERHEAD


def test_there_is_room() -> None:
    assert ask().action == "start"
    assert ask(loaded("a"), loaded("b")).action == "start"
    assert ask(loaded("a"), most=2).action == "start"


def test_the_least_recently_used_leaves_first() -> None:
    there = [loaded("a", 30), loaded("b", 10), loaded("c", 20)]
    assert ask(*there, most=3) == Verdict("evict", "b", "3 models are loaded, as many as may be")
    assert ask(*there, free=GB // 2) == Verdict("evict", "b", "memory is short")


def test_who_has_something_to_do_stays() -> None:
    there = [loaded("a", 30), loaded("b", 10, busy=True), loaded("c", 20)]
    assert ask(*there, most=3).key == "c"
    busy = [loaded(key, busy=True) for key in "ab"]
    verdict = ask(*busy, most=2)
    assert (verdict.action, verdict.reason) == (
        "wait",
        "2 models are loaded, as many as may be, and all of them are in use",
    )


def test_impatience() -> None:
    busy = [loaded("a", 20, busy=True), loaded("b", 10, busy=True)]
    assert ask(*busy, most=2, impatient=True).key == "b"
    assert ask(*busy, loaded("c", 30), most=3, impatient=True).key == "c"  # that one costs nobody anything


@pytest.mark.parametrize("state", ["loading", "leaving"])
def test_who_comes_or_goes_is_not_sent_away(state: str) -> None:
    assert ask(loaded("a", state=state), most=1, impatient=True).action == "wait"


def test_one_leaves_at_a_time() -> None:
    assert ask(loaded("a", state="leaving"), loaded("b"), most=1).action == "wait"


def test_memory_that_others_are_about_to_take_is_taken() -> None:
    coming = loaded("a", state="loading", memory=4 * GB, held=GB)
    assert ask(coming, need=5 * GB, free=8 * GB).action == "start"
    assert ask(coming, need=6 * GB, free=8 * GB).action == "wait"


def test_a_first_model_always_tries() -> None:
    assert ask(need=100 * GB, free=GB).action == "start"


def test_a_rough_estimate_drives_nobody_out_for_nothing() -> None:
    """Even alone it would not fit, if the estimate were right. Its own check knows better."""
    assert ask(loaded("a"), loaded("b"), need=100 * GB, free=GB).action == "start"


def test_one_that_was_tried_and_did_not_fit() -> None:
    there = [loaded("a", 2), loaded("b", 1)]
    for free in (3 * GB, 4 * GB, 4 * GB + MARGIN - 1):
        assert ask(*there, need=0, free=free, too_little=4 * GB) == Verdict("evict", "b", "memory is short")
    assert ask(*there, need=0, free=4 * GB + MARGIN, too_little=4 * GB).action == "start"
    assert ask(need=0, free=4 * GB, too_little=4 * GB).action == "start"  # alone it may try again


def test_one_that_did_not_even_fit_alone() -> None:
    there = [loaded("a", 2), loaded("b", 1)]
    assert ask(*there, need=0, free=2 * GB, hopeless=4 * GB).action == "never"
    assert ask(*there, need=0, free=2 * GB + MARGIN, hopeless=4 * GB, too_little=4 * GB).action == "evict"
    assert ask(need=0, free=4 * GB, hopeless=4 * GB).action == "never"
    assert ask(need=0, free=5 * GB, hopeless=4 * GB).action == "start"


def test_only_memory_of_the_same_kind_is_made_room_in() -> None:
    there = [loaded("host", 1), loaded("old", 2, device="cuda"), loaded("new", 3, device="cuda")]
    assert ask(*there, need=2 * GB, free=GB, device="cuda") == Verdict("evict", "old", "GPU memory is short")
    assert ask(*there, need=2 * GB, free=GB) == Verdict("evict", "host", "memory is short")
    assert ask(*there, need=2 * GB, free=3 * GB, device="cuda").action == "start"
    # As many as may be loaded: then it does not matter where.
    assert ask(*there, need=GB, device="cuda", most=3).key == "host"
    # Nobody is there whose leaving would help: it may try.
    assert ask(loaded("host"), need=2 * GB, free=GB, device="cuda").action == "start"
    assert ask(loaded("host", state="leaving"), there[1], need=2 * GB, free=GB, device="cuda").action == "evict"


def test_a_gpu_that_is_too_small_is_told() -> None:
    there = [loaded("host", 1, memory=90 * GB, held=90 * GB), loaded("a", 2, device="cuda")]
    verdict = ask(*there, need=0, free=2 * GB, hopeless=4 * GB, device="cuda")
    assert verdict == Verdict("never", reason="there is too little GPU memory for it")


def test_what_a_loading_model_will_take_can_be_had_from_it_later() -> None:
    coming = loaded("a", state="loading", memory=60 * GB, held=0, device="cuda")
    assert ask(coming, need=30 * GB, free=80 * GB, device="cuda").action == "wait"
    assert ask(coming, need=20 * GB, free=80 * GB, device="cuda").action == "start"


def test_shares_of_a_gpu() -> None:
    def parts(*needs: int, total: int = 100, most: int = 0) -> list[float]:
        return [share(own, [*needs[:i], *needs[i + 1 :]], total=total, most=most) for i, own in enumerate(needs)]

    assert parts(10) == [1.0]
    assert parts(10, 10) == [0.5, 0.5]
    assert parts(50, 10) == [0.7, 0.3]
    assert sum(parts(50, 10, 3)) == pytest.approx(1)
    assert parts(60, 50) == [1.0, 1.0]  # not both at a time, so each may have it all
    assert parts(60, 30, 20) == [1.0, 1.0, 1.0]
    # Two at a time, whichever they are: beside the largest of the others there is room.
    assert parts(60, 30, 20, most=2) == [0.65, 0.35, 0.3]
    assert parts(60, 30, most=1) == [1.0, 1.0]


def test_the_estimate_for_a_gpu() -> None:
    assert estimate(0, "auto", "cuda") == GPU_OVERHEAD
    assert estimate(5 * GB, "auto", "cuda") == estimate(10 * GB, "fp8", "cuda")
    assert 10 * GB < estimate(5 * GB, "auto", "cuda") - GPU_OVERHEAD < 11 * GB


def test_idle_ones_leave() -> None:
    there = [
        loaded("never", 0),
        loaded("due", 90, idle_limit=10),
        loaded("not yet", 91, idle_limit=10),
        loaded("busy", 0, idle_limit=10, busy=True),
        loaded("leaving", 0, idle_limit=10, state="leaving"),
        loaded("loading", 0, idle_limit=10, state="loading"),
        loaded("dropped", 99, dropped=True),
        loaded("dropped and busy", 99, dropped=True, busy=True),
    ]
    assert due(there, now=100) == ["due", "dropped"]
