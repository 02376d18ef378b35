"""What is simulated: models, pools of nodes, rates and faults. The speeds are of GPUs of the 24 to 48 GB class."""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass, replace

DAY_END = datetime.datetime(2026, 3, 29, 12, tzinfo=datetime.UTC)  # Europe's clocks have changed at 1:00
MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
GIGABYTE = 1e9


@dataclass(frozen=True)
class SimulatedModel:
    """A model, and how fast one replica of it is. A step of `batch` streams takes `base + per_stream * batch`."""

    name: str
    gpus: int  # of a replica
    gigabytes: float  # of weights
    base: float  # seconds
    per_stream: float  # seconds
    prefill: float  # tokens per second
    max_running: int
    share: float  # of the requests
    min_replicas: int
    pools: tuple[str, ...]  # in order of preference

    @property
    def nominal_step(self) -> float:
        """Seconds of a step with the largest batch."""
        return self.base + self.per_stream * self.max_running

    @property
    def gpu_seconds_per_token(self) -> float:
        """What an output token costs in the largest batch."""
        return self.gpus * self.nominal_step / self.max_running

    @property
    def gpu_seconds_per_prompt_token(self) -> float:
        return self.gpus / self.prefill

    @property
    def load_seconds(self) -> float:
        """From the start of the process until it serves, with the files on the node's disk."""
        return 8.0 + self.gigabytes / (2.0 * self.gpus)


@dataclass(frozen=True)
class SimulatedPool:
    name: str
    mode: str  # always, scheduled or idle
    nodes: int
    gpus: int  # of each node
    timezone: str = "UTC"
    start: str = ""
    end: str = ""


QUICK_MODELS = ("small-3b", "chat-8b", "dense-32b", "dense-70b")
CHEAP_FIRST = ("desktops", "new-york", "berlin", "edge", "core")
LARGER = ("new-york", "berlin", "edge", "core")

MODELS = (
    SimulatedModel("nano-1b", 1, 2.2, 0.009, 0.0004, 14_000, 40, 0.14, 2, CHEAP_FIRST),
    SimulatedModel("small-3b", 1, 6.5, 0.014, 0.0006, 9_000, 40, 0.16, 2, CHEAP_FIRST),
    SimulatedModel("chat-8b", 1, 16.0, 0.024, 0.0009, 5_000, 24, 0.22, 2, CHEAP_FIRST),
    SimulatedModel("code-7b", 1, 15.0, 0.023, 0.0009, 5_000, 24, 0.10, 2, CHEAP_FIRST),
    SimulatedModel("vision-8b", 1, 17.0, 0.026, 0.0010, 4_000, 24, 0.06, 2, CHEAP_FIRST),
    SimulatedModel("dense-14b", 1, 15.0, 0.030, 0.0012, 3_500, 20, 0.07, 2, CHEAP_FIRST),
    SimulatedModel("moe-30b", 2, 32.0, 0.020, 0.0008, 6_000, 40, 0.08, 2, LARGER),
    SimulatedModel("long-14b", 2, 28.0, 0.024, 0.0010, 5_000, 32, 0.04, 2, LARGER),
    SimulatedModel("dense-32b", 2, 33.0, 0.036, 0.0012, 3_500, 24, 0.05, 2, LARGER),
    SimulatedModel("dense-70b", 4, 70.0, 0.042, 0.0014, 3_500, 32, 0.045, 2, ("core",)),
    SimulatedModel("moe-120b", 4, 65.0, 0.026, 0.0010, 5_000, 40, 0.025, 2, ("core",)),
    SimulatedModel("code-72b", 4, 72.0, 0.044, 0.0014, 3_500, 32, 0.01, 2, ("core",)),
)
POOLS = (
    SimulatedPool("core", "always", 120, 4),
    SimulatedPool("edge", "always", 180, 2),
    SimulatedPool("berlin", "scheduled", 250, 2, "Europe/Berlin", "20:00", "07:00"),
    SimulatedPool("new-york", "scheduled", 250, 2, "America/New_York", "19:00", "08:45"),
    SimulatedPool("desktops", "idle", 200, 1),
)


