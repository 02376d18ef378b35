"""`/tokenize` and `/detokenize`, in vLLM's wire format."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from syringa.api.chat.messages import MessagesField, read_messages
from syringa.api.chat.prompt import PromptRenderer, adds_generation_prompt, check_message_count, require_template
from syringa.api.chat.request_template import ChatTemplateField, with_request_template
from syringa.api.fields.reasoning import read_reasoning_request
from syringa.api.fields.sampling import check_tokens
from syringa.api.fields.schema import doc, ignored_field
from syringa.api.fields.tools import ToolsField, read_tools
from syringa.api.models.served_model import ALL_KINDS, Models, ServedModel
from syringa.errors import InvalidRequest

_MODEL = doc("Model id from `/v1/models`, an alias, or `default`. Default: the default model.")
_IMAGE_FIELDS = ("mm_processor_kwargs", "media_io_kwargs")
TokenId = Annotated[int, Meta(ge=0)]
_MESSAGE_FIELDS = ("add_generation_prompt", "chat_template", "chat_template_kwargs", "continue_final_message", "tools")


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /tokenize`."""

    prompt: Annotated[str | None, doc("Text to tokenize. Give either `prompt` or `messages`.")] = None
    messages: Annotated[
        MessagesField | None, doc("Conversation to render and tokenize, as in chat. Images are not counted.")
    ] = None
    model: Annotated[str | None, _MODEL] = None
    tools: Annotated[ToolsField, doc("With `messages`: functions that the model may call.")] = None
    chat_template: ChatTemplateField = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, doc("With `messages`: extra variables for the chat template.")
    ] = None
    add_generation_prompt: Annotated[
        bool | None,
        doc(
            "With `messages`: append the start of an assistant message. Default: true, unless `continue_final_message`."
        ),
    ] = None
    continue_final_message: Annotated[bool | None, doc("With `messages`: leave the last message open.", False)] = None
    add_special_tokens: Annotated[
        bool | None,
        doc("Add the tokenizer's special tokens, such as BOS. Default: true for `prompt`, false for `messages`."),
    ] = None
    return_token_strs: Annotated[bool | None, doc("Also return the text of each token.", False)] = None
    mm_processor_kwargs: Annotated[
        dict[str, Any] | None, ignored_field("Images are not counted; reported as ignored.", default={})
    ] = None
    media_io_kwargs: Annotated[
        dict[str, Any] | None, ignored_field("Images are not read; reported as ignored.", default={})
    ] = None


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: Annotated[int, doc("Maximum prompt plus output length, in tokens.")]
    tokens: list[int]
    token_strs: Annotated[list[str] | None, doc("Text of each token; null unless `return_token_strs`.")] = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /detokenize`."""

    tokens: Annotated[
        Annotated[list[TokenId], Meta(max_length=1_000_000)],
        doc("Token ids to decode, at most 1,000,000, each within the vocabulary."),
    ]
    model: Annotated[str | None, _MODEL] = None


class DetokenizeResponse(msgspec.Struct):
    prompt: Annotated[str, doc("Decoded text, including special tokens.")]


async def tokenize(body: TokenizeRequest, models: Models, ignored: list[str], tenant: str = "") -> TokenizeResponse:
    """Handle `POST /tokenize`."""
    model = await models.find(body.model, ALL_KINDS)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either prompt or messages.", param="prompt")
    ignored += [name for name in _IMAGE_FIELDS if getattr(body, name)]
    if body.prompt is None:
        model = await with_request_template(model, body.chat_template, tenant)
        tokens = await _tokenize_messages(body, model, ignored)
    else:
        # Validated although it is ignored.
        await read_tools(body.tools, None, ignored=[], unsupported=model.unsupported_tools)
        ignored += [name for name in _MESSAGE_FIELDS if getattr(body, name) is not None]
        (tokens,) = await model.encode_all([body.prompt], special=body.add_special_tokens is not False)
    texts = [model.token_text(token) for token in tokens] if body.return_token_strs else None
    return TokenizeResponse(len(tokens), model.max_model_len, tokens, texts)


async def _tokenize_messages(body: TokenizeRequest, model: ServedModel, ignored: list[str]) -> list[int]:
    check_message_count(len(body.messages or ()), model, "messages")
    tools = await read_tools(body.tools, None, ignored, unsupported=model.unsupported_tools)
    renderer = PromptRenderer(
        model=model,
        template=require_template(model),
        tools=tools.use if tools is not None else None,
        kwargs=read_reasoning_request(body.chat_template_kwargs, None, None, model, ignored).kwargs,
        add_generation_prompt=adds_generation_prompt(body.add_generation_prompt, body.continue_final_message),
        continue_final_message=bool(body.continue_final_message),
    )
    messages = await read_messages(
        body.messages, supports_images=model.supports_images, ignored=ignored, template=renderer.template
    )
    prompt = await renderer.build(messages)
    return [*model.tokenizer.encode(""), *prompt.tokens] if body.add_special_tokens else prompt.tokens


async def detokenize(
    body: DetokenizeRequest, models: Models, ignored: list[str], tenant: str = ""
) -> DetokenizeResponse:
    """Handle `POST /detokenize`."""
    model = await models.find(body.model, ALL_KINDS)
    check_tokens(body.tokens, model.vocab_size, "tokens")
    return DetokenizeResponse(await asyncio.to_thread(model.decode_tokens, body.tokens))
