"""The `chat_template` field: a chat template of the request in place of the model's own."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import msgspec
from msgspec import Meta

from syringa.api.fields.schema import doc
from syringa.api.models.served_model import ServedModel
from syringa.errors import Forbidden, InvalidRequest
from syringa.prompt.chat.isolated_template import IsolatedTemplate

MAX_CHARACTERS = 65_536

ChatTemplateField = Annotated[
    Annotated[str, Meta(min_length=1, max_length=MAX_CHARACTERS)] | None,
    doc(
        f"Chat template to use instead of the model's own, in Jinja, at most {MAX_CHARACTERS:,} characters. It runs "
        "with limits on time and memory. Refused with 403 unless the setting `request_chat_templates` allows it; by "
        "default it does while no API keys are required."
    ),
]


async def with_request_template(model: ServedModel, source: str | None, tenant: str) -> ServedModel:
    """Return the model with the chat template of a request, if there is one.

    Raises `Forbidden` where that is not allowed, and `InvalidRequest` if the template is invalid. A tenant is empty
    where no keys are required.
    """
    if source is None:
        return model
    allowed = not tenant if model.request_chat_templates == "auto" else model.request_chat_templates == "allow"
    if not allowed:
        raise Forbidden(
            "chat_template: this server does not allow chat templates in requests (request_chat_templates).",
            param="chat_template",
            code="chat_template_not_allowed",
        )
    if not source.strip():
        raise InvalidRequest("chat_template: expected a template.", param="chat_template")
    template = await IsolatedTemplate.open(source, model.special_tokens, tenant)
    formats = model.formats
    if formats.supports_tools and "tools" not in template.variables:
        formats = msgspec.structs.replace(formats, tool_calls="plain", supports_tools=False)
    return dataclasses.replace(model, template=template, formats=formats)
