"""Requests for vLLM: each choice of a request becomes a request of its own, as it does inside of vLLM.

Every field of `EngineRequest` is either mapped here or refused by its name. Fields that only order or account for
requests (`tenant`, `background`, `fingerprint`, `isolation`) concern `engine.py`. `SamplingParams.opening`, which no
client sets, has no effect: a logits processor that follows the output would slow down every step of vLLM.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

from syringa.engine.vllm.grammar import to_structured_outputs
from syringa.engine.vllm.resume import resume_error, unresumable_fields
from syringa.errors import InvalidRequest
from syringa.types import EngineRequest

MAX_SEED = 2**63 - 1


class ChoiceRequest(NamedTuple):
    """One choice of a request, in vLLM's terms."""

    choice: int
    prompt: list[int]
    cache_salt: str
    sampling: dict[str, Any]  # arguments of vLLM's `SamplingParams`
    structured_outputs: dict[str, Any] | None  # arguments of `StructuredOutputsParams`
    bad_words: list[list[int]]


def to_choice_requests(request: EngineRequest, special_tokens: Mapping[str, int]) -> list[ChoiceRequest]:
    """Return the requests of the open choices.

    Raises `InvalidRequest` for a field that vLLM has no equivalent for, and `EngineUnavailable` for a request that it
    cannot continue.
    """
    _refuse_unsupported(request)
    if request.longest_resumed and (fields := unresumable_fields(request)):
        raise resume_error(fields)
    grammar = request.sampling.grammar
    structured_outputs = to_structured_outputs(grammar, special_tokens) if grammar is not None else None
    # A salt of its own keeps a request out of the prefix cache: it neither finds anything nor is found.
    salt = request.cache_key.hex() or "-" if request.use_cache else secrets.token_hex(16)
    return [
        ChoiceRequest(
            choice,
            [*request.prompt, *_done(request, choice)],
            salt,
            _sampling_arguments(request, choice, first=index == 0),
            structured_outputs,
            [list(word) for word in request.sampling.bad_words],
        )
        for index, choice in enumerate(request.open_choices)
    ]


def _sampling_arguments(request: EngineRequest, choice: int, *, first: bool) -> dict[str, Any]:
    sampling, stopping = request.sampling, request.stopping
    # With a grammar the output ends where the grammar does, and vLLM ends it by the end-of-sequence token.
    ignore_eos = (stopping.ignore_eos or not stopping.end_tokens) and sampling.grammar is None
    stop_tokens = stopping.stop_tokens if ignore_eos else stopping.stop_tokens | stopping.end_tokens
    arguments: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": (sampling.seed + choice) & MAX_SEED if sampling.seeded else None,
        "max_tokens": max(1, stopping.max_tokens - len(_done(request, choice))),
        "min_tokens": min(stopping.min_tokens, max(1, stopping.max_tokens)),
        "ignore_eos": ignore_eos,
        "stop_token_ids": sorted(stop_tokens),
        "logprobs": request.logprobs,
        "prompt_logprobs": request.prompt_logprobs if first else None,
        "logit_bias": sampling.logit_bias or None,
        "allowed_token_ids": sorted(sampling.allowed_tokens) or None,
        "detokenize": False,
    }
    if request.logprobs is not None and request.logprob_tokens:
        arguments |= {"logprobs": len(request.logprob_tokens), "logprob_token_ids": list(request.logprob_tokens)}
    return arguments


def _done(request: EngineRequest, choice: int) -> list[int]:
    """Return the tokens that another worker has generated for a choice."""
    return request.resumed[choice].tokens if request.resumed else []


def _refuse_unsupported(request: EngineRequest) -> None:
    """Raise `InvalidRequest` for fields that vLLM has no equivalent for."""
    sampling = request.sampling
    if sampling.dry_multiplier:
        raise InvalidRequest("The model runs on vLLM, which has no `dry_multiplier`.", param="dry_multiplier")
    if request.images:
        raise InvalidRequest("The model runs on vLLM, which is given text only: it takes no images.", param="messages")
    if request.stopping.min_tokens and sampling.grammar is not None:
        raise InvalidRequest(
            "The model runs on vLLM, which cannot combine `min_tokens` with a grammar, a schema or tools.",
            param="min_tokens",
        )
