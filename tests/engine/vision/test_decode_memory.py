from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

from syringa.engine.vision.decode_memory import DecodeMemory


class Holder:
    """A thread that holds memory until it is told to end."""

    def __init__(self, pool: ThreadPoolExecutor, memory: DecodeMemory, size: int) -> None:
        self.holds, self.ends = Event(), Event()
        self.done = pool.submit(self._run, memory, size)

    def _run(self, memory: DecodeMemory, size: int) -> None:
        with memory.reserve(size):
            self.holds.set()
            assert self.ends.wait(60)

    def end(self) -> None:
        self.ends.set()
        self.done.result(60)


def wait_for_queue(memory: DecodeMemory, length: int) -> None:
    deadline = time.monotonic() + 60
    while len(memory._waiting) < length:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_decode_memory_is_shared_in_order_and_never_exceeded() -> None:
    memory = DecodeMemory(10)
    with ThreadPoolExecutor(8) as pool:
        first = Holder(pool, memory, 6)
        assert first.holds.wait(60)
        large = Holder(pool, memory, 25)  # more than the limit
        wait_for_queue(memory, 1)
        small = Holder(pool, memory, 1)  # would fit, but came later
        wait_for_queue(memory, 2)
        assert memory.used == 6
        assert not large.holds.is_set()
        assert not small.holds.is_set()
        first.end()
        assert large.holds.wait(60)
        assert memory.used == 25
        assert not small.holds.is_set()
        large.end()
        assert small.holds.wait(60)
        last = Holder(pool, memory, 9)
        assert last.holds.wait(60)
        assert memory.used == 10
        small.end()
        last.end()
    assert memory.used == 0
