"""`/tokenize` and `/detokenize`, in vLLM's shapes, and the models' own entries."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from syringa.api.model import Models, ServedModel
from syringa.api.sampling import check_tokens


class TokenizeRequest(msgspec.Struct, kw_only=True):
    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: Annotated[list[int], Meta(max_length=10_000_000)]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct):
    prompt: str


class ModelEntry(msgspec.Struct):
    """A line of `/v1/models`."""

    id: str
    created: int
    object: str
    owned_by: str
    max_model_len: int
    context_length: int
    aliases: list[str]
    capabilities: list[str]


class ModelList(msgspec.Struct):
    object: str
    data: list[ModelEntry]


async def tokenize(body: TokenizeRequest, models: Models) -> TokenizeResponse:
    model = models.find(body.model)
    (tokens,) = await model.encode_all([body.prompt], special=body.add_special_tokens is not False)
    texts = [model.token_text(token) for token in tokens] if body.return_token_strs else None
    return TokenizeResponse(len(tokens), model.max_model_len, tokens, texts)


async def detokenize(body: DetokenizeRequest, models: Models) -> DetokenizeResponse:
    model = models.find(body.model)
    check_tokens(body.tokens, model.vocab_size, "tokens")
    return DetokenizeResponse(model.spell(body.tokens))


def entry(model: ServedModel) -> ModelEntry:
    names = [name for name in dict.fromkeys(model.aliases) if name != model.id]
    limit = model.max_model_len
    return ModelEntry(model.id, model.created, "model", "syringa", limit, limit, names, ["completion"])
