"""The requests: when they come, of which chat they are, how long they are. All of it depends on the seed alone."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from bench.fleet_sim.scenario import MINUTE, Scenario
from syringa.engine.client.router import Assignment, RoutingKey, prefix_points

if TYPE_CHECKING:
    from bench.fleet_sim.replica import BatchedReplica

APPLICATIONS = 6  # of each model: each has a system prompt
CONTINUED = 0.62  # share of the requests that continue a chat
RETURNS = 0.68  # probability that a chat goes on
THINKING_SECONDS = 60.0  # about the mean time between two turns
BURST_SECONDS = 15.0  # the rate is constant for so long
SPREAD = 0.7  # of the logarithms of lengths


@dataclass(slots=True, eq=False)
class Chat:
    id: int
    application: int
    organization: str
    api_process: int  # its client keeps a connection
    tokens: int  # so far
    prefixes: dict[int, bytes] = field(default_factory=dict)  # hashes of `routing_key`, by length


@dataclass(slots=True)
class Recovery:
    """The requests that a replica has left behind, until all of them generate again."""

    begun: float
    left: int


@dataclass(slots=True, eq=False)
class Stream:
    """A request and what has become of it."""

    id: int
    model: int
    chat: Chat
    prompt: int
    new_tokens: int  # of the prompt, that were not part of the chat before
    output: int
    arrived: float
    waits_since: float  # in the queues of replicas, or for a replica
    key: RoutingKey | None = None
    replica: BatchedReplica | None = None
    assignment: Assignment | None = None
    target: str = ""  # the replica to which it is to move
    admitted_at: float | None = None
    first_token_at: float | None = None
    prefilled: bool = False  # once
    cached: int = 0
    generated: float = 0.0
    mark: float | None = None  # of the replica's token counter, at which it ends
    moves: int = 0
    silences: int = 0
    crashes: int = 0
    left_at: float | None = None  # when it was interrupted
    move_reason: str = ""
    recovery: Recovery | None = None
    routed_at: float = 0.0
    waited: float = 0.0  # in the queues of the replicas before, without having begun


@dataclass(frozen=True)
class Arrivals:
    """The requests of some seconds, one per position, ordered by time."""

    times: list[float]
    models: list[int]
    prompts: list[int]
    outputs: list[int]
    draws: list[float]  # to choose the chat
    continues: list[bool]
    organizations: list[int]


class Workload:
    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.minutes = int(scenario.end // MINUTE) + 1
        self.demanded = np.zeros((len(scenario.models), self.minutes + 60))  # GPU-seconds, see fleet-scale.md
        self._numbers = np.random.default_rng(seed)
        self._chooser = random.Random(seed)
        self._idle: list[list[Chat]] = [[] for _ in scenario.models]
        self._chats = self._requests = 0
        shares = np.array([model.share for model in scenario.models])
        self._shares = np.cumsum(shares / shares.sum())
        weights = 1 / np.arange(1, scenario.organizations + 1) ** 0.8
        self._organizations = np.cumsum(weights / weights.sum())

    @property
    def requests(self) -> int:
        return self._requests

    def arrivals(self) -> Iterator[Arrivals]:
        """Yield all requests, some seconds at a time."""
        at = 0.0
        while at < self.scenario.requests_end:
            yield self._burst(at)
            at += BURST_SECONDS

    def _burst(self, at: float) -> Arrivals:
        draw, scenario = self._numbers, self.scenario
        seconds = min(BURST_SECONDS, scenario.requests_end - at)
        count = int(draw.poisson(scenario.rate(at + seconds / 2) * seconds / 3600))
        times = np.sort(draw.uniform(at, at + seconds, count))
        models = np.searchsorted(self._shares, draw.random(count))
        models = np.minimum(models, len(scenario.models) - 1)
        prompts = _lengths(draw, scenario.prompt_mean, count)
        outputs = _lengths(draw, scenario.output_mean, count)
        self._add_demand(times, models, prompts, outputs)
        organizations = np.searchsorted(self._organizations, draw.random(count))
        return Arrivals(
            times.tolist(),
            models.tolist(),
            prompts.tolist(),
            outputs.tolist(),
            draw.random(count).tolist(),
            (draw.random(count) < CONTINUED).tolist(),
            organizations.tolist(),
        )

    def _add_demand(self, times: np.ndarray, models: np.ndarray, prompts: np.ndarray, outputs: np.ndarray) -> None:
        """Spread the work of requests over the time they take in a full batch that they enter at once."""
        known = self.scenario.models
        prompt_cost = np.array([model.gpu_seconds_per_prompt_token for model in known])[models]
        output_cost = np.array([model.gpu_seconds_per_token for model in known])[models]
        prefill = np.array([model.prefill for model in known])[models]
        step = np.array([model.nominal_step for model in known])[models]
        work = prompts * prompt_cost + outputs * output_cost
        seconds = prompts / prefill + outputs * step
        first = (times // MINUTE).astype(int)
        ends = times + seconds
        for offset in range(int(((ends // MINUTE) - first).max(initial=0)) + 1):
            begin = (first + offset) * MINUTE
            part = np.clip(np.minimum(ends, begin + MINUTE) - np.maximum(times, begin), 0.0, None) / seconds
            minutes = np.minimum(first + offset, self.demanded.shape[1] - 1)
            np.add.at(self.demanded, (models, minutes), work * part)

    def request(self, arrivals: Arrivals, position: int) -> Stream:
        """Return a request: the next turn of a chat that waits for its user, or the first of a new one."""
        model, now = arrivals.models[position], arrivals.times[position]
        idle = self._idle[model]
        if arrivals.continues[position] and idle:
            index = int(arrivals.draws[position] * len(idle))
            idle[index], idle[-1] = idle[-1], idle[index]
            chat = idle.pop()
        else:
            chat = self._new_chat(model, arrivals.draws[position], arrivals.organizations[position])
        new = arrivals.prompts[position]
        self._requests += 1
        prompt = chat.tokens + new
        key = RoutingKey(chat.organization, prompt, 1, self._prefixes(chat, prompt))
        return Stream(self._requests, model, chat, prompt, new, arrivals.outputs[position], now, now, key)

    def ended(self, stream: Stream) -> None:
        """The chat of a request that has got its answer waits for its user, or ends."""
        chat, scenario = stream.chat, self.scenario
        chat.tokens = stream.prompt + stream.output
        share = scenario.models[stream.model].share
        wanted = max(20.0, CONTINUED * share * scenario.rate(stream.arrived) / 3600 * THINKING_SECONDS)
        idle = self._idle[stream.model]
        if chat.tokens < scenario.max_context and len(idle) < wanted and self._chooser.random() < RETURNS:
            idle.append(chat)

    def _new_chat(self, model: int, draw: float, organization: int) -> Chat:
        self._chats += 1
        application = model * APPLICATIONS + int(draw * APPLICATIONS)
        system = self.scenario.system_tokens
        process = self._chats % self.scenario.api_processes
        return Chat(self._chats, application, f"o{organization}", process, system)

    def _prefixes(self, chat: Chat, prompt: int) -> tuple[tuple[int, bytes], ...]:
        """Return what `routing_key` returns for a prompt, without its tokens."""
        known, system = chat.prefixes, self.scenario.system_tokens
        points = _points(prompt)
        for point in points:
            if point not in known:
                known[point] = b"%d/%d/%d" % (chat.application, 0 if point <= system else chat.id, point)
        return tuple([(point, known[point]) for point in points])


@functools.cache
def _points(length: int) -> tuple[int, ...]:
    """Return `prefix_points`, the longest first."""
    return tuple(reversed(prefix_points(length)))


def _lengths(draw: np.random.Generator, mean: float, count: int) -> np.ndarray:
    """Return log-normal lengths of at least 8 tokens and at most four times the mean."""
    lengths = draw.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, count)
    return np.clip(lengths, 8, 4 * mean).astype(int)
