"""A generation whose requests move between replicas has the events and the usage of one that is not disturbed."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from syringa.engine.client.moves import Moved, RequestProgress
from syringa.engine.interface import DeltaHandler
from syringa.events import Event, GenerationRequest, GenerationStats, OutputFormat
from syringa.generation import run_generation
from syringa.output.collect import collect
from syringa.types import EngineDelta, EngineRequest, SamplingParams, StopConditions
from tests.fake_engine import ByteTokenizer, FakeEngine
from tests.tiers import examples


class MovingEngine(FakeEngine):
    """Move each request to a new replica after every number of deltas in `moves`; the delta that follows is lost."""

    def __init__(self, moves: list[int], at_once: int) -> None:
        super().__init__(at_once=at_once)
        self.queued_ms = 7
        self._moves = moves
        self._progress: dict[str, tuple[RequestProgress, FakeEngine]] = {}

    async def submit(self, request: EngineRequest, on_delta: DeltaHandler) -> None:
        progress = RequestProgress(request, on_delta)
        for deltas in [*self._moves, None]:
            if await self._run_once(request.id, progress, deltas):
                return

    def abort(self, request_id: str, choice: int | None = None) -> None:
        progress, replica = self._progress[request_id]
        progress.abort(choice)
        replica.abort(request_id, choice)

    async def _run_once(self, id_: str, progress: RequestProgress, deltas: int | None) -> bool:
        replica = FakeEngine(at_once=self.at_once)
        replica.queued_ms = self.queued_ms
        self._progress[id_] = progress, replica
        received = 0

        def handle(delta: EngineDelta) -> bool:
            nonlocal received
            if received == deltas:
                raise Moved("drain")
            received += 1
            return progress.handle(delta)

        request = progress.next_request()
        try:
            if request.open_choices:
                await replica.submit(request, handle)
        except Moved:
            return False
        return True


async def run(engine: FakeEngine, request: GenerationRequest) -> tuple[Any, ...]:
    """Return the choices, prompt scores and usage of a generation, and what is accounted."""
    events: list[Event] = []
    stats = GenerationStats()
    usage = await run_generation(engine, ByteTokenizer(), request, events.extend, stats)
    whole = collect([*events, usage])
    counted = {name: getattr(stats, name) for name in GenerationStats.__slots__ if name != "first_token_at"}
    return whole.choices, sorted(whole.prompts, key=lambda each: each.prompt), usage, counted


@settings(max_examples=examples(200))
@given(
    seed=st.integers(0, 1000),
    options=st.fixed_dictionaries(
        {
            "prompts": st.lists(st.lists(st.integers(97, 120), min_size=1, max_size=4), min_size=1, max_size=2),
            "candidates": st.integers(1, 4),
            "max_tokens": st.integers(0, 40),
            "ignore_eos": st.booleans(),
        },
        optional={
            "stop": st.lists(st.sampled_from(["ab", "c", "é", "\n", "d😀"]), min_size=1, max_size=2).map(tuple),
            "logprobs": st.integers(0, 2),
            "prompt_logprobs": st.integers(0, 2),
            "report_tokens": st.booleans(),
            "output": st.just(OutputFormat(reasoning="think", reasoning_open=True)),
            "best": st.booleans(),
        },
    ),
    moves=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    at_once=st.sampled_from([1, 1, 3]),
)
def test_generation_whose_requests_move_equals_an_undisturbed_one(
    seed: int, options: dict[str, Any], moves: list[int], at_once: int
) -> None:
    stopping = StopConditions(max_tokens=options.pop("max_tokens"), ignore_eos=options.pop("ignore_eos"))
    choices = 1 if options.pop("best", False) else options["candidates"]
    request = GenerationRequest(
        id="r", sampling=SamplingParams(seed=seed), stopping=stopping, choices=choices, **options
    )
    undisturbed = FakeEngine(at_once=at_once)
    undisturbed.queued_ms = 7
    expected = asyncio.run(run(undisturbed, request))
    assert asyncio.run(run(MovingEngine(moves, at_once), request)) == expected
