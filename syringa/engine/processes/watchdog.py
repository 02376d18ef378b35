"""Whether a worker hangs. A pure function of what it last reported, so that it needs neither processes nor a clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from syringa.engine.processes.health import WorkerHealth

# Limits are longer while a model is loaded, kernels are compiled and CUDA graphs are captured.
LOADING_FACTOR = 10.0
# A worker that has hung for so many times its limit is killed.
KILL_FACTOR = 2.0
# The supervisor looks 20 times per second. After a longer pause it was itself stopped, perhaps with the whole machine.
MAX_PAUSE_SECONDS = 2.0


@dataclass(frozen=True)
class WatchdogLimits:
    """In seconds; 0: no limit."""

    heartbeat: float  # without a heartbeat
    step: float  # that a step may take


class Assessment(NamedTuple):
    action: Literal["none", "suspend", "kill"]  # "suspend": the model is not ready
    reason: str = ""


def assess(health: WorkerHealth, limits: WatchdogLimits, *, watched_from: float, now: float) -> Assessment:
    """Decide whether a worker hangs.

    `watched_from`: when the worker was started or the supervisor resumed, if that was later. Nothing that happened
    before counts.
    """
    factor = LOADING_FACTOR if health.phase == "loading" else 1.0
    silence = now - max(health.beat_at, watched_from)
    step = 0.0 if health.step_started_at is None else now - max(health.step_started_at, watched_from)
    what = "a step" if health.phase == "serving" else "a part of loading"
    checks = (
        (silence, limits.heartbeat * factor, f"no heartbeat for {silence:.1f} s"),
        (step, limits.step * factor, f"{what} has taken {step:.1f} s, step={health.step}"),
    )
    exceeded = [(seconds / limit, reason) for seconds, limit, reason in checks if limit and seconds > limit]
    if not exceeded:
        return Assessment("none")
    ratio, reason = max(exceeded)
    return Assessment("kill" if ratio > KILL_FACTOR else "suspend", reason)
