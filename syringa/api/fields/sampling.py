"""The sampling fields of all generation endpoints, and their conversion to engine parameters."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from syringa.api.fields.constraint_fields import ConstraintFields
from syringa.api.fields.constraints import constraint_path, read_constraint
from syringa.api.fields.schema import doc, nullable
from syringa.api.models.served_model import ServedModel
from syringa.errors import InvalidRequest
from syringa.ids import random_number
from syringa.types import SamplingParams, StopConditions

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Unit = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
RANDOM_SEED = -1  # as in vLLM and llama.cpp
MAX_COUNT = 2**31 - 1
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]

V = TypeVar("V")
_TEXT = {"type": "string", "minLength": 1}
MAX_STOP = 1000  # characters of a stop string, which is compared at every position of the output
MAX_STOPS = 64  # stop strings of a request
_STOP_SCHEMA = nullable(_TEXT, {"type": "array", "items": _TEXT, "maxItems": MAX_STOPS})
_BIAS_SCHEMA = {
    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,18})$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}
_DEFAULT_BREAKERS = ("\n", ":", '"', "*")


class SamplingFields(ConstraintFields, kw_only=True):
    """Base of the request bodies. An absent field has the default that its `doc` declares."""

    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None, doc("Sampling temperature; 0 is greedy.", 1.0)
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        doc("Sample from the smallest set of most likely tokens with this total probability.", 1.0),
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None,
        doc("Sample from this many most likely tokens; 0 or -1: no limit.", 0),
    ] = None
    min_p: Annotated[
        Unit | None, doc("Exclude tokens less likely than this fraction of the most likely token's probability.", 0.0)
    ] = None
    seed: Annotated[
        Seed | None,
        doc("Seed for sampling; the same request with the same seed gives the same output. Default, and -1: random."),
    ] = None
    frequency_penalty: Annotated[
        Penalty | None, doc("Subtracted from a token's logit for each time it was generated.", 0.0)
    ] = None
    presence_penalty: Annotated[
        Penalty | None, doc("Subtracted from a token's logit if it was generated before.", 0.0)
    ] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        doc("Penalty on tokens of the prompt and the output; 1: off.", 1.0),
    ] = None
    logit_bias: Annotated[
        Annotated[dict[str, Any], Meta(extra_json_schema=_BIAS_SCHEMA)] | None,
        doc("Map of token id to a value from -100 to 100 that is added to the token's logit."),
    ] = None
    stop: Annotated[
        Any,
        doc(
            "A string, or up to 64, that end the output and are not part of it; at most 1000 characters each.",
            **_STOP_SCHEMA,
        ),
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, doc("Return the stop string or the text of the stop token that ended the output.", False)
    ] = None
    skip_special_tokens: Annotated[
        bool | None,
        doc("Leave out the text of special tokens; false: return it, but not that of the token that ended it.", True),
    ] = None
    spaces_between_special_tokens: Annotated[
        bool | None,
        doc("Put a space between two special tokens in a row; applies with `skip_special_tokens: false`.", False),
    ] = None
    allowed_token_ids: Annotated[
        Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)] | None,
        doc(
            "Only these token ids may be generated. Without an end-of-sequence token among them, the output ends at "
            "its maximum length. Default: all."
        ),
    ] = None
    bad_words: Annotated[
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=MAX_STOP)]], Meta(max_length=1024)] | None,
        doc(
            "Words that are not generated, as the tokenizer encodes them with and without a space before; at most "
            "1024 of at most 1000 characters."
        ),
    ] = None
    n: Annotated[Annotated[int, Meta(ge=1, le=128)] | None, doc("Number of choices for each prompt.", 1)] = None
    dry_multiplier: Annotated[
        Annotated[float, Meta(ge=0, le=1000)] | None,
        doc("Strength of the DRY penalty on repeated sequences; 0: off.", 0.0),
    ] = None
    dry_base: Annotated[
        Annotated[float, Meta(ge=1, le=1000)] | None,
        doc("Base of the DRY penalty's growth with the length of a repeat.", 1.75),
    ] = None
    dry_allowed_length: Annotated[Count | None, doc("Longest repeat without DRY penalty, in tokens.", 2)] = None
    dry_sequence_breakers: Annotated[
        Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=128)] | None,
        doc("Strings that interrupt a repeat for DRY; at most 128.", list(_DEFAULT_BREAKERS)),
    ] = None
    ignore_eos: Annotated[bool | None, doc("Continue after end-of-sequence tokens.", False)] = None
    min_tokens: Annotated[
        Count | None, doc("Minimum number of output tokens; end-of-sequence and stop tokens are suppressed before.", 0)
    ] = None
    stop_token_ids: Annotated[
        Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=1024)] | None,
        doc("Token ids that end the output; at most 1024."),
    ] = None
    truncate_sequence: Annotated[
        bool | None, doc("Drop the oldest part of a prompt that is too long instead of refusing it.", False)
    ] = None
    priority: Annotated[
        Seed | None, doc("Order among the waiting requests of the organization: lower comes first.", 0)
    ] = None


async def to_sampling(fields: SamplingFields, model: ServedModel, ignored: list[str] | None = None) -> SamplingParams:
    """Convert the fields to the engine's sampling parameters.

    Raises `InvalidRequest` for a token id outside the vocabulary, or an invalid grammar; `compose_grammar` finds out
    whether it can be compiled. The paths of parts of the constraint that are not enforced are appended to `ignored`.
    """
    grammar = await read_constraint(fields, model.tokenizer.lark_vocabulary, [] if ignored is None else ignored)
    given = _or(fields.seed, RANDOM_SEED)
    seed = random_number(63) if given == RANDOM_SEED else given & (2**63 - 1)
    return SamplingParams(
        seed=seed,
        seeded=given != RANDOM_SEED,
        temperature=_or(fields.temperature, 1.0),
        top_k=max(0, _or(fields.top_k, 0)),
        top_p=_or(fields.top_p, 1.0),
        min_p=_or(fields.min_p, 0.0),
        frequency_penalty=_or(fields.frequency_penalty, 0.0),
        presence_penalty=_or(fields.presence_penalty, 0.0),
        repetition_penalty=_or(fields.repetition_penalty, 1.0),
        logit_bias=read_logit_bias(fields.logit_bias or {}, model.vocab_size),
        allowed_tokens=_read_allowed_tokens(fields, model),
        bad_words=await _encode_bad_words(fields.bad_words or [], model),
        dry_multiplier=_or(fields.dry_multiplier, 0.0),
        dry_base=_or(fields.dry_base, 1.75),
        dry_allowed_length=_or(fields.dry_allowed_length, 2),
        dry_breakers=await _dry_breakers(fields, model),
        grammar=grammar,
    )


def constraint_field(fields: SamplingFields, tools: object | None = None) -> str:
    """Return the path of the request field that the grammar comes from."""
    return constraint_path(fields) if tools is None else "tools"


def to_stop_conditions(fields: SamplingFields, model: ServedModel, max_tokens: int) -> StopConditions:
    """Convert the fields to the engine's stop conditions. Raises `InvalidRequest`."""
    min_tokens = _or(fields.min_tokens, 0)
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens ({min_tokens}) is above max_tokens ({max_tokens}).", param="min_tokens")
    check_tokens(fields.stop_token_ids or [], model.vocab_size, "stop_token_ids")
    return StopConditions(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=bool(fields.ignore_eos),
        end_tokens=model.end_tokens,
        stop_tokens=frozenset(fields.stop_token_ids or ()),
    )


