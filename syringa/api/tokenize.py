"""`/tokenize` and `/detokenize`, in vLLM's shapes, and the models' own entries."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from syringa.api.chat.messages import MessagesField, read_messages
from syringa.api.chat.prompt import Rendering, template_of
from syringa.api.fields.annotations import says
from syringa.api.fields.reasoning import read_thinking
from syringa.api.fields.sampling import check_tokens
from syringa.api.fields.tools import ToolsField, read_tools
from syringa.api.models.served_model import ModelCard, Models, ServedModel, Status
from syringa.errors import InvalidRequest

_MODEL = says("An id from `/v1/models`, an alias, or `default`; absent: the default model.")
TokenId = Annotated[int, Meta(ge=0)]


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /tokenize`."""

    prompt: Annotated[str | None, says("The text; or `messages` in its place.")] = None
    messages: Annotated[MessagesField | None, says("A conversation, as in chat; the images in it are not counted.")] = (
        None
    )
    model: Annotated[str | None, _MODEL] = None
    tools: Annotated[ToolsField, says("With `messages`: functions that the model may call.")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, says("With `messages`: more for the model's chat template.")
    ] = None
    add_generation_prompt: Annotated[
        bool | None, says("With `messages`: begin the assistant's turn; absent: true, unless the last is continued.")
    ] = None
    continue_final_message: Annotated[bool | None, says("With `messages`: leave the last one open.", False)] = None
    add_special_tokens: Annotated[
        bool | None, says("With what the model puts before every text; absent: for a `prompt`.")
    ] = None
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


class PriceEntry(msgspec.Struct):
    """Of a million tokens."""

    input: float
    cached_input: Annotated[float, says("Of input that was found in the cache.")]
    output: float


class ModelEntry(msgspec.Struct):
    """A line of `/v1/models`."""

    id: str
    created: Annotated[int, says("Unix time, in seconds.")]
    object: Annotated[str, says("`model`.", const="model")]
    owned_by: str
    max_model_len: Annotated[int | None, says("The longest prompt plus answer, in tokens; null: its files are broken.")]
    context_length: Annotated[int | None, says("The same, under the name that other clients read.")]
    aliases: list[str]
    capabilities: Annotated[list[str], says("`completion`, `chat`, `vision`, `reasoning`.")]
    prices: Annotated[PriceEntry | None, says("Null where none are set.")]
    status: Annotated[
        Status, says("`cold`: the first request for it loads it, and waits; `failed`: it could not be loaded.")
    ]


class ModelList(msgspec.Struct):
    object: Annotated[str, says("`list`.", const="list")]
    data: list[ModelEntry]


async def tokenize(body: TokenizeRequest, models: Models, ignored: list[str]) -> TokenizeResponse:
    model = await models.find(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give a prompt or messages, one of the two.", param="prompt")
    if body.prompt is None:
        tokens = await _tokenize_messages(body, model, ignored)
    else:
        given = {"tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"}
        await read_tools(body.tools, None, ignored=[])  # ignored, and checked all the same
        ignored += sorted(name for name in given if getattr(body, name) is not None)
        (tokens,) = await model.encode_all([body.prompt], special=body.add_special_tokens is not False)
    texts = [model.token_text(token) for token in tokens] if body.return_token_strs else None
    return TokenizeResponse(len(tokens), model.max_model_len, tokens, texts)


async def _tokenize_messages(body: TokenizeRequest, model: ServedModel, ignored: list[str]) -> list[int]:
    tools = await read_tools(body.tools, None, ignored)
    begins = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    rendering = Rendering(
        model=model,
        template=template_of(model),
        tools=tools.use if tools is not None else None,
        kwargs=read_thinking(body.chat_template_kwargs, None, None, model, ignored).kwargs,
        add_generation_prompt=begins,
        continue_final_message=bool(body.continue_final_message),
    )
    said = await read_messages(body.messages, sees_images=model.sees_images, ignored=ignored)
    prompt = await rendering.prompt(said)
    if not body.add_special_tokens:
        return prompt.tokens
    (tokens,) = await model.encode_all([prompt.text])
    return tokens


async def detokenize(body: DetokenizeRequest, models: Models, ignored: list[str]) -> DetokenizeResponse:
    model = await models.find(body.model)
    check_tokens(body.tokens, model.vocab_size, "tokens")
    return DetokenizeResponse(await asyncio.to_thread(model.spell, body.tokens))


def entry(card: ModelCard) -> ModelEntry:
    prices = card.prices
    shown = None
    if prices is not None:
        cached = prices.input if prices.cached_input is None else prices.cached_input
        shown = PriceEntry(prices.input, cached, prices.output)
    return ModelEntry(
        id=card.id,
        created=card.created,
        object="model",
        owned_by="syringa",
        max_model_len=card.max_model_len,
        context_length=card.max_model_len,
        aliases=[name for name in dict.fromkeys(card.aliases) if name != card.id],
        capabilities=list(card.capabilities or ()),
        prices=shown,
        status=card.status,
    )
