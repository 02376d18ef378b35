"""Downloads of models that go on without the request that began them, and are known to all processes.

A download belongs to the process that began it, which stores its progress every second, and learns whether it is to be
canceled. Files that have arrived stay when it ends early: the next one continues it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from syringa.errors import StoreError, SyringaError
from syringa.service.responses import process_identity
from syringa.store import PullStage, PullStatus, Store, StoredPull

logger = logging.getLogger("syringa.service")

PROGRESS_SECONDS = 1.0
SILENT_SECONDS = 30.0  # without progress for so long, the process of another machine counts as exited
KEEP_SECONDS = 86_400.0  # for which a pull that has ended is listed
SPEED_SECONDS = 10.0  # over which the speed is averaged: wheels arrive one after another, with pauses
CANCEL_SECONDS = 5.0  # for a canceled pull to end, before the request is answered

_INTERRUPTED = "The server that pulled it was stopped: pull it again, and it goes on where it was."


class PulledFile(msgspec.Struct, kw_only=True):
    """A file of a download."""

    name: str
    bytes: int
    completed_bytes: int = 0


OnFile = Callable[[str, int, int], None]
"""Called with the name and the size of a file, and the bytes of it that are here."""

Download = Callable[[str, OnFile], Awaitable[None]]
"""Downloads a model. Raises `SyringaError`."""

Measure = Callable[[str], Awaitable[int | None]]
"""Returns the bytes of a model's files; None if they are not known."""

Add = Callable[[str, str], Awaitable[None]]
"""Adds a model, given its id and its source, to those of the server. Raises `SyringaError`."""

decode_files = msgspec.json.Decoder(list[PulledFile]).decode


