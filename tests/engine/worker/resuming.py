"""Helpers of tests that cut requests off and resume them in another engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from syringa.types import EngineRequest, ResumedChoice
from tests.engine.conftest import Answer, Answers


def cut_answer(answer: Answer, deltas: int) -> Answer:
    """Return what a client has received of a choice after so many deltas."""
    return join_answers(Answer(deltas=answer.deltas[:deltas]))


def join_answers(*parts: Answer) -> Answer:
    joined = Answer()
    for part in parts:
        for delta in part.deltas:
            joined.add(delta)
    return joined


def resume(request: EngineRequest, parts: Mapping[int, Answer]) -> EngineRequest:
    """Return a request as the client sends it to another worker, after it has received `parts` of its choices."""
    received = [parts.get(choice, Answer()) for choice in range(request.choices)]
    scored = any(delta.prompt_logprobs is not None for part in received for delta in part.deltas)
    return msgspec.structs.replace(
        request,
        resumed=tuple(ResumedChoice(list(part.tokens), part.finish is not None) for part in received),
        prompt_logprobs=None if scored else request.prompt_logprobs,
    )


def choices_of(request: EngineRequest, answers: Answers) -> dict[int, Answer]:
    return {choice: answers[request.id, choice] for choice in range(request.choices) if (request.id, choice) in answers}


def outcome(answer: Answer) -> Any:
    """Return everything that must not depend on where a choice was computed. Floats are compared exactly."""
    last = answer.deltas[-1]
    scores = [delta.prompt_logprobs for delta in answer.deltas if delta.prompt_logprobs is not None]
    return answer.tokens, answer.logprobs, answer.finish, last.stop_token, last.error, last.error_kind, scores
