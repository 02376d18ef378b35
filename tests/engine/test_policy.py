from __future__ import annotations

from typing import Any

import pytest

from syringa.engine.policy import GROWTH, MARGIN, OVERHEAD, Loaded, Newcomer, Verdict, due, estimate, room

GB = 1 << 30


def loaded(key: str, used_at: float = 0.0, **kwargs: Any) -> Loaded:
    return Loaded(**({"key": key, "used_at": used_at, "memory": GB, "held": GB} | kwargs))


def ask(*there: Loaded, need: int = GB, free: int = 8 * GB, most: int = 0, **kwargs: Any) -> Verdict:
    new = Newcomer(estimate=need, too_little=kwargs.pop("too_little", 0), hopeless=kwargs.pop("hopeless", 0))
    return room(new, there, free=free, most=most, **kwargs)


def test_the_estimate() -> None:
    assert estimate(0) == OVERHEAD
    assert estimate(10 * GB) == 10 * GB * GROWTH + OVERHEAD


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
