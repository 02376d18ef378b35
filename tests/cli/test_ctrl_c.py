"""Ctrl-C in a chat with a real worker: a terminal sends SIGINT to every process of the foreground group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from syringa.bench.processes import is_alive
from tests.cli.tiny_model import write_model

HANG_SECONDS = 120
# Background jobs of a shell, such as those of a CI, start with SIGINT ignored.
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from syringa.cli import main
main(sys.argv[1:])
"""


class ChatProcess:
    """`syringa chat` in a process group of its own, as in a terminal. Answers go on until they are stopped."""

    def __init__(self, folder: Path) -> None:
        write_model(folder / "tiny.gguf")
        options = ["--dtype", "fp32", "--threads", "1"]
        for token in ("2", "3"):  # a and b
            options += ["--allowed-token-ids", token]
        command = [sys.executable, "-c", PROGRAM, "chat", str(folder / "tiny.gguf"), *options]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=folder,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "HOME": str(folder), "TERM": "dumb"},
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        while chunk := os.read(self.process.stdout.fileno(), 1 << 16):
            self.output += chunk.decode(errors="replace")

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def wait(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + HANG_SECONDS
        while not condition():
            assert time.monotonic() < end, self.output[-2000:]
            assert self.process.poll() is None, self.output[-2000:]
            time.sleep(0.01)

    def press_ctrl_c(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def group(self) -> set[int]:
        """Return the processes that Ctrl-C reaches."""
        pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
        return {pid for pid in pids if is_alive(pid) and _group(pid) == self.process.pid}

    def end(self) -> int:
        """Close standard input, which ends the chat, and return its status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        status = self.process.wait(HANG_SECONDS)
        self._reader.join(HANG_SECONDS)
        return status

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(HANG_SECONDS)  # to the end of the output, at which the workers have ended
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[ChatProcess]:
    process = ChatProcess(tmp_path)
    yield process
    process.kill()


def test_ctrl_c_stops_the_answer_and_leaves_the_worker(chat: ChatProcess) -> None:
    chat.wait(lambda: "/help for help" in chat.output)
    processes = chat.group()
    assert len(processes) > 1  # the worker is in the group
    for number in (1, 2, 3):
        chat.send("ab")
        begun = len(chat.output)
        chat.wait(lambda begun=begun: "aa" in chat.output[begun:] and "bb" in chat.output[begun:])
        chat.press_ctrl_c()
        chat.wait(lambda number=number: chat.output.count("(stopped)") == number)
        assert processes <= chat.group()
    assert chat.end() == 0
    assert "Traceback" not in chat.output
    assert not any(map(is_alive, processes))
