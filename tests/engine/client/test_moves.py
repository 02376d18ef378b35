from __future__ import annotations

import msgspec
import pytest

from syringa.engine.client.moves import RequestProgress
from syringa.types import EngineDelta, EngineRequest, ResumedChoice, TokenLogprobs
from tests.engine.processes.supervisor_harness import request


class ProgressRecorder:
    """A progress with a clock that the test sets, and the deltas that its handler received."""

    def __init__(self, made: EngineRequest) -> None:
        self.now = 100.0
        self.deltas: list[EngineDelta] = []
        self.progress = RequestProgress(made, self._take, lambda: self.now)

    def _take(self, delta: EngineDelta) -> bool:
        self.deltas.append(delta)
        return delta.finish is not None

    def feed(self, *tokens: int, choice: int = 0, **fields: object) -> bool:
        return self.progress.handle(EngineDelta("r", choice, list(tokens), **fields))  # type: ignore[arg-type]


def test_progress_passes_on_deltas_and_the_answer_of_the_handler() -> None:
    recorder = ProgressRecorder(request("r"))
    assert not recorder.feed(1)
    assert recorder.feed(2, finish="stop")
    assert [delta.tokens for delta in recorder.deltas] == [[1], [2]]


def test_next_request_is_new_until_a_delta_has_arrived() -> None:
    made = msgspec.structs.replace(request("r"), prompt_logprobs=2)
    recorder = ProgressRecorder(made)
    assert recorder.progress.next_request() == made
    assert recorder.progress.next_request("full") == msgspec.structs.replace(made, isolation="full")


def test_next_request_resumes_each_choice_where_it_was() -> None:
    recorder = ProgressRecorder(msgspec.structs.replace(request("r"), choices=3))
    recorder.feed(1, 2)
    recorder.feed(3, choice=2)
    recorder.feed(4, choice=2, finish="length")
    recorder.feed(5)
    resumed = recorder.progress.next_request("start")
    expected = (ResumedChoice([1, 2, 5]), ResumedChoice([]), ResumedChoice([3, 4], finished=True))
    assert (resumed.resumed, resumed.isolation) == (expected, "start")
    recorder.feed(6)
    assert resumed.resumed == expected  # a copy


@pytest.mark.parametrize("delivered", [False, True])
def test_next_request_asks_for_prompt_logprobs_until_they_were_delivered(delivered: bool) -> None:
    recorder = ProgressRecorder(msgspec.structs.replace(request("r"), prompt_logprobs=2))
    recorder.feed(1, prompt_logprobs=[None, TokenLogprobs(1, -0.5)] if delivered else None)
    assert recorder.progress.next_request().prompt_logprobs == (None if delivered else 2)


def test_progress_fits_if_its_longest_possible_output_ends_in_time() -> None:
    recorder = ProgressRecorder(request("r", tokens=11))
    assert not recorder.progress.fits(1e9)  # it has not begun
    recorder.feed(1)
    assert not recorder.progress.fits(1e9)  # its pace is unknown
    for _ in range(5):
        recorder.now += 2.0
        recorder.feed(1)
    assert recorder.progress.fits(10.0)  # 5 tokens at 2 s
    assert not recorder.progress.fits(9.9)
    recorder.progress.next_request()  # another replica has its own pace
    recorder.now += 100.0
    recorder.feed(1)
    recorder.now += 1.0
    recorder.feed(1)
    assert recorder.progress.fits(3.0)
    assert not recorder.progress.fits(2.9)
