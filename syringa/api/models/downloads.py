"""Downloads of models, each in a thread of its own. Requests for the same model share one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Protocol

from syringa import modelfiles
from syringa.errors import FailedDependency, ModelError
from syringa.modelfiles import catalog, hub
from syringa.modelfiles.download import FileProgress, RemoteFile
from syringa.modelfiles.locate import hub_name
from syringa.modelfiles.variants import select_files, strip_address

_REPORT_SECONDS = 0.1  # between two reports about a file


class PullModel(Protocol):
    """Downloads a model in the calling thread, and calls `on_file` with what has arrived of each file."""

    def __call__(self, model: str, *, on_file: FileProgress) -> object: ...


class PullCanceled(Exception):
    """No request waits for the download any more."""


def source_of(name: str) -> str | None:
    """Return the name under which a model is downloaded, without the address of the Hub; None if it cannot be."""
    name = strip_address(name)
    return name if modelfiles.can_pull(name) else None


def measure(model: str) -> int | None:
    """Return the bytes of a model's files, which may ask the Hub for them; None if they are not known."""
    entry, name = catalog.find(model), hub_name(model)
    if entry is not None and name is None:
        return entry.download_bytes
    if name is None:
        return None
    try:
        sizes = {file.name: file.size for file in hub.list_files(name)}
        return sum(sizes[each] for each in select_files(name, list(sizes)))
    except ModelError:
        return entry.bytes if entry is not None else None


class ModelDownloads:
    """The downloads of an API process. One is canceled when no request waits for it; the next one continues it."""

    def __init__(self, pull: PullModel = modelfiles.pull) -> None:
        self._pull = pull
        self._running: dict[str, _Download] = {}

    async def run(self, model: str, on_file: FileProgress) -> None:
        """Download a model, unless it is here. Raises `FailedDependency`."""
        while (running := self._running.get(model)) is not None and running.canceled.is_set():
            await asyncio.wait([running.done])  # it holds the file until it has noticed
        if running is None:
            running = self._running[model] = _Download(self._pull, model)
            running.done.add_done_callback(lambda _: self._running.pop(model))
        running.listeners.append(on_file)
        try:
            await asyncio.shield(running.done)
        except ModelError as error:
            raise FailedDependency(f"{error.message[:1].upper()}{error.message[1:]}.", param="model") from None
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise FailedDependency(
                f"The files of the model cannot be read or written: {reason}.", param="model"
            ) from None
        finally:
            running.listeners.remove(on_file)
            if not running.listeners:
                running.canceled.set()


class _Download:
    """A download in a thread of its own, which takes as long as it does."""

    def __init__(self, pull: PullModel, model: str) -> None:
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self.listeners: list[FileProgress] = []
        self.canceled = threading.Event()
        self._reported_at: dict[str, float] = {}
        threading.Thread(target=self._run, args=(pull, model), name="pull", daemon=True).start()

    def _run(self, pull: PullModel, model: str) -> None:
        error: Exception | None = None
        try:
            pull(model, on_file=self._on_file)
        except Exception as failure:
            error = failure
        self._in_loop(lambda: self._finish(error))

    def _on_file(self, file: RemoteFile, done: int) -> None:
        if self.canceled.is_set():
            raise PullCanceled
        now = time.monotonic()
        if done < file.size and now - self._reported_at.get(file.checksum, 0.0) < _REPORT_SECONDS:
            return
        self._reported_at[file.checksum] = now
        self._in_loop(lambda: self._report(file, min(done, file.size)))

    def _report(self, file: RemoteFile, done: int) -> None:
        for listener in [*self.listeners]:
            listener(file, done)

    def _finish(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        elif isinstance(error, PullCanceled):
            self.done.cancel()
        else:
            self.done.set_exception(error)
            self.done.exception()  # it may have come after the last request left

    def _in_loop(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the server has stopped
            self.canceled.set()
