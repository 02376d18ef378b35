"""The progress of a download: a bar in a terminal, and a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.status import Status

_LINE_PERCENT, _LINE_SECONDS = 10, 30.0  # between two lines, whichever comes first


class DownloadProgress(Protocol):
    def update(self, done: int, total: int) -> None:
        """Show that `done` of `total` bytes are here."""

    def wait(self, seconds: float, reason: str) -> None:
        """Show that nothing comes for so long."""


@contextlib.contextmanager
def open_progress(console: Console, model: str) -> Iterator[DownloadProgress]:
    """Show the progress of a download as long as the context is open."""
    if not _can_redraw(console):
        yield DownloadLines(console, model)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        yield _DownloadBar(progress, model)


class _DownloadBar:
    def __init__(self, progress: Progress, model: str) -> None:
        self._progress, self._description = progress, escape(f"Downloading {model}")
        self._task = progress.add_task(self._description, total=None)

    def update(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total or None, description=self._description)

    def wait(self, seconds: float, reason: str) -> None:
        self._progress.update(self._task, description=f"{self._description}: {_describe_wait(seconds, reason)}")


class DownloadLines:
    """Prints the size of a model, and then a line for every ten percent, or every 30 seconds."""

    def __init__(self, console: Console, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._model, self._clock = console, model, clock
        self._percent: int | None = None  # of the last line; None before the first
        self._printed = 0.0

    def update(self, done: int, total: int) -> None:
        if not total:
            return
        percent = 100 * done // total
        if self._percent is None:
            here = f", of which {decimal(done)} are here" if done else ""
            self._print(f"Downloading {self._model}: {decimal(total)}{here}", percent)
        elif done < total and (
            percent >= self._percent + _LINE_PERCENT or self._clock() >= self._printed + _LINE_SECONDS
        ):
            self._print(f"{self._model}: {percent} % ({decimal(done)} of {decimal(total)})", percent)

    def wait(self, seconds: float, reason: str) -> None:
        self._print(f"{self._model}: {_describe_wait(seconds, reason)}", self._percent)

    def _print(self, line: str, percent: int | None) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        self._percent, self._printed = percent, self._clock()


class Checking:
    """Shows that the Hub is asked for a model, in a terminal, and how long an attempt is waited for."""

    def __init__(self, console: Console, model: str) -> None:
        self._console, self._model = console, model
        self._status = Status(f"Checking {escape(model)}…", console=console)

    def show(self) -> contextlib.AbstractContextManager[object]:
        return self._status

    def wait(self, seconds: float, reason: str) -> None:
        if _can_redraw(self._console):
            self._status.update(f"Checking {escape(self._model)}: {_describe_wait(seconds, reason)}")
        else:
            DownloadLines(self._console, self._model).wait(seconds, reason)


def _can_redraw(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


def _describe_wait(seconds: float, reason: str) -> str:
    return f"waiting {seconds:.0f} s ({reason})"
