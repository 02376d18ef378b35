"""What is measured."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from dataclasses import dataclass, field

from bench.fleet_sim.scenario import Scenario
from bench.fleet_sim.streams import Stream


@dataclass
class PhaseTimes:
    """Times of the requests that came in a phase of the simulation, in seconds, and their tokens."""

    queue: array[float] = field(default_factory=lambda: array("d"))
    first_token: array[float] = field(default_factory=lambda: array("d"))
    completed: int = 0
    rejected: int = 0
    cached_tokens: int = 0
    cacheable_tokens: int = 0  # of prompts: what a perfect router would find
    turns: int = 0  # that continue a chat
    turns_found: int = 0  # of these, those whose chat was cached at their replica


class Collector:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.phases = {"day": PhaseTimes(), "ramp": PhaseTimes(), "peak": PhaseTimes()}
        self.arrived = self.completed_count = 0
        self.losses: list[tuple[int, str]] = []
        self.rejections: Counter[str] = Counter()
        self.rejected_work: list[float] = [0.0] * len(scenario.models)  # GPU-seconds that are no longer demanded
        self.route_times = array("d")
        self._new_rejections: Counter[int] = Counter()  # by model
        self.moves: Counter[str] = Counter()
        self.pauses: dict[str, array[float]] = {}
        self.recoveries: dict[str, array[float]] = {}
        self._digest = hashlib.blake2b(digest_size=16)

    def _phase(self, stream: Stream) -> PhaseTimes:
        if stream.arrived < self.scenario.day_seconds:
            return self.phases["day"]
        return self.phases["ramp" if stream.arrived < self.scenario.peak_at else "peak"]

    def first_token(self, stream: Stream) -> None:
        phase = self._phase(stream)
        assert stream.admitted_at is not None
        assert stream.first_token_at is not None
        phase.queue.append(stream.admitted_at - stream.arrived)
        phase.first_token.append(stream.first_token_at - stream.arrived)
        history = stream.prompt - stream.new_tokens
        phase.cacheable_tokens += history
        phase.cached_tokens += min(stream.cached, history)
        if history > self.scenario.system_tokens:
            phase.turns += 1
            phase.turns_found += stream.cached >= history

    def routed(self, seconds: float) -> None:
        self.route_times.append(seconds)

    def completed(self, stream: Stream, now: float) -> None:
        self._phase(stream).completed += 1
        self.completed_count += 1
        self._digest.update(b"%d %.6f %d;" % (stream.id, now, stream.moves))

    def rejected(self, stream: Stream, now: float, reason: str) -> None:
        """A request has got 503."""
        self._phase(stream).rejected += 1
        self.rejections[reason] += 1
        model = self.scenario.models[stream.model]
        self.rejected_work[stream.model] += (
            stream.new_tokens * model.gpu_seconds_per_prompt_token + stream.output * model.gpu_seconds_per_token
        )
        self._new_rejections[stream.model] += 1
        self._digest.update(b"%d %.6f 503;" % (stream.id, now))

    def take_rejections(self) -> Counter[int]:
        """Return the number of rejections since the last call, by model."""
        taken, self._new_rejections = self._new_rejections, Counter()
        return taken

    def lost(self, stream: Stream, reason: str) -> None:
        self.losses.append((stream.id, reason))

    def moved(self, reason: str) -> None:
        self.moves[reason] += 1

    def pause(self, stream: Stream, seconds: float) -> None:
        self.pauses.setdefault(stream.move_reason, array("d")).append(seconds)

    def recovered(self, reason: str, seconds: float) -> None:
        self.recoveries.setdefault(reason, array("d")).append(seconds)

    @property
    def digest(self) -> str:
        """A hash of what became of each request, and when."""
        return self._digest.hexdigest()
