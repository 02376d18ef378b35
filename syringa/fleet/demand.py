"""How many replicas a model lacks: those of its minimum, and those for which requests wait."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from syringa.fleet.decisions import SCALE_UP_SECONDS, ModelHistory, ModelTarget, StartCause, backoff
from syringa.fleet.provider import Replica


class MissingReplica(NamedTuple):
    """A replica that a model lacks. They are served in the order of their first two fields."""

    tier: int  # 0: its model has none, 1: below the minimum, 2: requests wait
    order: int
    model: ModelTarget
    reason: str
    cause: StartCause


def missing_replicas(
    model: ModelTarget, own: Sequence[Replica], history: ModelHistory, now: float, position: int, models: int
) -> list[MissingReplica]:
    """Return what a model lacks, nothing while it backs off. `position`: of the model among so many `models`."""
    if not model.active or now < history.failed_at + backoff(history.failures):
        return []
    if len(own) < model.min_replicas:
        reason = f"{len(own)} replicas, min={model.min_replicas}"
        return [  # all models have two before one has three
            MissingReplica(min(number, 1), number * models + position, model, reason, "minimum")
            for number in range(len(own), model.min_replicas)
        ]
    if history.waiting_since is None or now - history.waiting_since < SCALE_UP_SECONDS:
        return []
    return _for_waiting_requests(model, own, history)


def _for_waiting_requests(model: ModelTarget, own: Sequence[Replica], history: ModelHistory) -> list[MissingReplica]:
    """Return as many replicas as the waiting requests would fill like the present ones, at most as many as these.

    Replicas that are being started count.
    """
    ready = running = waiting = 0
    for each in own:
        waiting += each.waiting
        if each.condition == "ready":
            ready += 1
            running += each.running
    load = max(1.0, running / max(1, ready), history.full_load)  # requests of one replica
    missing = min(math.ceil(waiting / load), ready, model.max_replicas - ready) - (len(own) - ready)
    reason = f"{waiting} requests wait, {len(own)} replicas, max={model.max_replicas}"
    return [MissingReplica(2, round(number * load) - waiting, model, reason, "waiting") for number in range(missing)]
