"""The inputs of embeddings, rerank and score requests: their forms, their tokens, and what happens to long ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from syringa.api.fields.sampling import MAX_COUNT, check_tokens
from syringa.api.fields.schema import doc
from syringa.api.models.served_model import Encoder, ServedModel
from syringa.errors import ContextLengthExceeded, InvalidRequest
from syringa.prompt.tokens.encoder_tokenizer import EncoderTokenizer

MAX_INPUTS = 2048  # of a request
_INLINE_CHARACTERS = 4096  # more are tokenized in a thread
_INLINE_IDS = 10_000  # more are checked in a thread
_SLICE_CHARACTERS = 1 << 18  # tokenized at a time: the tokenizer needs some hundred bytes for each token of a call
# A text with more characters per token of the model than this many of the longest tokens is not tokenized as a whole.
# Only white space, which has no tokens, could be so long and fit.
_LONG_TOKENS = 8

TruncationSide = Literal["left", "right"]
KeepTokens = Callable[[int, list[int]], list[int]]
"""Returns what remains of the tokens of a text, given its index too. Raises `InvalidRequest`."""

_REQUEST_ID = r"^[A-Za-z0-9._:-]+(?![\s\S])"  # unlike in JavaScript, $ also matches before a final newline


class EncoderFields(msgspec.Struct, kw_only=True):
    """Base of the bodies of embeddings, rerank and score requests."""

    model: Annotated[
        str | None,
        doc(
            "Model id from `/v1/models`, an alias, or `default`. Default: that of the setting `embedding_model`, or "
            "the first one that can be used here."
        ),
    ] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=MAX_COUNT, extra_json_schema={"not": {"const": 0}})] | None,
        doc("Cut each input to this many tokens, with its special tokens; -1: to as many as the model takes."),
    ] = None
    truncation_side: Annotated[
        TruncationSide | None,
        doc("Side from which inputs are cut: `left` keeps the last tokens, `right` the first.", "right"),
    ] = None
    user: Annotated[str | None, doc("End-user id, stored with the usage record.")] = None
    priority: Annotated[
        Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT)] | None,
        doc("Order among the waiting requests of the organization; lower comes first.", 0),
    ] = None
    request_id: Annotated[
        Annotated[str, Meta(min_length=1, max_length=128, pattern=_REQUEST_ID)] | None,
        doc("Id of the response, after the prefix that ids of the endpoint have. Default: random."),
    ] = None


class Truncation(msgspec.Struct, frozen=True):
    """How inputs are cut: to so many tokens, or to as many as the model takes, where `tokens` is 0."""

    tokens: int = 0
    side: TruncationSide = "right"

    def cut(self, tokens: list[int], length: int) -> list[int]:
        """Return the tokens that remain of a text if there may be `length` of them."""
        if len(tokens) <= length:
            return tokens
        return tokens[:length] if self.side == "right" else tokens[len(tokens) - length :]


def require_encoder(model: ServedModel) -> Encoder:
    assert model.encoder is not None, "models are found by their kind"
    return model.encoder


def read_truncation(fields: EncoderFields, model: ServedModel, *, default: bool) -> Truncation | None:
    """Return how inputs are cut; None: they are refused if they are too long. Raises `InvalidRequest`.

    `default`: whether they are cut if the request does not say.
    """
    side, tokens = fields.truncation_side or "right", fields.truncate_prompt_tokens
    if tokens is None:
        return Truncation(side=side) if default else None
    if tokens == 0 or tokens > model.max_model_len:
        param = "truncate_prompt_tokens"
        raise InvalidRequest(
            f"{param}: expected -1, or 1 to {model.max_model_len} (the longest input of the model), not {tokens}.",
            param=param,
        )
    return Truncation(max(0, tokens), side)


async def read_inputs(given: Any, model: ServedModel, param: str) -> list[str] | list[list[int]]:
    """Validate a string, an array of strings, an array of token ids, or an array of such arrays.

    Many token ids are checked in a thread, so that other requests do not wait.
    """
    lists = [given, *given[:MAX_INPUTS]] if isinstance(given, list) else []
    if sum(len(each) for each in lists if isinstance(each, list)) <= _INLINE_IDS:
        return _read_inputs(given, model, param)
    return await asyncio.to_thread(_read_inputs, given, model, param)


def _read_inputs(given: Any, model: ServedModel, param: str) -> list[str] | list[list[int]]:
    if isinstance(given, str):
        return read_texts(given, param)
    if not isinstance(given, list) or not given:
        raise InvalidRequest(
            f"{param}: expected a string, an array of strings, an array of token ids, or an array of such arrays, and "
            "at least one of them.",
            param=param,
        )
    if isinstance(given[0], str):
        return read_texts(given, param)
    if not isinstance(given[0], list):
        return [_read_ids(given, model, param)]
    _check_number(given, param)
    return [_read_ids(ids, model, f"{param}[{index}]") for index, ids in enumerate(given)]


def read_texts(given: Any, param: str, *, allow_empty: bool = False) -> list[str]:
    """Validate a string or an array of strings, none of them empty unless allowed. Raises `InvalidRequest`."""
    if isinstance(given, str):
        if not given and not allow_empty:
            raise InvalidRequest(f"{param}: expected a text that is not empty.", param=param)
        return [given]
    if not isinstance(given, list) or not given:
        raise InvalidRequest(f"{param}: expected a string or an array of strings, and at least one.", param=param)
    _check_number(given, param)
    for index, text in enumerate(given):
        if not isinstance(text, str) or not (text or allow_empty):
            where = f"{param}[{index}]"
            raise InvalidRequest(f"{where}: expected a text{'' if allow_empty else ' that is not empty'}.", param=where)
    return given


def _check_number(given: list[Any], param: str) -> None:
    if len(given) > MAX_INPUTS:
        raise InvalidRequest(f"{param}: at most {MAX_INPUTS} in one request, got {len(given)}.", param=param)


def _read_ids(given: Any, model: ServedModel, param: str) -> list[int]:
    if not isinstance(given, list) or not given:
        raise InvalidRequest(f"{param}: expected an array of token ids that is not empty.", param=param)
    tokens = [int(each) if type(each) is float and each.is_integer() else each for each in given]
    for index, token in enumerate(tokens):
        if type(token) is not int:
            raise InvalidRequest(f"{param}[{index}]: expected a token id.", param=f"{param}[{index}]")
    check_tokens(tokens, model.vocab_size, param)
    return tokens


async def encode_texts(
    texts: Sequence[str],
    model: ServedModel,
    truncation: Truncation | None,
    params: Sequence[str],
    *,
    keep: KeepTokens,
    total_param: str,
) -> list[list[int]]:
    """Return what `keep` leaves of the tokens of texts, without special tokens around them. Raises `InvalidRequest`.

    `params` name the texts in errors, and `total_param` all of them. Tokenizing ends with the first text that `keep`
    refuses, or that makes more tokens than a request may have.
    """
    encoder = require_encoder(model)
    tokenizer = encoder.tokenizer
    limit = _LONG_TOKENS * model.max_model_len * tokenizer.longest_token
    if max(map(len, texts), default=0) > limit:
        texts = [_shorten(text, limit, truncation, model, param) for text, param in zip(texts, params, strict=True)]
    if sum(map(len, texts)) <= _INLINE_CHARACTERS:
        return _encode_slices(texts, tokenizer, keep, encoder.max_request_tokens, total_param)
    return await asyncio.to_thread(_encode_slices, texts, tokenizer, keep, encoder.max_request_tokens, total_param)


def _encode_slices(
    texts: Sequence[str], tokenizer: EncoderTokenizer, keep: KeepTokens, max_tokens: int, total_param: str
) -> list[list[int]]:
    found: list[list[int]] = []
    total = 0
    for each in _slices(texts):
        for tokens in tokenizer.encode_texts(each):
            kept = keep(len(found), tokens)
            found.append(kept)
            total += len(kept)
            if total > max_tokens:
                raise _too_many(f"at least {total:,}", max_tokens, total_param)
    return found


def _slices(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    start = size = 0
    for index, text in enumerate(texts):
        if size and size + len(text) > _SLICE_CHARACTERS:
            yield texts[start:index]
            start, size = index, 0
        size += len(text)
    yield texts[start:]


def _shorten(text: str, limit: int, truncation: Truncation | None, model: ServedModel, param: str) -> str:
    if len(text) <= limit:
        return text
    if truncation is None:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {model.max_model_len} tokens; {param} has {len(text)} characters.",
            param=param,
        )
    return text[:limit] if truncation.side == "right" else text[-limit:]


def input_length(model: ServedModel, truncation: Truncation | None) -> int:
    """Return the number of tokens that an input may have."""
    return truncation.tokens if truncation is not None and truncation.tokens else model.max_model_len


def fit(
    tokens: list[int], length: int, model: ServedModel, truncation: Truncation | None, param: str, around: int = 0
) -> list[int]:
    """Return what remains of a text that may have `length` tokens besides the special ones `around` it.

    Raises `ContextLengthExceeded` for one that has more and is not to be cut.
    """
    if len(tokens) <= length:
        return tokens
    if truncation is None:
        raise _too_long(len(tokens) + around, model, param)
    return truncation.cut(tokens, max(0, length))


def _too_long(tokens: int, model: ServedModel, param: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"This model's maximum context length is {model.max_model_len} tokens; {param} has {tokens}.", param=param
    )


def check_total(total: int, model: ServedModel, param: str) -> None:
    """Raise `InvalidRequest` for more tokens than a request may have."""
    limit = require_encoder(model).max_request_tokens
    if total > limit:
        raise _too_many(f"{total:,}", limit, param)


def _too_many(got: str, limit: int, param: str) -> InvalidRequest:
    message = f"{param}: at most {limit:,} tokens in one request, got {got}: send several requests."
    return InvalidRequest(message, param=param)
