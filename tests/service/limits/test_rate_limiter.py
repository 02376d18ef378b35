from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syringa.errors import RateLimited
from syringa.service.auth.keys import ANONYMOUS, Caller, RateLimits
from syringa.service.limits.rate_limiter import RateLimiter, duration
from syringa.service.limits.shared_table import SharedRateTable
from tests.service.limits.test_rate_slot import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limiter(clock: Clock) -> RateLimiter:
    return RateLimiter(clock=clock)


def caller(
    requests: int = 0,
    tokens: int = 0,
    concurrent: int = 0,
    *,
    of_key: RateLimits = RateLimits(),
    organization: str = "acme",
    key: str = "k_1",
) -> Caller:
    rates = RateLimits(requests_per_minute=requests, tokens_per_minute=tokens, concurrent=concurrent)
    return Caller(organization=organization, key=key, rates=rates, key_rates=of_key)


def attempt(limiter: RateLimiter, who: Caller) -> float:
    """How long it is told to wait. 0: it is admitted."""
    try:
        limiter.enter(who)
    except RateLimited as error:
        return error.retry_after or -1.0
    return 0.0


def admitted(limiter: RateLimiter, who: Caller, tries: int = 1) -> int:
    return sum(not attempt(limiter, who) for _ in range(tries))


def refusal(limiter: RateLimiter, who: Caller) -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        limiter.enter(who)
    return caught.value