def read_stop(value: Any, field: str = "stop") -> tuple[str, ...]:
    """Validate `stop`: a string or up to 64, none of them empty. Raises `InvalidRequest`. `field`: its name."""
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return ()
    if not isinstance(texts, list):
        raise InvalidRequest(f"{field}: expected a string or an array of strings.", param=field)
    if len(texts) > MAX_STOPS:
        raise InvalidRequest(f"{field}: at most {MAX_STOPS} strings, got {len(texts)}.", param=field)
    for index, text in enumerate(texts):
        param = field if isinstance(value, str) else f"{field}[{index}]"
        if not isinstance(text, str):
            raise InvalidRequest(f"{param}: expected a string.", param=param)
        if not text:
            raise InvalidRequest(f"{param}: a stop string cannot be empty.", param=param)
        if len(text) > MAX_STOP:
            raise InvalidRequest(f"{param}: at most {MAX_STOP} characters, got {len(text)}.", param=param)
    return tuple(dict.fromkeys(texts))


def check_tokens(tokens: list[int], vocab_size: int, param: str) -> None:
    """Raise `InvalidRequest` for the first token id outside the vocabulary."""
    # min and max are fast enough for 100,000 ids; only a list with a bad id is searched.
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        for index, token in enumerate(tokens):
            check_token(token, vocab_size, f"{param}[{index}]")


def check_token(token: int, vocab_size: int, param: str) -> None:
    """Raise `InvalidRequest` for a token id outside the vocabulary."""
    if not 0 <= token < vocab_size:
        raise InvalidRequest(f"{param}: {token} is outside the vocabulary of {vocab_size} tokens.", param=param)


def read_logit_bias(given: dict[str, Any], vocab_size: int) -> dict[int, float]:
    """Validate `logit_bias` and return it by token id. Raises `InvalidRequest`."""
    bias = {}
    for key, value in given.items():
        param = f"logit_bias.{key}"
        if not (key.isascii() and key.isdigit() and len(key) < 20) or key != str(int(key)):
            raise InvalidRequest(f"{param}: expected a token id as key.", param=param)
        check_token(int(key), vocab_size, param)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest(f"{param}: expected a number.", param=param)
        if not -100 <= value <= 100:
            raise InvalidRequest(f"{param}: expected a number from -100 to 100.", param=param)
        bias[int(key)] = float(value)
    return bias


def _read_allowed_tokens(fields: SamplingFields, model: ServedModel) -> frozenset[int]:
    check_tokens(fields.allowed_token_ids or [], model.vocab_size, "allowed_token_ids")
    return frozenset(fields.allowed_token_ids or ())


async def _encode_bad_words(words: list[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of the words at the start of a text and after a space."""

    def encode() -> tuple[tuple[int, ...], ...]:
        texts = [word.lstrip() or word for word in words]
        spaced = [text if text.isspace() else f" {text}" for text in texts]
        found = [tuple(model.tokenizer.encode(text, add_special=False)) for text in (*texts, *spaced)]
        return tuple(dict.fromkeys(tokens for tokens in found if tokens))

    return await asyncio.to_thread(encode) if words else ()


async def _dry_breakers(fields: SamplingFields, model: ServedModel) -> frozenset[int]:
    if not fields.dry_multiplier:
        return frozenset()
    texts = fields.dry_sequence_breakers
    texts = list(_DEFAULT_BREAKERS) if texts is None else texts
    find = model.tokenizer.tokens_containing
    return await asyncio.to_thread(lambda: frozenset().union(*map(find, texts)))


def _or(value: V | None, default: V) -> V:
    return default if value is None else value
