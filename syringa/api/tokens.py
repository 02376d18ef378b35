"""`/tokenize` and `/detokenize`, in vLLM's shapes, and the models' own entries."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from msgspec import Meta

from syringa.api.describe import says
from syringa.api.model import Models, ServedModel
from syringa.api.sampling import check_tokens

_MODEL = says("An id from `/v1/models`, an alias, or `default`; absent: the default model.")
TokenId = Annotated[int, Meta(ge=0)]


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /tokenize`."""

    prompt: Annotated[str, says("The text.")]
    model: Annotated[str | None, _MODEL] = None
    add_special_tokens: Annotated[bool | None, says("With what the model puts before every text.", True)] = None
    return_token_strs: Annotated[bool | None, says("Each token's text too.", False)] = None


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: Annotated[int, says("The longest prompt plus answer, in tokens.")]
    tokens: list[int]
    token_strs: Annotated[list[str] | None, says("Null unless `return_token_strs`.")] = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /detokenize`."""

    tokens: Annotated[Annotated[list[TokenId], Meta(max_length=1_000_000)], says("Token ids, each in the vocabulary.")]
    model: Annotated[str | None, _MODEL] = None


class DetokenizeResponse(msgspec.Struct):
    prompt: Annotated[str, says("The text, special tokens spelt out.")]


class ModelEntry(msgspec.Struct):
    """A line of `/v1/models`."""

    id: str
    created: Annotated[int, says("Unix time, in seconds.")]
    object: Annotated[str, says("`model`.", const="model")]
    owned_by: str
    max_model_len: Annotated[int, says("The longest prompt plus answer, in tokens.")]
    context_length: Annotated[int, says("The same, under the name that other clients read.")]
    aliases: list[str]
    capabilities: list[str]


class ModelList(msgspec.Struct):
    object: Annotated[str, says("`list`.", const="list")]
    data: list[ModelEntry]


async def tokenize(body: TokenizeRequest, models: Models) -> TokenizeResponse:
    model = models.find(body.model)
    (tokens,) = await model.encode_all([body.prompt], special=body.add_special_tokens is not False)
    texts = [model.token_text(token) for token in tokens] if body.return_token_strs else None
    return TokenizeResponse(len(tokens), model.max_model_len, tokens, texts)


async def detokenize(body: DetokenizeRequest, models: Models) -> DetokenizeResponse:
    model = models.find(body.model)
    check_tokens(body.tokens, model.vocab_size, "tokens")
    return DetokenizeResponse(await asyncio.to_thread(model.spell, body.tokens))


def entry(model: ServedModel) -> ModelEntry:
    names = [name for name in dict.fromkeys(model.aliases) if name != model.id]
    limit = model.max_model_len
    return ModelEntry(model.id, model.created, "model", "syringa", limit, limit, names, ["completion"])
