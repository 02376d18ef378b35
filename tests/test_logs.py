from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator

import pytest
import uvloop

from syringa import logs
from syringa.errors import InvalidRequest

SECRET = "my grandmother's recipe"
STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """What `configure` does to a process, undone."""
    root, ours = logging.getLogger(), logging.getLogger("syringa")
    levels, handlers, hook = (root.level, ours.level, logs.PROMPTS.level), list(root.handlers), sys.excepthook
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    sys.excepthook = hook
    for logger, level in zip((root, ours, logs.PROMPTS), levels, strict=True):
        logger.setLevel(level)
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = True


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def objects(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in lines(capsys)]


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info")
    logging.getLogger("syringa.http").info("hello %s", "you")
    logging.getLogger("syringa.http").debug("not this")
    (line,) = lines(capsys)
    assert re.fullmatch(STAMP + r" INFO syringa\.http: hello you", line)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("debug", "json")
    logs.line(logging.getLogger("syringa.access"), logging.INFO, "done", {"status": 200, "model": "é"}, "abc")
    logging.getLogger("syringa.http").debug("small talk")
    first, second = objects(capsys)
    assert re.fullmatch(STAMP, str(first.pop("time")))
    assert first == {
        "level": "info", "logger": "syringa.access", "message": "done", "request_id": "abc", "status": 200,
        "model": "é",
    }  # fmt: skip
    assert (second["level"], second["message"]) == ("debug", "small talk")
    assert "request_id" not in second


