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
from syringa.service.limits import shared_table
from syringa.service.limits.rate_limiter import RateLimiter, format_duration
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


def attempt(limiter: RateLimiter, sender: Caller) -> float:
    """Return how long to wait; 0 if the request is admitted."""
    try:
        limiter.acquire(sender)
    except RateLimited as error:
        return error.retry_after or -1.0
    return 0.0


def admitted(limiter: RateLimiter, sender: Caller, tries: int = 1) -> int:
    return sum(not attempt(limiter, sender) for _ in range(tries))


def refusal(limiter: RateLimiter, sender: Caller) -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        limiter.acquire(sender)
    return caught.value


def named(headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    assert len(dict(headers)) == len(headers)
    return {name.decode().removeprefix("x-ratelimit-"): value.decode() for name, value in headers}


def test_limit_is_exact(limiter: RateLimiter, clock: Clock) -> None:
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


def test_window_slides(limiter: RateLimiter, clock: Clock) -> None:
    for second in range(4):
        clock.now = 1000.25 + 10 * second
        assert admitted(limiter, caller(4)) == 1
    assert refusal(limiter, caller(4)).retry_after == 30.0
    for second in range(4):
        clock.now = 1060.25 + 10 * second
        assert admitted(limiter, caller(4), 2) == 1


def test_request_is_admitted_after_retry_after(limiter: RateLimiter, clock: Clock) -> None:
    for clock.now in (1000.1, 1003.7, 1003.9, 1029.0):
        limiter.acquire(caller(4))
        limiter.charge(caller(4, 100), 30)
    clock.now = 1030.2
    wait = refusal(limiter, caller(4, 100)).retry_after
    assert wait is not None
    clock.now += wait
    limiter.acquire(caller(4, 100))


def test_refused_requests_do_not_count(limiter: RateLimiter, clock: Clock) -> None:
    limiter.acquire(caller(1))
    for _ in range(50):
        clock.now += 1
        refusal(limiter, caller(1))
    clock.now += 10
    limiter.acquire(caller(1))


def test_key_counts_for_itself_and_its_organization(limiter: RateLimiter) -> None:
    one = caller(5, of_key=RateLimits(requests_per_minute=3), key="one")
    two = caller(5, of_key=RateLimits(requests_per_minute=3), key="two")
    assert admitted(limiter, one, 9) == 3
    assert "The key's limit of 3 requests per minute" in refusal(limiter, one).message
    assert admitted(limiter, two, 9) == 2
    assert "The organization's limit of 5 requests per minute" in refusal(limiter, two).message


def test_request_refused_by_one_scope_does_not_count_in_the_other(limiter: RateLimiter) -> None:
    narrow = caller(5, of_key=RateLimits(requests_per_minute=1), key="narrow")
    assert admitted(limiter, narrow, 50) == 1
    assert admitted(limiter, caller(5), 50) == 4
    fresh = caller(5, of_key=RateLimits(requests_per_minute=1, concurrent=1), key="fresh")
    refusal(limiter, fresh)
    free = caller(100, of_key=RateLimits(requests_per_minute=1, concurrent=1), organization="other", key="fresh")
    limiter.acquire(free)


def test_organization_and_key_of_same_name_are_independent(limiter: RateLimiter) -> None:
    assert admitted(limiter, caller(2, organization="x", key="y"), 3) == 2
    assert admitted(limiter, caller(2, organization="y", key="x"), 3) == 2
    assert admitted(limiter, caller(of_key=RateLimits(requests_per_minute=2), key="x"), 3) == 2


def test_tokens_count_when_charged(limiter: RateLimiter, clock: Clock) -> None:
    sender = caller(tokens=100)
    limiter.acquire(sender)
    limiter.acquire(sender)
    limiter.charge(sender, 99)
    limiter.acquire(sender)
    clock.now += 7
    limiter.charge(sender, 1)
    error = refusal(limiter, sender)
    assert "The organization's limit of 100 tokens per minute" in error.message
    assert error.retry_after == 53.0
    clock.now += 1
    limiter.charge(sender, 5000)
    assert refusal(limiter, sender).retry_after == 60.0
    clock.now += 60
    limiter.acquire(sender)


def test_tokens_are_charged_to_both_scopes(limiter: RateLimiter) -> None:
    sender = caller(tokens=100, of_key=RateLimits(tokens_per_minute=10))
    limiter.charge(sender, 10)
    assert "key's limit of 10 tokens" in refusal(limiter, sender).message
    limiter.charge(sender, 90)
    assert "organization's limit of 100 tokens" in refusal(limiter, caller(tokens=100)).message


@pytest.mark.parametrize("tokens", [0, -5])
def test_charge_of_no_tokens(limiter: RateLimiter, tokens: int) -> None:
    limiter.charge(caller(tokens=1), tokens)
    limiter.acquire(caller(tokens=1))


def test_concurrent_limit(limiter: RateLimiter, clock: Clock) -> None:
    sender = caller(concurrent=2)
    first = limiter.acquire(sender)
    limiter.acquire(sender)
    error = refusal(limiter, sender)
    assert error.message == "The organization's limit of 2 requests at the same time is reached. Try again in 1 s."
    assert error.retry_after == 1.0
    clock.now += 3600  # this limit does not depend on time
    refusal(limiter, sender)
    first.release()
    first.release()
    third = limiter.acquire(sender)
    refusal(limiter, sender)
    third.release()
    limiter.acquire(sender)


def test_longest_wait_is_reported(limiter: RateLimiter, clock: Clock) -> None:
    sender = caller(1, 10, 1)
    limiter.acquire(sender)
    clock.now += 20
    limiter.charge(sender, 10)
    clock.now += 5
    error = refusal(limiter, sender)
    assert error.retry_after == 55.0
    assert "10 tokens per minute" in error.message


def test_headers_report_tightest_scope(limiter: RateLimiter, clock: Clock) -> None:
    sender = caller(100, 1000, of_key=RateLimits(requests_per_minute=3, tokens_per_minute=5000))
    limiter.charge(sender, 400)
    clock.now += 15.5
    assert named(limiter.acquire(sender).headers) == {
        "limit-requests": "3",
        "remaining-requests": "2",
        "reset-requests": "1m0s",
        "limit-tokens": "1000",
        "remaining-tokens": "600",
        "reset-tokens": "44.5s",
    }


def test_refusal_has_headers(limiter: RateLimiter, clock: Clock) -> None:
    sender = caller(2, 10)
    limiter.acquire(sender)
    clock.now += 1
    limiter.acquire(sender)
    clock.now += 0.88
    limiter.charge(sender, 15)
    clock.now += 59
    assert named(refusal(limiter, sender).headers) == {
        "limit-requests": "2",
        "remaining-requests": "1",
        "reset-requests": "120ms",
        "limit-tokens": "10",
        "remaining-tokens": "0",
        "reset-tokens": "1s",
    }


def test_headers_only_for_existing_limits(limiter: RateLimiter) -> None:
    assert limiter.acquire(caller(concurrent=1)).headers == []
    assert set(named(limiter.acquire(caller(tokens=5, key="2")).headers)) == {
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
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_caller_without_limits_does_not_lock(limiter: RateLimiter, monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(SharedRateTable, "__enter__", touched)
    for sender in (ANONYMOUS, caller()):
        admission = limiter.acquire(sender)
        assert admission.headers == []
        limiter.charge(sender, 1000)
        admission.release()
    with pytest.raises(AssertionError):
        limiter.acquire(caller(1))


def test_full_table_admits_all(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    limiter = RateLimiter(clock=clock)
    limiter._table = SharedRateTable(None, index=0, clock=clock, slots=1)
    limiter.acquire(caller(1, 1, 1))
    other = caller(1, 1, 1, organization="globex", of_key=RateLimits(requests_per_minute=1))
    for _ in range(3):
        admission = limiter.acquire(other)
        limiter.charge(other, 5)
        admission.release()
        assert admission.headers == []
    refusal(limiter, caller(1, 1, 1))


def test_release_after_close(limiter: RateLimiter) -> None:
    admission = limiter.acquire(caller(5, 5, 5))
    limiter.close()
    limiter.close()
    limiter.charge(caller(5, 5, 5), 5)
    admission.release()


@given(
    limit=st.integers(1, 6),
    key_limit=st.integers(1, 6),
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.one_of(st.integers(0, 3_000_000), st.integers(0, 90_000_000))),
        max_size=150,
    ),
)
def test_no_window_exceeds_limit(limit: int, key_limit: int, steps: list[tuple[int, int]]) -> None:
    """Two keys of one organization at any times; the wait of a refused request is exact."""
    micros = 5_000_000_000
    clock = Clock()
    limiter = RateLimiter(clock=clock)
    limiter._table = SharedRateTable(None, index=0, clock=clock, slots=4)
    passed: list[tuple[int, int]] = []
    for key, pause in steps:
        micros += pause
        clock.now = (micros + 0.5) / 1_000_000  # in the middle of a microsecond, against rounding
        sender = caller(limit, of_key=RateLimits(requests_per_minute=key_limit), key=str(key))
        recent = [(when, key_id) for when, key_id in passed if when > micros - 60_000_000]
        wait = attempt(limiter, sender)
        if not wait:
            assert len(recent) < limit
            assert sum(key_id == key for _, key_id in recent) < key_limit
        else:
            assert 0 < wait <= 60
            # A count shares the bin of its second with later ones, and expires at most a second late.
            surely = [(when, key_id) for when, key_id in passed if when > micros - 61_000_000]
            assert len(surely) >= limit or sum(key_id == key for _, key_id in surely) >= key_limit
            clock.now += wait - 2e-6
            if wait > 2e-6:
                assert attempt(limiter, sender) == pytest.approx(2e-6, abs=1e-7)
            clock.now += 2e-6
            micros += round(wait * 1_000_000)
            assert not attempt(limiter, sender)
        passed.append((micros, key))
    limiter.close()


HAMMER = """
import select, sys
from syringa.errors import RateLimited
from syringa.service.auth.keys import Caller, RateLimits
from syringa.service.limits import shared_table
from syringa.service.limits.rate_limiter import RateLimiter
shared_table.LOCK_TIMEOUT = 60.0  # a process may not run for seconds on a loaded machine, even while it holds the lock
limiter = RateLimiter(sys.argv[1], index=int(sys.argv[2]))
key = RateLimits(requests_per_minute=400, tokens_per_minute=10**6, concurrent=50)
rates = RateLimits(requests_per_minute=500, concurrent=100)
sender = Caller(organization="acme", key=sys.argv[2], rates=rates, key_rates=key)
print("ready", flush=True)
sys.stdin.readline()
admitted = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    try:
        admission = limiter.acquire(sender)
    except RateLimited:
        continue
    admitted += 1
    limiter.charge(sender, 1)
    admission.release()
print(admitted, flush=True)
"""


def test_processes_share_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_table, "LOCK_TIMEOUT", 60.0)
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
        began = time.monotonic()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        limiter = RateLimiter(path, index=3)
        end = time.monotonic() + 60  # the limits apply for a minute
        while used_requests(limiter) < 500 and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.2)  # they continue to be refused
        passed = [int(process.communicate("\n", timeout=60)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert sum(passed) == 500
    assert max(passed) <= 400
    error = refusal(limiter, caller(500))
    assert error.retry_after is not None
    assert 59 - (time.monotonic() - began) < error.retry_after <= 60
    with limiter._table:
        slot = limiter._table.find("organization:acme")
        assert slot is not None
        assert (slot.requests.used, slot.running()) == (500, 0)
    limiter.close()


def used_requests(limiter: RateLimiter) -> int:
    with limiter._table:
        slot = limiter._table.find("organization:acme")
        return 0 if slot is None else slot.requests.used


KILLED = """
import sys, time
from syringa.service.auth.keys import Caller, RateLimits
from syringa.service.limits.rate_limiter import RateLimiter
limiter = RateLimiter(sys.argv[1], index=1)
sender = Caller(organization="acme", rates=RateLimits(concurrent=3))
limiter.acquire(sender), limiter.acquire(sender)
print("entered", flush=True)
time.sleep(60)
"""


def test_running_requests_of_killed_process_are_released(tmp_path: Path) -> None:
    path = str(tmp_path / "limits")
    RateLimiter.create(path)
    limiter = RateLimiter(path, index=0)
    with subprocess.Popen([sys.executable, "-c", KILLED, path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "entered\n"
        limiter.acquire(caller(concurrent=3))
        refusal(limiter, caller(concurrent=3))
        process.kill()
    again = RateLimiter(path, index=1)
    assert admitted(limiter, caller(concurrent=3), 5) == 2
    refusal(again, caller(concurrent=3))


def test_clock_is_shared_by_processes() -> None:
    """The monotonic clock is the same for all processes, which the table relies on."""
    assert RateLimiter.__init__.__kwdefaults__ is not None
    assert RateLimiter.__init__.__kwdefaults__["clock"] is time.monotonic
    output = subprocess.run(
        [sys.executable, "-c", "import time; print(time.monotonic())"], capture_output=True, check=True, text=True
    )
    assert abs(float(output.stdout) - time.monotonic()) < 60
