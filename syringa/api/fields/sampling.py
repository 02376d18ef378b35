"""The sampling fields that every endpoint takes, and what they become for the engine."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from syringa.api.fields.annotations import nullable, says
from syringa.api.fields.constraints import FORMAT_SCHEMA, GRAMMAR_SCHEMA, check_grammar, to_grammar
from syringa.api.models.served_model import ServedModel
from syringa.errors import InvalidRequest
from syringa.ids import random_number
from syringa.prompt.grammar.compile_pool import in_workshop
from syringa.types import Grammar, Sampling, Stopping

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Unit = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
MAX_COUNT = 2**31 - 1
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]

V = TypeVar("V")
_TEXT = {"type": "string", "minLength": 1}
MAX_STOP = 1000  # characters: every character of an answer is compared with every stop string
_STOP_SCHEMA = nullable(_TEXT, {"type": "array", "items": _TEXT, "maxItems": 4})
_BIAS_SCHEMA = {
    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,18})$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}
_DEFAULT_BREAKERS = ("\n", ":", '"', "*")


class SamplingFields(msgspec.Struct, kw_only=True):
    """Base of the endpoints' wire types. An absent field has the default that `says` gives."""

    temperature: Annotated[Annotated[float, Meta(ge=0, le=2)] | None, says("Randomness; 0 is greedy.", 1.0)] = None
    top_p: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None, says("Draw from the likeliest tokens that sum to this.", 1.0)
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None, says("Draw from this many likeliest tokens; -1 or 0: off.", 0)
    ] = None
    min_p: Annotated[
        Unit | None, says("Leave out tokens below this share of the likeliest one's probability.", 0.0)
    ] = None
    seed: Annotated[Seed | None, says("The same seed gives the same bytes; absent: drawn anew.")] = None
    frequency_penalty: Annotated[Penalty | None, says("Taken off a token's logit each time it was generated.", 0.0)] = (
        None
    )
    presence_penalty: Annotated[Penalty | None, says("Taken off a token's logit once it was generated.", 0.0)] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        says("Weakens tokens of the prompt and the output; 1: off.", 1.0),
    ] = None
    logit_bias: Annotated[
        Annotated[dict[str, Any], Meta(extra_json_schema=_BIAS_SCHEMA)] | None,
        says("Token id to a number that is added to its logit; the id must be in the vocabulary."),
    ] = None
    stop: Annotated[Any, says("A string, or up to four, that end the answer; never part of it.", **_STOP_SCHEMA)] = None
    n: Annotated[Annotated[int, Meta(ge=1, le=128)] | None, says("Choices for each prompt.", 1)] = None
    dry_multiplier: Annotated[
        Annotated[float, Meta(ge=0, le=1000)] | None, says("Strength of DRY, against repeated sequences; 0: off.", 0.0)
    ] = None
    dry_base: Annotated[
        Annotated[float, Meta(ge=1, le=1000)] | None, says("How DRY grows with the length of a repeat.", 1.75)
    ] = None
    dry_allowed_length: Annotated[Count | None, says("The longest repeat that DRY leaves alone.", 2)] = None
    dry_sequence_breakers: Annotated[
        Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=128)] | None,
        says("Strings across which DRY sees no repeat.", list(_DEFAULT_BREAKERS)),
    ] = None
    grammar: Annotated[
        Annotated[dict[str, Any], Meta(extra_json_schema=GRAMMAR_SCHEMA)] | None,
        says("What the answer must match: a regular expression, a JSON schema, a Lark or an llguidance grammar."),
    ] = None
    response_format: Annotated[
        Annotated[dict[str, Any], Meta(extra_json_schema=FORMAT_SCHEMA)] | None,
        says("`text`, `json_object`, or `json_schema` with a schema; under `strict` every keyword of it is enforced."),
    ] = None
    ignore_eos: Annotated[bool | None, says("End tokens do not end the answer.", False)] = None
    min_tokens: Annotated[Count | None, says("End and stop tokens cannot come earlier.", 0)] = None
    stop_token_ids: Annotated[
        Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=1024)] | None, says("Tokens that end the answer.")
    ] = None
    truncate_sequence: Annotated[
        bool | None, says("Keep the newest tokens that fit, instead of refusing a long prompt.", False)
    ] = None


async def to_sampling(fields: SamplingFields, model: ServedModel, ignored: list[str] | None = None) -> Sampling:
    """The engine's view of the fields. Everything that depends on the vocabulary or a grammar is checked here.

    What is not honoured inside `grammar` and `response_format` is added to `ignored`.
    """
    grammar = None
    if fields.grammar is not None or fields.response_format is not None:
        found = [] if ignored is None else ignored
        grammar = await in_workshop(lambda: _checked_grammar(fields, found), constraint_field(fields))
    seed = random_number(63) if fields.seed is None else fields.seed & (2**63 - 1)
    return Sampling(
        seed=seed,
        temperature=_or(fields.temperature, 1.0),
        top_k=max(0, _or(fields.top_k, 0)),
        top_p=_or(fields.top_p, 1.0),
        min_p=_or(fields.min_p, 0.0),
        frequency_penalty=_or(fields.frequency_penalty, 0.0),
        presence_penalty=_or(fields.presence_penalty, 0.0),
        repetition_penalty=_or(fields.repetition_penalty, 1.0),
        logit_bias=to_logit_bias(fields.logit_bias or {}, model.vocab_size),
        dry_multiplier=_or(fields.dry_multiplier, 0.0),
        dry_base=_or(fields.dry_base, 1.75),
        dry_allowed_length=_or(fields.dry_allowed_length, 2),
        dry_breakers=await _breakers(fields, model),
        grammar=grammar,
    )


def _checked_grammar(fields: SamplingFields, ignored: list[str]) -> Grammar | None:
    grammar = to_grammar(fields.grammar, fields.response_format, ignored)
    if grammar is not None:
        check_grammar(grammar, constraint_field(fields))
    return grammar


def constraint_field(fields: SamplingFields, tools: object | None = None) -> str:
    """Where in a request its grammar is."""
    if fields.grammar is not None:
        return "grammar.value"
    if tools is not None:
        return "tools"
    shaped = (fields.response_format or {}).get("type") == "json_schema"
    return "response_format.json_schema.schema" if shaped else "response_format"


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
        if len(text) > MAX_STOP:
            raise InvalidRequest(f"{param}: at most {MAX_STOP} characters, got {len(text)}.", param=param)
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


def to_logit_bias(given: dict[str, Any], vocab_size: int) -> dict[int, float]:
    """`logit_bias` by token id, checked."""
    bias = {}
    for key, value in given.items():
        param = f"logit_bias.{key}"
        if not (key.isascii() and key.isdigit() and len(key) < 20) or key != str(int(key)):
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
