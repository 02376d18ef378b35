from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest
import uvloop
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser

from syringa import logs
from syringa.errors import InvalidRequest

pytestmark = pytest.mark.usefixtures("restore_logging")
SECRET = "my grandmother's recipe"
STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def log_line(logger: str, message: str, fields: dict[str, object], request_id: str) -> None:
    logging.getLogger(logger).info(message, extra={"fields": fields, "request_id": request_id})


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def objects(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in lines(capsys)]


def test_text_format(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info")
    logging.getLogger("syringa.http").info("hello %s", "you")
    logging.getLogger("syringa.http").debug("not this")
    (line,) = lines(capsys)
    assert re.fullmatch(STAMP + r" INFO syringa\.http: hello you", line)


def test_json_format(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("debug", "json")
    log_line("syringa.access", "done", {"status": 200, "model": "é"}, "abc")
    logging.getLogger("syringa.http").debug("small talk")
    first, second = objects(capsys)
    assert re.fullmatch(STAMP, str(first.pop("time")))
    assert first == {
        "level": "info", "logger": "syringa.access", "message": "done", "request_id": "abc", "status": 200,
        "model": "é",
    }  # fmt: skip
    assert (second["level"], second["message"]) == ("debug", "small talk")
    assert "request_id" not in second


def test_malformed_form_is_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("debug")
    with pytest.raises(FormParserError):
        MultipartParser(b"boundary").write(SECRET.encode())
    assert lines(capsys) == []


@pytest.mark.parametrize("format", ["text", "json"])
@pytest.mark.parametrize("id", ["", "abc\n"])
def test_line_does_not_depend_on_other_handlers(format: str, id: str, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", format)  # type: ignore[arg-type]
    root = logging.getLogger()
    ours = [each for each in root.handlers if type(each).__module__ == "syringa.logs"]
    for handlers in ([*ours, logging.NullHandler()], ours):
        root.handlers[:] = handlers
        log_line("syringa.access", "done\x1b", {"status": 200, "model": "é"}, id)
    first, second = [re.sub(STAMP, "", line) for line in lines(capsys)]
    assert first == second
    assert "syringa.access" in first


@pytest.mark.parametrize("name", ["syringa", "syringa.access"])
def test_other_handlers_and_filters_are_respected(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info")
    root, logger = logging.getLogger(), logging.getLogger(name)
    root.handlers[:] = [each for each in root.handlers if type(each).__module__ == "syringa.logs"]
    received: list[logging.LogRecord] = []
    listener = logging.Handler()
    listener.emit = received.append  # type: ignore[method-assign]
    logger.addHandler(listener)
    try:
        log_line("syringa.access", "done", {}, "abc")
    finally:
        logger.removeHandler(listener)
    assert [record.getMessage() for record in received] == ["done"]
    assert len(lines(capsys)) == 1
    logging.getLogger("syringa.access").addFilter(reject := lambda record: False)
    log_line("syringa.access", "done", {}, "abc")
    logging.getLogger("syringa.access").removeFilter(reject)
    assert not lines(capsys)


def test_line_that_cannot_be_formatted_is_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    class Odd:
        def __str__(self) -> str:
            raise ValueError("it has no text")

    logs.configure("info", "json")
    root = logging.getLogger()
    root.handlers[:] = [each for each in root.handlers if type(each).__module__ == "syringa.logs"]
    log_line("syringa.access", "done", {"odd": Odd()}, "")
    log_line("syringa.access", "next", {}, "")
    (line,) = lines(capsys)
    assert "next" in line


def test_configure_twice_logs_once(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info")
    logs.configure("warning", "json")
    logging.getLogger("syringa").warning("once")
    logging.getLogger("syringa").info("never")
    assert [each["message"] for each in objects(capsys)] == ["once"]


@pytest.mark.parametrize("name", ["httpx", "uvicorn.error", "websockets.server", "asyncio", "sqlalchemy.engine"])
def test_libraries_log_warnings_only(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("debug")
    logging.getLogger(name).info("GET https://user:%s@host/", SECRET)
    logging.getLogger(name).debug("> Authorization: Bearer %s", SECRET)
    logging.getLogger(name).warning("this is received")
    assert len(lines(capsys)) == 1


def test_python_warnings_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)  # undone by catch_warnings
        warnings.warn("old", stacklevel=1)
    (line,) = objects(capsys)
    assert line["logger"] == "py.warnings"


@pytest.mark.parametrize("format", ["text", "json"])
def test_control_characters_are_escaped(format: str, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", format)  # type: ignore[arg-type]
    evil = "a\nINFO forged\r\x1b[2J\x00\x7f\x9b\u2028\u202e\ud800b"
    logging.getLogger("syringa").info("path %s", evil)
    log_line("syringa", evil, {"path": evil}, evil)
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
def test_exception_messages_are_hidden(
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
def test_exception_of_forgotten_task_is_hidden(
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


def test_cyclic_exception_chain(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info")
    first, second = OSError("one"), OSError("two")
    first.__cause__, second.__cause__ = second, first
    logging.getLogger("syringa").error("round and round", exc_info=first)
    text = "\n".join(lines(capsys))
    assert (text.count("one"), text.count("two")) == (1, 1)


async def test_request_id_is_added(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json")

    async def request(name: str) -> None:
        logs.request_id.set(name)
        await asyncio.sleep(0)
        logging.getLogger("syringa").error("bad luck")
        await asyncio.create_task(later())

    async def later() -> None:
        logging.getLogger("syringa").error("later")

    await asyncio.gather(*(asyncio.create_task(request(name)) for name in ("a", "b")))
    logging.getLogger("syringa").error("without a request")
    assert [each.get("request_id") for each in objects(capsys)] == ["a", "b", "a", "b", None]


def test_prompts_are_off_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("debug")
    logs.PROMPTS.critical(SECRET)
    assert not lines(capsys)
    logs.configure("error", prompts=True)
    logs.PROMPTS.info(SECRET)
    assert SECRET in lines(capsys)[0]


def test_uncaught_exception_is_logged() -> None:
    code = f"from syringa import logs; logs.configure('info', 'json'); raise ValueError({SECRET!r})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert json.loads(line)["level"] == "critical"
    assert SECRET not in line


def test_broken_stderr_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def write(self, text: str) -> None:
            raise BrokenPipeError

    logs.configure("info")
    monkeypatch.setattr(sys, "stderr", Broken())
    logging.getLogger("syringa").error("not written")


class FakeStderr(list[str]):
    """A replacement of stderr."""

    def write(self, text: str) -> None:
        self.append(text)


async def test_lines_of_one_loop_iteration_are_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    logs.configure("info")
    logger, written = logging.getLogger("syringa.x"), FakeStderr()
    monkeypatch.setattr(sys, "stderr", written)
    for iteration in range(2):
        logger.info("a")
        logger.info("b")
        assert len(written) == iteration
        await asyncio.sleep(0)
        assert len(written) == iteration + 1
        assert written[-1].count("\n") == 2
    logger.info("c")
    logger.warning("d")  # a warning is written at once, after earlier lines
    assert [line[-1] for line in written[-1].splitlines()] == ["c", "d"]


def test_lines_of_a_stopped_loop_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    logs.configure("info")
    logger, written = logging.getLogger("syringa.x"), FakeStderr()
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
