from __future__ import annotations

import asyncio
from typing import Any

import pytest

from syringa.sweep import this_sweep


async def test_what_is_due_comes_at_the_end_of_the_loops_turn() -> None:
    done: list[str] = []
    sweep = this_sweep()
    assert sweep is this_sweep()
    sweep.at_end(lambda: done.append("a"))
    sweep.at_end(lambda: done.append("b"))
    assert not done
    await asyncio.sleep(0)
    assert done == ["a", "b"]


async def test_or_where_the_block_ends_writes_first() -> None:
    done: list[Any] = []
    sweep = this_sweep()
    sweep.at_end(lambda: done.append("before"))
    with sweep:
        assert sweep.held
        sweep.at_end(lambda: done.append("inside"))
        sweep.write(done.append, b"written")
        assert not done
    assert done == [b"written", "before", "inside"]
    assert not sweep.held
    await asyncio.sleep(0)
    assert len(done) == 3
    sweep.at_end(lambda: done.append("after"))
    await asyncio.sleep(0)
    assert done[3:] == ["after"]


async def test_what_is_asked_for_at_the_end_is_done_at_the_next() -> None:
    done: list[str] = []
    sweep = this_sweep()
    with sweep:
        sweep.at_end(lambda: sweep.at_end(lambda: done.append("late")))
    assert not done
    await asyncio.sleep(0)
    assert done == ["late"]


@pytest.mark.parametrize("error", [OSError("broken pipe"), RuntimeError("the handler is closed")])
async def test_a_broken_connection_costs_others_nothing(error: Exception) -> None:
    written: list[bytes] = []

    def broken(data: bytes) -> None:
        raise error

    with this_sweep():
        this_sweep().write(broken, b"lost")
        this_sweep().write(written.append, b"kept")
    assert written == [b"kept"]


async def test_a_failure_is_told_and_the_rest_is_done() -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    done: list[str] = []

    def fail() -> None:
        raise ValueError("a bug")

    with this_sweep():
        this_sweep().at_end(fail)
        this_sweep().at_end(lambda: done.append("rest"))
    assert done == ["rest"]
    assert isinstance(told[0]["exception"], ValueError)


async def test_a_write_that_fails_otherwise_is_told_and_the_rest_is_done() -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    done: list[Any] = []

    def fail(data: bytes) -> None:
        raise ValueError("a bug")

    sweep = this_sweep()
    with sweep:
        sweep.write(fail, b"lost")
        sweep.write(done.append, b"kept")
        sweep.at_end(lambda: done.append("due"))
    assert done == [b"kept", "due"]
    assert isinstance(told[0]["exception"], ValueError)
    sweep.at_end(lambda: done.append("later"))
    await asyncio.sleep(0)
    assert done[2:] == ["later"]


def test_every_loop_has_its_own() -> None:
    async def due() -> Any:
        this_sweep().at_end(lambda: None)
        return this_sweep()

    assert asyncio.run(due()) is not asyncio.run(due())
