"""The sampling fields that every endpoint takes, and what they become for the engine."""

from __future__ import annotations

import asyncio
import secrets
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from syringa.api.formats import check_grammar, to_grammar
from syringa.api.model import ServedModel
from syringa.errors import InvalidRequest
from syringa.types import Sampling, Stopping

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Unit = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
MAX_COUNT = 2**31 - 1
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]

V = TypeVar("V")
_STOP_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": 4}]}
_DEFAULT_BREAKERS = ("\n", ":", '"', "*")


class SamplingFields(msgspec.Struct, kw_only=True):
    """Base of the endpoints' wire types. An absent field has the default that the comment or the API says."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    min_p: Unit | None = None
    seed: Seed | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=1000)] | None = None
    logit_bias: dict[str, Any] | None = None
    stop: Annotated[Any, Meta(extra_json_schema=_STOP_SCHEMA)] = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    dry_multiplier: Annotated[float, Meta(ge=0, le=1000)] | None = None
    dry_base: Annotated[float, Meta(ge=1, le=1000)] | None = None
    dry_allowed_length: Count | None = None
    dry_sequence_breakers: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=128)] | None = None
    grammar: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=1024)] | None = None
    truncate_sequence: bool | None = None


async def to_sampling(fields: SamplingFields, model: ServedModel) -> Sampling:
    """The engine's view of the fields. Everything that depends on the vocabulary or a grammar is checked here."""
    grammar = to_grammar(fields.grammar, fields.response_format)
    if grammar is not None:
        # Compiling a hostile grammar can take a while; other requests must not wait for it.
        await asyncio.to_thread(check_grammar, grammar, "grammar" if fields.grammar is not None else "response_format")
    seed = secrets.randbits(63) if fields.seed is None else fields.seed & (2**63 - 1)
    return Sampling(
        seed=seed,
        temperature=_or(fields.temperature, 1.0),
        top_k=max(0, _or(fields.top_k, 0)),
        top_p=_or(fields.top_p, 1.0),
        min_p=_or(fields.min_p, 0.0),
        frequency_penalty=_or(fields.frequency_penalty, 0.0),
        presence_penalty=_or(fields.presence_penalty, 0.0),
        repetition_penalty=_or(fields.repetition_penalty, 1.0),
        logit_bias=_logit_bias(fields.logit_bias or {}, model.vocab_size),
        dry_multiplier=_or(fields.dry_multiplier, 0.0),
        dry_base=_or(fields.dry_base, 1.75),
        dry_allowed_length=_or(fields.dry_allowed_length, 2),
        dry_breakers=await _breakers(fields, model),
        grammar=grammar,
    )


def to_stopping(fields: SamplingFields, model: ServedModel, max_tokens: int) -> Stopping:
    min_tokens = _or(fields.min_tokens, 0)
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens ({min_tokens}) is above max_tokens ({max_tokens}).", param="min_tokens")
    check_tokens(fields.stop_token_ids or [], model.vocab_size, "stop_token_ids")
    return Stopping(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=bool(fields.ignore_eos),
        end_tokens=model.end_tokens,
        stop_tokens=frozenset(fields.stop_token_ids or ()),
    )


def to_stop(value: Any) -> tuple[str, ...]:
    """`stop` as strings: one, or up to four, none of them empty."""
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return ()
    if not isinstance(texts, list):
        raise InvalidRequest("stop: expected a string or an array of strings.", param="stop")
    if len(texts) > 4:
        raise InvalidRequest(f"stop: at most 4 strings, got {len(texts)}.", param="stop")
    for index, text in enumerate(texts):
        param = "stop" if isinstance(value, str) else f"stop[{index}]"
        if not isinstance(text, str):
            raise InvalidRequest(f"{param}: expected a string.", param=param)
        if not text:
            raise InvalidRequest(f"{param}: a stop string cannot be empty.", param=param)
    return tuple(dict.fromkeys(texts))


def check_tokens(tokens: list[int], vocab_size: int, param: str) -> None:
    """`check_token` for each of a list."""
    # A prompt can have a hundred thousand ids; only one that has a bad id pays for finding it.
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        for index, token in enumerate(tokens):
            check_token(token, vocab_size, f"{param}[{index}]")


def check_token(token: int, vocab_size: int, param: str) -> None:
    """Refuses an id that the model has no embedding for."""
    if not 0 <= token < vocab_size:
        raise InvalidRequest(f"{param}: {token} is outside the vocabulary of {vocab_size} tokens.", param=param)


def _logit_bias(given: dict[str, Any], vocab_size: int) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        param = f"logit_bias.{key}"
        if not (key.isascii() and key.isdigit() and len(key) < 20):
            raise InvalidRequest(f"{param}: a key is a token id.", param=param)
        check_token(int(key), vocab_size, param)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest(f"{param}: expected a number.", param=param)
        if not -100 <= value <= 100:
            raise InvalidRequest(f"{param}: expected a number from -100 to 100.", param=param)
        bias[int(key)] = float(value)
    return bias


async def _breakers(fields: SamplingFields, model: ServedModel) -> frozenset[int]:
    if not fields.dry_multiplier:
        return frozenset()
    texts = fields.dry_sequence_breakers
    texts = list(_DEFAULT_BREAKERS) if texts is None else texts
    find = model.tokenizer.tokens_containing
    return await asyncio.to_thread(lambda: frozenset().union(*map(find, texts)))


def _or(value: V | None, default: V) -> V:
    return default if value is None else value
