"""Requests that no worker on vLLM can continue after another one has begun them.

vLLM counts the tokens that a request already has as a part of its prompt. What depends on the output so far would
start anew, so such a request stays at its replica as long as that runs, and ends with an error afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

from syringa.errors import EngineUnavailable
from syringa.types import EngineRequest


def unresumable_fields(request: EngineRequest) -> list[str]:
    """Return the names of the fields because of which a request, once begun, cannot be continued elsewhere."""
    sampling = request.sampling
    used = {
        "seed": sampling.seeded and sampling.temperature > 0,
        "frequency_penalty": sampling.frequency_penalty != 0,
        "presence_penalty": sampling.presence_penalty != 0,
        "repetition_penalty": sampling.repetition_penalty != 1,
        "grammar": sampling.grammar is not None,
        "bad_words": any(len(word) > 1 for word in sampling.bad_words),
        "min_tokens": request.stopping.min_tokens > 0,
    }
    return [name for name, is_used in used.items() if is_used]


def resume_error(fields: Sequence[str]) -> EngineUnavailable:
    """Return the error of a request that cannot be continued because of its `fields`."""
    names = ", ".join("a grammar, schema or tools" if name == "grammar" else f"`{name}`" for name in fields)
    return EngineUnavailable(
        "The model worker ended while it was answering. The model runs on vLLM, which cannot continue a request with "
        f"{names} elsewhere: send it again."
    )