def named(headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    assert len(dict(headers)) == len(headers)
    return {name.decode().removeprefix("x-ratelimit-"): value.decode() for name, value in headers}


def test_as_many_as_the_limit_and_not_one_more(limiter: RateLimiter, clock: Clock) -> None:
    clock.now = 1000.5
    assert admitted(limiter, caller(3), 5) == 3
    error = refusal(limiter, caller(3))
    assert (error.status, error.type, error.code) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert error.message == "The organization's limit of 3 requests per minute is reached. Try again in 60 s."
    assert error.retry_after == 60.0
    clock.now = 1060.4999995
    assert refusal(limiter, caller(3)).retry_after == 0.000001
    clock.now = 1060.5
    assert admitted(limiter, caller(3), 5) == 3


def test_the_window_slides(limiter: RateLimiter, clock: Clock) -> None:
    for second in range(4):
        clock.now = 1000.25 + 10 * second
        assert admitted(limiter, caller(4)) == 1
    assert refusal(limiter, caller(4)).retry_after == 30.0
    for second in range(4):
        clock.now = 1060.25 + 10 * second
        assert admitted(limiter, caller(4), 2) == 1


def test_who_waits_as_long_as_told_is_admitted(limiter: RateLimiter, clock: Clock) -> None:
    for clock.now in (1000.1, 1003.7, 1003.9, 1029.0):
        limiter.enter(caller(4))
        limiter.charge(caller(4, 100), 30)
    clock.now = 1030.2
    wait = refusal(limiter, caller(4, 100)).retry_after
    assert wait is not None
    clock.now += wait
    limiter.enter(caller(4, 100))


def test_what_is_refused_does_not_count(limiter: RateLimiter, clock: Clock) -> None:
    limiter.enter(caller(1))
    for _ in range(50):
        clock.now += 1
        refusal(limiter, caller(1))
    clock.now += 10
    limiter.enter(caller(1))


def test_a_key_is_counted_apart_and_in_its_organization(limiter: RateLimiter) -> None:
    one = caller(5, of_key=RateLimits(requests_per_minute=3), key="one")
    two = caller(5, of_key=RateLimits(requests_per_minute=3), key="two")
    assert admitted(limiter, one, 9) == 3
    assert "The key's limit of 3 requests per minute" in refusal(limiter, one).message
    assert admitted(limiter, two, 9) == 2
    assert "The organization's limit of 5 requests per minute" in refusal(limiter, two).message


def test_what_one_scope_refuses_does_not_count_in_the_other(limiter: RateLimiter) -> None:
    narrow = caller(5, of_key=RateLimits(requests_per_minute=1), key="narrow")
    assert admitted(limiter, narrow, 50) == 1
    assert admitted(limiter, caller(5), 50) == 4
    fresh = caller(5, of_key=RateLimits(requests_per_minute=1, concurrent=1), key="fresh")
    refusal(limiter, fresh)
    free = caller(100, of_key=RateLimits(requests_per_minute=1, concurrent=1), organization="other", key="fresh")
    limiter.enter(free)


def test_organizations_and_keys_of_one_name_are_not_the_same(limiter: RateLimiter) -> None:
    assert admitted(limiter, caller(2, organization="x", key="y"), 3) == 2
    assert admitted(limiter, caller(2, organization="y", key="x"), 3) == 2
    assert admitted(limiter, caller(of_key=RateLimits(requests_per_minute=2), key="x"), 3) == 2


def test_tokens_count_when_they_are_known(limiter: RateLimiter, clock: Clock) -> None:
    who = caller(tokens=100)
    limiter.enter(who)
    limiter.enter(who)
    limiter.charge(who, 99)
    limiter.enter(who)
    clock.now += 7
    limiter.charge(who, 1)
    error = refusal(limiter, who)
    assert "The organization's limit of 100 tokens per minute" in error.message
    assert error.retry_after == 53.0
    clock.now += 1
    limiter.charge(who, 5000)
    assert refusal(limiter, who).retry_after == 60.0
    clock.now += 60
    limiter.enter(who)


def test_tokens_are_charged_to_both(limiter: RateLimiter) -> None:
    who = caller(tokens=100, of_key=RateLimits(tokens_per_minute=10))
    limiter.charge(who, 10)
    assert "key's limit of 10 tokens" in refusal(limiter, who).message
    limiter.charge(who, 90)
    assert "organization's limit of 100 tokens" in refusal(limiter, caller(tokens=100)).message


@pytest.mark.parametrize("tokens", [0, -5])
def test_no_tokens_cost_nothing(limiter: RateLimiter, tokens: int) -> None:
    limiter.charge(caller(tokens=1), tokens)
    limiter.enter(caller(tokens=1))


def test_at_the_same_time(limiter: RateLimiter, clock: Clock) -> None:
    who = caller(concurrent=2)
    first = limiter.enter(who)
    limiter.enter(who)
    error = refusal(limiter, who)
    assert error.message == "The organization's limit of 2 requests at the same time is reached. Try again in 1 s."
    assert error.retry_after == 1.0
    clock.now += 3600  # it is no matter of time
    refusal(limiter, who)
    first.leave()
    first.leave()
    third = limiter.enter(who)
    refusal(limiter, who)
    third.leave()
    limiter.enter(who)


def test_the_longest_wait_is_the_one_that_is_told(limiter: RateLimiter, clock: Clock) -> None:
    who = caller(1, 10, 1)
    limiter.enter(who)
    clock.now += 20
    limiter.charge(who, 10)
    clock.now += 5
    error = refusal(limiter, who)
    assert error.retry_after == 55.0
    assert "10 tokens per minute" in error.message


def test_the_headers_of_what_is_left(limiter: RateLimiter, clock: Clock) -> None:
    who = caller(100, 1000, of_key=RateLimits(requests_per_minute=3, tokens_per_minute=5000))
    limiter.charge(who, 400)
    clock.now += 15.5
    assert named(limiter.enter(who).headers) == {
        "limit-requests": "3",
        "remaining-requests": "2",
        "reset-requests": "1m0s",
        "limit-tokens": "1000",
        "remaining-tokens": "600",
        "reset-tokens": "44.5s",
    }


def test_a_refusal_has_the_same_headers(limiter: RateLimiter, clock: Clock) -> None:
    who = caller(2, 10)
    limiter.enter(who)
    clock.now += 1
    limiter.enter(who)
    clock.now += 0.88
    limiter.charge(who, 15)
    clock.now += 59
    assert named(refusal(limiter, who).headers) == {
        "limit-requests": "2",
        "remaining-requests": "1",
        "reset-requests": "120ms",
        "limit-tokens": "10",
        "remaining-tokens": "0",
        "reset-tokens": "1s",
    }


def test_only_limits_that_exist_have_headers(limiter: RateLimiter) -> None:
    assert limiter.enter(caller(concurrent=1)).headers == []
    assert set(named(limiter.enter(caller(tokens=5, key="2")).headers)) == {
        "limit-tokens",
        "remaining-tokens",
        "reset-tokens",
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0000001, "1ms"),
        (0.12, "120ms"),
        (0.9999, "1s"),
        (1, "1s"),
        (7.66, "7.66s"),
        (59.9991, "1m0s"),
        (60, "1m0s"),
        (90.951, "1m30.951s"),
        (360, "6m0s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_who_has_no_limits_costs_nothing(limiter: RateLimiter, monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(SharedRateTable, "__enter__", touched)
    for who in (ANONYMOUS, caller()):
        admission = limiter.enter(who)
        assert admission.headers == []
        limiter.charge(who, 1000)
        admission.leave()
    with pytest.raises(AssertionError):
        limiter.enter(caller(1))


def test_a_full_table_lets_everybody_in(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    limiter = RateLimiter(clock=clock)
    limiter._windows = SharedRateTable(None, index=0, clock=clock, slots=1)
    limiter.enter(caller(1, 1, 1))
    other = caller(1, 1, 1, organization="globex", of_key=RateLimits(requests_per_minute=1))
    for _ in range(3):
        admission = limiter.enter(other)
        limiter.charge(other, 5)
        admission.leave()
        assert admission.headers == []
    refusal(limiter, caller(1, 1, 1))


def test_what_ends_after_the_end(limiter: RateLimiter) -> None:
    admission = limiter.enter(caller(5, 5, 5))
    limiter.close()
    limiter.close()
    limiter.charge(caller(5, 5, 5), 5)
    admission.leave()


@given(
    limit=st.integers(1, 6),
    key_limit=st.integers(1, 6),
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.one_of(st.integers(0, 3_000_000), st.integers(0, 90_000_000))),
        max_size=150,
    ),
)
def test_no_minute_has_more_than_the_limit(limit: int, key_limit: int, steps: list[tuple[int, int]]) -> None:
    """Two keys of one organization, any times; and whoever is refused is told when to come, neither late nor early."""
    micros = 5_000_000_000
    clock = Clock()
    limiter = RateLimiter(clock=clock)
    limiter._windows = SharedRateTable(None, index=0, clock=clock, slots=4)
    passed: list[tuple[int, int]] = []
    for key, pause in steps:
        micros += pause
        clock.now = (micros + 0.5) / 1_000_000  # in the middle of a microsecond, where rounding does not reach
        who = caller(limit, of_key=RateLimits(requests_per_minute=key_limit), key=str(key))
        recent = [(when, whose) for when, whose in passed if when > micros - 60_000_000]
        wait = attempt(limiter, who)
        if not wait:
            assert len(recent) < limit
            assert sum(whose == key for _, whose in recent) < key_limit
        else:
            assert 0 < wait <= 60
            # Whatever shares a second with a later one waits for that, and for less than a second more.
            surely = [(when, whose) for when, whose in passed if when > micros - 61_000_000]
            assert len(surely) >= limit or sum(whose == key for _, whose in surely) >= key_limit
            clock.now += wait - 2e-6
            if wait > 2e-6:
                assert attempt(limiter, who) == pytest.approx(2e-6, abs=1e-7)
            clock.now += 2e-6
            micros += round(wait * 1_000_000)
            assert not attempt(limiter, who)
        passed.append((micros, key))
    limiter.close()


HAMMER = """
import sys, time
from syringa.errors import RateLimited
from syringa.service.auth.keys import Caller, Rates
from syringa.service.limits.rate_limiter import Limiter
limiter = Limiter(sys.argv[1], index=int(sys.argv[2]))
key = Rates(requests_per_minute=400, tokens_per_minute=10**6, concurrent=50)
who = Caller(organization="acme", key=sys.argv[2], rates=Rates(requests_per_minute=500, concurrent=100), key_rates=key)
print("ready", flush=True)
sys.stdin.readline()
admitted, end = 0, time.monotonic() + 2
while time.monotonic() < end:
    try:
        admission = limiter.enter(who)
    except RateLimited:
        continue
    admitted += 1
    limiter.charge(who, 1)
    admission.leave()
print(admitted, flush=True)
"""


def test_processes_share_one_limit(tmp_path: Path) -> None:
    path = str(tmp_path / "limits")
    RateLimiter.create(path)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HAMMER, path, str(index)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for index in range(3)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        passed = [int(process.communicate(timeout=60)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert sum(passed) == 500
    assert max(passed) <= 400
    limiter = RateLimiter(path, index=3)
    error = refusal(limiter, caller(500))
    assert error.retry_after is not None
    assert 30 < error.retry_after <= 60
    with limiter._windows:
        slot = limiter._windows.find("organization:acme")
        assert slot is not None
        assert (slot.requests.used, slot.running()) == (500, 0)
    limiter.close()


KILLED = """
import sys, time
from syringa.service.auth.keys import Caller, Rates
from syringa.service.limits.rate_limiter import Limiter
limiter = Limiter(sys.argv[1], index=1)
who = Caller(organization="acme", rates=Rates(concurrent=3))
limiter.enter(who), limiter.enter(who)
print("entered", flush=True)
time.sleep(60)
"""


def test_the_places_of_a_killed_process_are_free_when_it_is_back(tmp_path: Path) -> None:
    path = str(tmp_path / "limits")
    RateLimiter.create(path)
    limiter = RateLimiter(path, index=0)
    with subprocess.Popen([sys.executable, "-c", KILLED, path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "entered\n"
        limiter.enter(caller(concurrent=3))
        refusal(limiter, caller(concurrent=3))
        process.kill()
    again = RateLimiter(path, index=1)
    assert admitted(limiter, caller(concurrent=3), 5) == 2
    refusal(again, caller(concurrent=3))


def test_one_clock_for_all_processes() -> None:
    """What the table relies on."""
    assert RateLimiter.__init__.__kwdefaults__ is not None
    assert RateLimiter.__init__.__kwdefaults__["clock"] is time.monotonic
    said = subprocess.run(
        [sys.executable, "-c", "import time; print(time.monotonic())"], capture_output=True, check=True, text=True
    )
    assert abs(float(said.stdout) - time.monotonic()) < 60
