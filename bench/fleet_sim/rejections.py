"""Why requests got 503: whether their model had all the replicas that the fleet had room for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from bench.fleet_sim.engine import ModelClients
from bench.fleet_sim.fleet import SimulatedNode
from bench.fleet_sim.replica import BatchedReplica

NO_ROOM, LOADING, OTHER = "no GPU is free", "replicas are being loaded", "other"


class RejectionLog:
    """Explains rejections by what there is after the decisions of the controller, which are made once a second.

    A request that got 503 between two decisions is explained by what the first of them has left; or by the second, if
    the room was new; or by the one after that, which is the first to see room that came after the second.

    A GPU counts as free if it was so after the decision before as well: one that has just become free is often given
    to a model that needs it more.
    """

    def __init__(self, models: Sequence[ModelClients]) -> None:
        self._models = models
        self.counts: Counter[str] = Counter()
        self.others: list[tuple[float, str, int]] = []  # time, model and number of those without an explanation
        self._before: Mapping[int, str] = {}  # causes after the last decision, by position of the model
        self._unexplained: Counter[int] = Counter()  # of the second before
        self._free: dict[str, int] = {}  # GPUs of nodes after the last decision

    def update(
        self,
        now: float,
        rejected: Counter[int],
        offered: Iterable[SimulatedNode],
        replicas: Iterable[BatchedReplica],
    ) -> None:
        """Explain what was rejected since the last decision, by position of the model. Call after each decision.

        `offered`: the nodes on which replicas may be started; `replicas`: all that run.
        """
        unexplained, self._unexplained = self._unexplained, Counter()
        waits = [position for position, clients in enumerate(self._models) if clients.waits]
        if not rejected and not unexplained and not waits:
            self._before, self._free = {}, {}
            return
        before, causes = self._before, self._causes({*rejected, *unexplained, *waits}, offered, replicas)
        self._before = causes
        for position, count in sorted(unexplained.items()):
            self.counts[causes.get(position, OTHER)] += count
            if position not in causes:
                self.others.append((now, self._models[position].model.name, count))
        for position, count in sorted(rejected.items()):
            cause = before.get(position) or causes.get(position)
            if cause is not None:
                self.counts[cause] += count
            else:
                self._unexplained[position] += count

    def _causes(
        self, positions: Iterable[int], offered: Iterable[SimulatedNode], replicas: Iterable[BatchedReplica]
    ) -> dict[int, str]:
        """Return why models have no more replicas; nothing for those that could have."""
        most_free: dict[str, int] = {}
        before, self._free = self._free, {}
        for node in offered:
            name = node.view.name
            self._free[name] = node.free_gpus
            free = min(node.free_gpus, before.get(name, 0))
            most_free[node.pool.name] = max(most_free.get(node.pool.name, 0), free)
        loading = {each.model.name for each in replicas if each.condition not in ("ready", "draining")}
        causes: dict[int, str] = {}
        for position in positions:
            model = self._models[position].model
            if not any(most_free.get(pool, 0) >= model.gpus for pool in model.pools):
                causes[position] = NO_ROOM
            elif model.name in loading:
                causes[position] = LOADING
        return causes
