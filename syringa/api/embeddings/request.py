"""`/v1/embeddings`: the request body, and its conversion to a request of the engine."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from syringa.api.embeddings.inputs import (
    MAX_INPUTS,
    EncoderFields,
    Truncation,
    read_inputs,
    read_truncation,
    require_encoder,
)
from syringa.api.embeddings.prepare import PreparedEmbeddings, find_prompt, prepare_embeddings
from syringa.api.embeddings.writer import EmbeddingsWriter
from syringa.api.fields.sampling import MAX_COUNT
from syringa.api.fields.schema import doc, ignored_field, refused_field
from syringa.api.models.served_model import EMBEDDING, Models, ServedModel
from syringa.errors import InvalidRequest

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
_INPUT_SCHEMA = {
    "anyOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_INPUTS},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_INPUTS},
    ]
}


class CreateEmbeddingRequest(EncoderFields, kw_only=True):
    """The body of `POST /v1/embeddings` and `POST /api/v2/embeddings`."""

    input: Annotated[
        Any,
        doc(
            "A string, an array of strings, an array of token ids, or an array of such arrays; at most 2048 inputs, "
            "none empty. Token ids are those of the model's own tokenizer, special tokens included.",
            **_INPUT_SCHEMA,
        ),
    ]
    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        doc("`float`: arrays of numbers; `base64`: the bytes of 32-bit floats, little-endian.", "float"),
    ] = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_COUNT)] | None,
        doc(
            "Number of values to keep of each vector, scaled to the length 1 again unless `normalize` is false. Only "
            "for models that were trained for it (Matryoshka); others refuse any but their own."
        ),
    ] = None
    prompt_name: Annotated[
        str | None,
        doc("Name of a prompt of the model, which is put before each text. Default: the model's default prompt."),
    ] = None
    input_type: Annotated[
        str | None,
        doc(
            "What the texts are, such as `query` or `document`: the model's prompt for it is put before each text. "
            "Reported as ignored if the model has none."
        ),
    ] = None
    truncate: Annotated[
        bool | Literal["NONE", "START", "END"] | None,
        doc(
            "Cut inputs that are longer than the model takes; `START` cuts their beginning, true and `END` their end. "
            "Otherwise they get 400.",
            False,
        ),
    ] = None
    add_special_tokens: Annotated[
        bool | None, doc("Put the tokenizer's special tokens around inputs that are text.", True)
    ] = None
    normalize: Annotated[
        bool | None,
        doc(
            "Scale vectors to the length 1; false is refused if the model does so itself. Default: as the model's "
            "files say."
        ),
    ] = None
    embed_dtype: Annotated[Literal["float32"] | None, doc("Data type of the vectors.", "float32")] = None
    endianness: Annotated[
        Literal["native", "little"] | None, doc("Byte order of `base64`, which is little-endian.", "native")
    ] = None
    messages: Annotated[
        Any, refused_field("Conversations are not embedded; send their text as `input`.", type="null")
    ] = None
    mm_processor_kwargs: Annotated[
        dict[str, Any] | None, ignored_field("There are no images; reported as ignored.", default={})
    ] = None


async def prepare_embedding_request(
    body: CreateEmbeddingRequest, models: Models, ignored: list[str], tenant: str = ""
) -> tuple[PreparedEmbeddings, EmbeddingsWriter]:
    """Validate the request and tokenize its inputs. The names of ignored fields are appended to `ignored`."""
    model = await models.find(body.model, EMBEDDING)
    spec = require_encoder(model).spec
    if body.messages is not None:
        raise InvalidRequest("messages: conversations are not embedded; send their text as input.", param="messages")
    if body.normalize is False and spec.normalize:
        raise InvalidRequest(
            f"normalize: the vectors of the model {model.id!r} always have the length 1.", param="normalize"
        )
    if body.mm_processor_kwargs:
        ignored.append("mm_processor_kwargs")
    inputs = await read_inputs(body.input, model, "input")
    prepared = await prepare_embeddings(
        inputs,
        model,
        tenant=tenant,
        prompt=_read_prompt(body, model, ignored, texts=isinstance(inputs[0], str)),
        truncation=_read_truncation(body, model),
        dimensions=body.dimensions,
        normalized=body.normalize,
        special=body.add_special_tokens is not False,
        priority=body.priority or 0,
        user=body.user,
    )
    return prepared, EmbeddingsWriter(prepared, body.encoding_format or "float", body.request_id)


def _read_truncation(body: CreateEmbeddingRequest, model: ServedModel) -> Truncation | None:
    if body.truncate == "START" and body.truncation_side is None:
        body.truncation_side = "left"
    return read_truncation(body, model, default=body.truncate not in (None, False, "NONE"))


def _read_prompt(body: CreateEmbeddingRequest, model: ServedModel, ignored: list[str], *, texts: bool) -> str | None:
    spec = require_encoder(model).spec
    name, param = (body.input_type, "input_type") if body.prompt_name is None else (body.prompt_name, "prompt_name")
    if name is None:
        return None
    if not texts:
        raise InvalidRequest(f"{param}: a prompt is put before texts; input has token ids.", param=param)
    if body.prompt_name is not None and body.input_type is not None:
        ignored.append("input_type")
    if name in spec.prompts:
        return spec.prompts[name]
    if param == "prompt_name":
        known = ", ".join(map(repr, spec.prompts)) or "none"
        raise InvalidRequest(
            f"prompt_name: the model {model.id!r} has no prompt {name!r}; it has {known}.", param=param
        )
    prompt = find_prompt(spec, name)
    if prompt is None:
        ignored.append("input_type")
    return prompt
