"""The health page: memory that a worker shares with the supervisor.

The worker writes what it is doing, the supervisor reads it at any time: when the worker does not respond, and after it
has died. A thread beside the step loop writes the time once per second, so a worker without a recent time is stopped.
Times are those of `time.monotonic`, which all processes of a machine share.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from syringa.types import LoadPhase, LoadProgress

BEAT_SECONDS = 1.0
FINGERPRINT_BYTES = 16
MAX_FINGERPRINTS = 2048  # further ones are not recorded

WorkerPhase = Literal["loading", "serving"]

_PHASES: tuple[WorkerPhase, ...] = ("loading", "serving")
_LOAD_PHASES: tuple[LoadPhase, ...] = ("starting", "weights", "warmup")  # of a worker, in this order
_BEAT = struct.Struct("=d")
_STEP = struct.Struct("=Qd?")  # number, start, whether it is running
_PHASE = struct.Struct("=B")
_COUNT = struct.Struct("=I")
_LOADING = struct.Struct("Q")  # phase and hundredths, in one word: other processes never see a part of it
_UNKNOWN = 255  # instead of hundredths
_BEAT_AT, _STEP_AT, _PHASE_AT, _COUNT_AT, _LOADING_AT, _FINGERPRINTS_AT = 0, 8, 32, 36, 40, 48
_SIZE = _FINGERPRINTS_AT + MAX_FINGERPRINTS * FINGERPRINT_BYTES


class WorkerHealth(NamedTuple):
    """What a worker last reported."""

    phase: WorkerPhase
    beat_at: float  # when its heartbeat thread last ran; 0: not yet
    step: int  # number of the current or last step; while loading, of the progress made
    step_started_at: float | None  # None: it waits for requests


class HealthPage:
    def __init__(self, fd: int = -1, clock: Callable[[], float] = time.monotonic) -> None:
        """`fd`: of a file made by `create_page`; -1: private memory, for a worker without a supervisor."""
        self._map = mmap.mmap(fd, _SIZE)
        self._clock = clock
        self._step = 0
        self._running: tuple[bytes, ...] = ()
        self._loading = (0, -1)  # phase and hundredths; -1: not known

    # The worker's side

    def beat(self) -> None:
        _BEAT.pack_into(self._map, _BEAT_AT, self._clock())

    def begin_step(self) -> None:
        """Record that a step begins, or while loading, that progress was made."""
        self._step += 1
        _STEP.pack_into(self._map, _STEP_AT, self._step, self._clock(), True)

    def end_step(self) -> None:
        """Record that the worker is about to wait for requests."""
        _STEP.pack_into(self._map, _STEP_AT, self._step, 0.0, False)

    def set_phase(self, phase: WorkerPhase) -> None:
        _PHASE.pack_into(self._map, _PHASE_AT, _PHASES.index(phase))

    def report_loading(self, phase: LoadPhase, done: int = 0, total: int = 0) -> None:
        """Record how far loading is, without a total only its phase. What would be a step back is left out."""
        self.begin_step()
        hundredths = min(100 * done // total, 100) if total > 0 else -1
        loading = _LOAD_PHASES.index(phase), hundredths
        if loading > self._loading:
            self._loading = loading
            _LOADING.pack_into(self._map, _LOADING_AT, loading[0] << 8 | (_UNKNOWN if hundredths < 0 else hundredths))

    def set_running(self, fingerprints: Iterable[bytes]) -> None:
        """Record the fingerprints of the requests that the worker computes or prepares."""
        running = tuple(fingerprints)
        if running == self._running:  # as from one step to the next, mostly
            return
        self._running = running
        known = [each for each in dict.fromkeys(running) if len(each) == FINGERPRINT_BYTES]
        data = b"".join(known[:MAX_FINGERPRINTS])
        self._map[_FINGERPRINTS_AT : _FINGERPRINTS_AT + len(data)] = data
        _COUNT.pack_into(self._map, _COUNT_AT, len(data) // FINGERPRINT_BYTES)

    # The supervisor's side

    def read(self) -> WorkerHealth:
        (beat_at,) = _BEAT.unpack_from(self._map, _BEAT_AT)
        step, started_at, running = _STEP.unpack_from(self._map, _STEP_AT)
        (phase,) = _PHASE.unpack_from(self._map, _PHASE_AT)
        return WorkerHealth(_PHASES[phase], beat_at, step, started_at if running else None)

    def loading(self) -> LoadProgress:
        """Return how far the worker is in loading its model."""
        (word,) = _LOADING.unpack_from(self._map, _LOADING_AT)
        phase, hundredths = _LOAD_PHASES[word >> 8], word & 0xFF
        # Without a report yet, the word is 0.
        return LoadProgress(phase, None if hundredths == _UNKNOWN or phase == "starting" else hundredths / 100)

    def running(self) -> list[bytes]:
        """Return the fingerprints of the requests that the worker computes, or computed when it died."""
        (count,) = _COUNT.unpack_from(self._map, _COUNT_AT)
        data = self._map[_FINGERPRINTS_AT : _FINGERPRINTS_AT + count * FINGERPRINT_BYTES]
        return [data[at : at + FINGERPRINT_BYTES] for at in range(0, len(data), FINGERPRINT_BYTES)]

    def close(self) -> None:
        self._map.close()


def create_page() -> int:
    """Return the file descriptor of an empty health page, to be inherited by a worker."""
    fd = os.memfd_create("syringa-health")
    os.ftruncate(fd, _SIZE)
    return fd


def start_heartbeat(page: HealthPage) -> None:
    """Write heartbeats from a thread of their own, until this process ends."""

    def run() -> None:
        while True:
            page.beat()
            time.sleep(BEAT_SECONDS)

    threading.Thread(target=run, daemon=True, name="heartbeat").start()