@pytest.mark.parametrize("format", ["text", "json"])
@pytest.mark.parametrize("id", ["", "abc\n"])
def test_a_line_is_the_same_whoever_else_listens(format: str, id: str, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", format)  # type: ignore[arg-type]
    root = logging.getLogger()
    ours = [each for each in root.handlers if type(each).__module__ == "syringa.logs"]
    for handlers in ([*ours, logging.NullHandler()], ours):
        root.handlers[:] = handlers
        logs.line(logging.getLogger("syringa.access"), logging.INFO, "done\x1b", {"status": 200, "model": "é"}, id)
    first, second = [re.sub(STAMP, "", line) for line in lines(capsys)]
    assert first == second
    assert "syringa.access" in first


@pytest.mark.parametrize("name", ["syringa", "syringa.access"])
def test_whoever_else_listens_is_heard(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info")
    root, logger = logging.getLogger(), logging.getLogger(name)
    root.handlers[:] = [each for each in root.handlers if type(each).__module__ == "syringa.logs"]
    heard: list[logging.LogRecord] = []
    listener = logging.Handler()
    listener.emit = heard.append  # type: ignore[method-assign]
    logger.addHandler(listener)
    try:
        logs.line(logging.getLogger("syringa.access"), logging.INFO, "done", {}, "abc")
    finally:
        logger.removeHandler(listener)
    assert [record.getMessage() for record in heard] == ["done"]
    assert len(lines(capsys)) == 1
    logging.getLogger("syringa.access").addFilter(refuse := lambda record: False)
    logs.line(logging.getLogger("syringa.access"), logging.INFO, "done", {}, "abc")
    logging.getLogger("syringa.access").removeFilter(refuse)
    assert not lines(capsys)


def test_a_line_that_cannot_be_written_costs_nobody_anything(capsys: pytest.CaptureFixture[str]) -> None:
    class Odd:
        def __str__(self) -> str:
            raise ValueError("it has no text")

    logs.configure("info", "json")
    root = logging.getLogger()
    root.handlers[:] = [each for each in root.handlers if type(each).__module__ == "syringa.logs"]
    logs.line(logging.getLogger("syringa.access"), logging.INFO, "done", {"odd": Odd()}, "")
    logs.line(logging.getLogger("syringa.access"), logging.INFO, "next", {}, "")
    (line,) = lines(capsys)
    assert "next" in line


def test_configuring_twice_says_everything_once(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info")
    logs.configure("warning", "json")
    logging.getLogger("syringa").warning("once")
    logging.getLogger("syringa").info("never")
    assert [each["message"] for each in objects(capsys)] == ["once"]


@pytest.mark.parametrize("name", ["httpx", "uvicorn.error", "websockets.server", "asyncio", "sqlalchemy.engine"])
def test_libraries_are_quiet_at_any_level(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("debug")
    logging.getLogger(name).info("GET https://user:%s@host/", SECRET)
    logging.getLogger(name).debug("> Authorization: Bearer %s", SECRET)
    logging.getLogger(name).warning("this is heard")
    assert len(lines(capsys)) == 1


def test_warnings_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)  # catch_warnings took it back
        warnings.warn("old", stacklevel=1)
    (line,) = objects(capsys)
    assert line["logger"] == "py.warnings"


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_line_cannot_be_forged(format: str, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", format)  # type: ignore[arg-type]
    evil = "a\nINFO forged\r\x1b[2J\x00\x7f\x9b\u2028\u202e\ud800b"
    logging.getLogger("syringa").info("path %s", evil)
    logs.line(logging.getLogger("syringa"), logging.INFO, evil, {"path": evil}, evil)
    found = lines(capsys)
    assert len(found) == 2
    for line in found:
        assert not re.search("[\x00-\x1f\x7f-\x9f\u2028\u202e\ud800]", line)
        assert "\\x0aINFO forged\\x0d\\x1b[2J" in line.replace("\\\\", "\\")


def failing(error: Exception) -> None:
    try:
        try:
            raise error
        except Exception as cause:
            raise TypeError("a str is not an int") from cause
    except TypeError:
        logging.getLogger("syringa.http").exception("it failed")


@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize("format", ["text", "json"])
@pytest.mark.parametrize(
    "error",
    [
        ValueError(f"invalid literal: {SECRET!r}"),
        KeyError(SECRET),
        InvalidRequest(f"the template refuses {SECRET}"),
        UnicodeEncodeError("ascii", SECRET, 0, 1, SECRET),
        LookupError(SECRET),
    ],
)
def test_exceptions_do_not_quote(
    error: Exception, format: str, prompts: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("info", format, prompts=prompts)  # type: ignore[arg-type]
    failing(error)
    found = lines(capsys)
    text = "\n".join(found)
    assert type(error).__name__ in text
    assert "a str is not an int" in text
    assert "in failing" in text
    assert (SECRET in text.replace("\\", "")) is prompts
    if format == "json":
        (line,) = found
        assert "TypeError" in json.loads(line)["exception"]


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_task_that_nobody_awaited_does_not_quote_either(
    factory: Callable[[], asyncio.AbstractEventLoop], capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("info")

    async def fail() -> None:
        raise ValueError(SECRET)

    async def main() -> None:
        asyncio.create_task(fail())  # noqa: RUF006
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gc.collect()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
    text = "\n".join(lines(capsys))
    assert "never retrieved" in text
    assert "ValueError" in text
    assert SECRET not in text


def test_a_chain_without_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info")
    first, second = OSError("one"), OSError("two")
    first.__cause__, second.__cause__ = second, first
    logging.getLogger("syringa").error("round and round", exc_info=first)
    text = "\n".join(lines(capsys))
    assert (text.count("one"), text.count("two")) == (1, 1)


async def test_the_request_is_named_in_lines_about_it(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json")

    async def request(name: str) -> None:
        logs.request_id.set(name)
        await asyncio.sleep(0)
        logging.getLogger("syringa").error("bad luck")
        await asyncio.create_task(later())

    async def later() -> None:
        logging.getLogger("syringa").error("later")

    await asyncio.gather(*(asyncio.create_task(request(name)) for name in ("a", "b")))
    logging.getLogger("syringa").error("nobody's")
    assert [each.get("request_id") for each in objects(capsys)] == ["a", "b", "a", "b", None]


def test_prompts_are_off_until_they_are_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("debug")
    logs.PROMPTS.critical(SECRET)
    assert not lines(capsys)
    logs.configure("error", prompts=True)
    logs.PROMPTS.info(SECRET)
    assert SECRET in lines(capsys)[0]


def test_the_last_words_of_a_process_are_a_line() -> None:
    code = f"from syringa import logs; logs.configure('info', 'json'); raise ValueError({SECRET!r})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert json.loads(line)["level"] == "critical"
    assert SECRET not in line


def test_a_broken_pipe_breaks_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def write(self, text: str) -> None:
            raise BrokenPipeError

    logs.configure("info")
    monkeypatch.setattr(sys, "stderr", Broken())
    logging.getLogger("syringa").error("nobody hears this")


class Written(list[str]):
    """Stands in for stderr."""

    def write(self, text: str) -> None:
        self.append(text)


async def test_what_is_said_in_one_turn_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    logs.configure("info")
    logger, written = logging.getLogger("syringa.x"), Written()
    monkeypatch.setattr(sys, "stderr", written)
    for turn in range(2):
        logger.info("a")
        logger.info("b")
        assert len(written) == turn
        await asyncio.sleep(0)
        assert len(written) == turn + 1
        assert written[-1].count("\n") == 2
    logger.info("c")
    logger.warning("d")  # what is wrong is told at once, and nothing overtakes it
    assert [line[-1] for line in written[-1].splitlines()] == ["c", "d"]


def test_what_a_loop_leaves_unsaid_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    logs.configure("info")
    logger, written = logging.getLogger("syringa.x"), Written()
    monkeypatch.setattr(sys, "stderr", written)
    loop = asyncio.new_event_loop()

    async def end() -> None:
        logger.info("last")
        loop.stop()

    async def again() -> None:
        logger.info("first")
        await asyncio.sleep(0)

    task = loop.create_task(end())
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    assert task.done()
    asyncio.run(again())
    logger.info("later")
    assert [line.rpartition(" ")[2] for line in "".join(written).splitlines()] == ["last", "first", "later"]