@dataclass(frozen=True)
class Scenario:
    models: tuple[SimulatedModel, ...] = MODELS
    pools: tuple[SimulatedPool, ...] = POOLS
    warmup_seconds: float = 10 * MINUTE  # at the beginning of the day, without requests
    day_rate: float = 20_000.0  # requests per hour, the mean of the day
    day_seconds: float = DAY
    swing: float = 0.5  # of the day's curve around its mean
    ramp_seconds: float = 15 * MINUTE  # from the rate at the end of the day to the peak
    peak_rate: float = 1_000_000.0  # per hour
    peak_seconds: float = HOUR
    tail_seconds: float = 12 * MINUTE  # without new requests, in which the last ones end
    api_processes: int = 4
    organizations: int = 300
    queue_timeout: float = 60.0
    max_queue: int = 1024  # of a replica
    # Requests: log-normal lengths
    prompt_mean: float = 1_100.0  # new tokens of a turn
    output_mean: float = 1_250.0
    system_tokens: int = 384
    max_context: int = 16_384
    max_tokens_factor: float = 2.0  # `max_tokens` of a request over what it generates
    # Nodes
    weights_cached: float = 0.75  # share of models whose files a node has at the start
    cache_gigabytes: float = 250.0
    node_bandwidth: float = 1.25 * GIGABYTE  # per second
    server_bandwidth: float = 12.5 * GIGABYTE
    cached_tokens: int = 160_000  # of the KV cache of a replica, for prefixes
    # Faults
    loss_seconds: float = 5 * DAY  # mean time between unannounced losses of a node
    drain_seconds: float = 4 * DAY  # mean time between announced ones
    flap_seconds: float = 40 * DAY  # mean time between the begins of flapping
    rack_nodes: int = 20  # that are lost together, once in the peak
    away_seconds: float = 15 * MINUTE  # mean
    owner_away_seconds: float = 100 * MINUTE  # mean, of a node of the idle pool
    owner_active_seconds: float = 35 * MINUTE  # mean
    silence_seconds: float = 2.0  # until clients notice a lost node
    node_timeout: float = 15.0  # until the provider reports it

    @property
    def start(self) -> float:
        """The Unix time at which it begins."""
        return DAY_END.timestamp() - self.day_seconds

    @property
    def peak_at(self) -> float:
        return self.day_seconds + self.ramp_seconds

    @property
    def requests_end(self) -> float:
        return self.peak_at + self.peak_seconds

    @property
    def end(self) -> float:
        return self.requests_end + self.tail_seconds

    def rate(self, at: float) -> float:
        """Return the requests per hour at a time."""
        if at < self.warmup_seconds:
            return 0.0
        if at < self.day_seconds:
            return self.day_rate * (1 + self.swing * math.sin(math.tau * at / DAY))
        if at < self.peak_at:
            part = (at - self.day_seconds) / self.ramp_seconds
            return self.day_rate * math.exp(part * math.log(self.peak_rate / self.day_rate))
        return self.peak_rate if at < self.requests_end else 0.0


def quick() -> Scenario:
    """Return a fiftieth of the nodes and of the requests, in two hours."""
    pools = tuple(replace(pool, nodes=max(4, pool.nodes // 50)) for pool in POOLS)
    models = [replace(model, min_replicas=1) for model in MODELS if model.name in QUICK_MODELS]
    total = sum(model.share for model in models)
    return Scenario(
        models=tuple(replace(model, share=model.share / total) for model in models),
        pools=pools,
        day_rate=400.0,
        day_seconds=HOUR,
        ramp_seconds=15 * MINUTE,
        peak_rate=20_000.0,
        peak_seconds=40 * MINUTE,
        organizations=20,
        api_processes=2,
        loss_seconds=12 * HOUR,
        drain_seconds=12 * HOUR,
        flap_seconds=DAY,
        rack_nodes=2,
    )
