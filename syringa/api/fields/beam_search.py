"""`use_beam_search` and `length_penalty`: validation against the fields that beam search cannot honor."""

from __future__ import annotations

from syringa.api.fields.token_output import TokenFields
from syringa.errors import InvalidRequest
from syringa.types import SamplingParams

# Rules that change probabilities or end the output by its text: beams are ranked by the model's own probabilities.
_REFUSED = (
    "stop", "allowed_token_ids", "bad_words", "logit_bias", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "dry_multiplier", "logprob_token_ids", "best_of",
)  # fmt: skip
_NEUTRAL = {"repetition_penalty": 1}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")


def read_beam_search(
    fields: TokenFields, sampling: SamplingParams, ignored: list[str], *, images: bool = False
) -> float | None:
    """Return the length penalty of a beam search; None if none is requested.

    Fields of sampling are appended to `ignored`. Raises `InvalidRequest` for fields that cannot be combined with it.
    """
    if not fields.use_beam_search:
        if fields.length_penalty is not None:
            ignored.append("length_penalty")
        return None
    for name in _REFUSED:
        value = getattr(fields, name, None)
        if value and value != _NEUTRAL.get(name):
            raise InvalidRequest(f"use_beam_search and {name} cannot be combined.", param="use_beam_search")
    if sampling.grammar is not None:
        raise InvalidRequest(
            "use_beam_search cannot be combined with a grammar, a format, tools or a reasoning budget.",
            param="use_beam_search",
        )
    if images:
        raise InvalidRequest("use_beam_search: not supported with images.", param="use_beam_search")
    ignored += [name for name in _SAMPLING if getattr(fields, name) is not None]
    return 1.0 if fields.length_penalty is None else fields.length_penalty
