"""Deltas from the outputs of vLLM, with what the deltas of Syringa's own engine have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from syringa.engine.scheduling.sequence import no_token_message
from syringa.types import EngineDelta, EngineRequest, ErrorKind, FinishReason, TokenLogprobs

# JSON has no infinity; OpenAI's API reports this for tokens of negligible probability.
_MIN_LOGPROB = -9999.0
# vLLM's finish reasons; any other is an error.
_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class VllmLogprob(Protocol):
    logprob: float
    rank: int | None


class VllmCompletion(Protocol):
    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, VllmLogprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None


class VllmOutput(Protocol):
    """What is used of vLLM's `RequestOutput` with one completion, of the kind `DELTA`."""

    outputs: Sequence[VllmCompletion]
    prompt_logprobs: Sequence[Mapping[int, VllmLogprob] | None] | None
    num_cached_tokens: int | None
    metrics: Any  # `RequestStateStats`


def to_delta(request: EngineRequest, choice: int, output: VllmOutput, *, first: bool) -> EngineDelta:
    """Return the delta of a choice. `first`: whether it is the first one of that choice here."""
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    finish: FinishReason | None = None
    if completion.finish_reason is not None:
        finish = _FINISH.get(completion.finish_reason, "error")
    if not request.stopping.max_tokens:  # only prompt log-probabilities were requested: vLLM generates at least one
        tokens, finish = [], "length"
    allowed = request.sampling.allowed_tokens
    if allowed and not allowed.issuperset(tokens):  # vLLM takes any token where other rules leave none of these
        return failure(request, choice, no_token_message(request.sampling), _error_kind(request))
    logprobs: list[TokenLogprobs] = []
    if request.logprobs is not None and tokens:
        logprobs = [_token_logprobs(request, *each) for each in zip(tokens, completion.logprobs or (), strict=True)]
    begins = first and not request.resumed
    return EngineDelta(
        request.id,
        choice,
        tokens,
        logprobs,
        finish,
        tokens[-1] if finish == "stop" and tokens else None,
        (output.num_cached_tokens or 0) if begins and choice == 0 else 0,
        _prompt_logprobs(request, output) if first and choice == request.open_choices[0] else None,
        _error_message(request) if finish == "error" else None,
        _error_kind(request) if finish == "error" else "engine",
        queued_ms=_queued_ms(output) if begins and choice == 0 else 0,
    )


_ERROR = "The engine failed on this request."


def failure(request: EngineRequest, choice: int, message: str = _ERROR, kind: ErrorKind = "engine") -> EngineDelta:
    """Return the last delta of a choice that failed."""
    return EngineDelta(request.id, choice, finish="error", error=message, error_kind=kind)


def _error_kind(request: EngineRequest) -> ErrorKind:
    if request.sampling.grammar is not None:
        return "grammar"
    return "no_token" if request.sampling.allowed_tokens else "engine"


def _error_message(request: EngineRequest) -> str:
    """Return the error of a request that vLLM has ended.

    Where a grammar and other rules leave no token, vLLM takes one that the grammar rejects.
    """
    sampling = request.sampling
    if sampling.grammar is not None and (sampling.allowed_tokens or sampling.bad_words):
        return no_token_message(sampling)
    return _ERROR


def _token_logprobs(request: EngineRequest, token: int, found: Mapping[int, VllmLogprob]) -> TokenLogprobs:
    if request.logprob_tokens:
        top = _best({each: found[each] for each in request.logprob_tokens if each in found}, len(found))
    else:
        top = _best(found, request.logprobs or 0)
    return TokenLogprobs(token, max(_MIN_LOGPROB, found[token].logprob), top)


def _prompt_logprobs(request: EngineRequest, output: VllmOutput) -> list[TokenLogprobs | None] | None:
    top = request.prompt_logprobs
    if top is None:
        return None
    scored: list[TokenLogprobs | None] = [None]
    rows = (output.prompt_logprobs or ())[1 : len(request.prompt)]
    for token, found in zip(request.prompt[1:], rows, strict=True):
        assert found is not None  # only the first token has none
        own = found[token]
        scored.append(TokenLogprobs(token, max(_MIN_LOGPROB, own.logprob), _best(found, top), own.rank or 0))
    return scored


def _best(found: Mapping[int, VllmLogprob], count: int) -> list[tuple[int, float]]:
    """Return the most likely tokens, by value and then by id. The token itself is among them only if it is one."""
    best = sorted((-each.logprob, token) for token, each in found.items())[:count]
    return [(token, max(_MIN_LOGPROB, -value)) for value, token in best]


def _queued_ms(output: VllmOutput) -> int:
    metrics = output.metrics
    if metrics is None or not metrics.scheduled_ts or not metrics.queued_ts:
        return 0
    seconds: float = metrics.scheduled_ts - metrics.queued_ts
    return max(0, round(1000 * seconds))