class PullManager:
    """The downloads of a process, and the list of those of all processes."""

    def __init__(
        self, store: Store, process: str, *, download: Download, measure: Measure, add: Add,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """`process`: the identity of this process."""
        self._store, self._process, self._clock = store, process, clock
        self._download, self._measure, self._add = download, measure, add
        self._running: dict[str, asyncio.Task[None]] = {}
        self._stopping = False

    async def start(self, model: str, serve_as: str) -> StoredPull:
        """Begin to download a model, and return the pull; that which runs already, if there is one."""
        now = self._clock()
        known = await self._store.read(lambda session: session.pulls.all())
        abandoned = [each.id for each in known if self._is_abandoned(each)]
        new = StoredPull(
            id=f"pull_{secrets.token_hex(12)}",
            model=model,
            serve_as=serve_as,
            stage="resolving",
            process=self._process,
            created_at=int(now),
            updated_at=now,
        )

        def create(session: Any) -> StoredPull:
            session.pulls.expire(now - KEEP_SECONDS)
            pull: StoredPull = session.pulls.create(new, abandoned)
            return pull

        pull = await self._store.write(create)
        if pull.id == new.id:
            task = self._running[pull.id] = asyncio.create_task(self._run(pull))
            task.add_done_callback(lambda _: self._running.pop(pull.id, None))
            await asyncio.sleep(0)  # from now on, it stores how it ends, even if it is canceled at once
        return pull

    async def all(self) -> list[StoredPull]:
        """Return the pulls of all processes that run or have ended within a day, the newest first."""
        if self._store.location.is_empty():
            return []
        found = [self._current(each) for each in await self._store.read(lambda session: session.pulls.all())]
        since = self._clock() - KEEP_SECONDS
        return [each for each in found if each.status == "running" or each.updated_at >= since]

    async def get(self, id: str) -> StoredPull | None:
        if self._store.location.is_empty():
            return None
        found = await self._store.read(lambda session: session.pulls.get(id))
        return None if found is None else self._current(found)

    async def end(self, id: str) -> StoredPull | None:
        """Cancel a pull that is running, or forget one that has ended, and return it; None if there is none.

        One of another process is canceled within about a second.
        """
        found = await self.get(id)
        if found is None:
            return None
        if found.status != "running":
            await self._store.write(lambda session: session.pulls.delete(id))
            return found
        await self._store.write(lambda session: session.pulls.cancel(id))
        if (task := self._running.get(id)) is not None:
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_SECONDS)
        return await self.get(id)

    def stop(self) -> None:
        """Cancel all downloads of this process, because it is stopped."""
        self._stopping = True
        for task in self._running.values():
            task.cancel()

    def _is_abandoned(self, pull: StoredPull) -> bool:
        """Whether the process of a running pull has exited."""
        if pull.status != "running" or pull.id in self._running:
            return False
        return process_identity.has_exited(pull.process) or pull.updated_at < self._clock() - SILENT_SECONDS

    def _current(self, pull: StoredPull) -> StoredPull:
        if not self._is_abandoned(pull):
            return pull
        ended = int(pull.updated_at)
        return msgspec.structs.replace(pull, status="failed", stage=None, error=_INTERRUPTED, ended_at=ended)

    async def _run(self, pull: StoredPull) -> None:
        progress = _Progress()
        # Beside the download, which need not wait for it.
        beside = [
            asyncio.create_task(self._report(pull.id, progress)),
            asyncio.create_task(self._measure_into(progress, pull.model)),
        ]
        status: PullStatus = "failed"
        error: str | None = None
        try:
            await self._download(pull.model, progress.on_file)
            progress.stage = "adding"
            await self._add(pull.serve_as, pull.model)
            status = "completed"
        except asyncio.CancelledError:
            status, error = ("failed", _INTERRUPTED) if self._stopping else ("cancelled", None)
        except SyringaError as failure:
            error = failure.message
        except Exception:
            logger.exception("pull failed: model=%s", pull.model)
            error = "The download failed: see the server's log."
        finally:
            for each in beside:
                each.cancel()
        logger.info("pull: %s: model=%s id=%s", status, pull.model, pull.id)
        try:
            await self._store.write(
                lambda session: session.pulls.update(
                    pull.id,
                    **progress.values(),
                    status=status,
                    stage=None,
                    error=error,
                    bytes_per_second=None,
                    ended_at=int(self._clock()),
                )
            )
        except StoreError as failure:
            logger.warning("pull: its end could not be stored: id=%s error=%s", pull.id, failure.message)

    async def _measure_into(self, progress: _Progress, model: str) -> None:
        progress.total = await self._measure(model)

    async def _update(self, id: str, values: dict[str, Any]) -> bool:
        return await self._store.write(lambda session: session.pulls.update(id, **values))

    async def _report(self, id: str, progress: _Progress) -> None:
        """Store the progress of a pull every second, and cancel it if another process wants it."""
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            values = progress.values() | {"stage": progress.stage, "bytes_per_second": progress.speed(time.monotonic())}
            try:
                goes_on = await self._update(id, values)
            except StoreError as failure:
                logger.debug("pull: progress could not be stored: %s", failure.message)
                continue
            if not goes_on and (task := self._running.get(id)) is not None:
                task.cancel()
                return


class _Progress:
    """The progress of one download."""

    def __init__(self) -> None:
        self.stage: PullStage = "resolving"
        self.total: int | None = None
        self.files: dict[str, PulledFile] = {}
        self._arrived = 0  # bytes, not counting those that were there before
        self._seen: deque[tuple[float, int]] = deque()  # when, and what had arrived

    def on_file(self, name: str, size: int, done: int) -> None:
        self.stage = "downloading"
        file = self.files.get(name)
        if file is None:
            self.files[name] = PulledFile(name=name, bytes=size, completed_bytes=done)
            return
        self._arrived += max(0, done - file.completed_bytes)
        file.completed_bytes = done

    def values(self) -> dict[str, Any]:
        files = msgspec.json.encode(list(self.files.values())).decode()
        known = sum(file.bytes for file in self.files.values())
        total = known or None if self.total is None else max(self.total, known)
        return {"files": files, "total_bytes": total}

    def speed(self, now: float) -> float | None:
        """Return the bytes per second since the first call, or over the last `SPEED_SECONDS`."""
        self._seen.append((now, self._arrived))
        while len(self._seen) > 2 and self._seen[1][0] <= now - SPEED_SECONDS:
            self._seen.popleft()
        since, arrived = self._seen[0]
        return None if now <= since else round((self._arrived - arrived) / (now - since), 1)
