"""The response of `/v1/embeddings`."""

from __future__ import annotations

import base64
import time
from array import array
from typing import Annotated, Any, Literal

import msgspec

from syringa.api.embeddings.prepare import PreparedEmbeddings
from syringa.api.embeddings.vectors import Vector
from syringa.api.fields.schema import doc
from syringa.types import EmbeddingResult

EncodingFormat = Literal["float", "base64"]

encode = msgspec.json.Encoder().encode


class InputUsage(msgspec.Struct):
    """Token counts of a request whose result is not text."""

    prompt_tokens: Annotated[int, doc("Tokens of all inputs, with special tokens.")]
    total_tokens: int


class EmbeddingObject(msgspec.Struct):
    object: Annotated[str, doc("`embedding`.", const="embedding")]
    index: Annotated[int, doc("Of the input.")]
    embedding: Annotated[list[float] | str, doc("Numbers, or with `base64` the bytes of 32-bit floats.")]


class CreateEmbeddingResponse(msgspec.Struct):
    """The embeddings of all inputs, in their order."""

    id: str
    object: Annotated[str, doc("`list`.", const="list")]
    created: Annotated[int, doc("Unix time in seconds.")]
    model: str
    data: list[EmbeddingObject]
    usage: InputUsage


class EmbeddingsWriter:
    """Writes the embeddings of a request."""

    def __init__(self, prepared: PreparedEmbeddings, format: EncodingFormat, request_id: str | None = None) -> None:
        self._prepared, self._format = prepared, format
        self._id = prepared.request.id if request_id is None else f"embd-{request_id}"
        self._created = int(time.time())

    def render(self, result: EmbeddingResult) -> bytes:
        """Return the JSON body."""
        prepared, tokens = self._prepared, self._prepared.tokens
        write = _write_floats if self._format == "float" else _write_base64
        data = [
            EmbeddingObject("embedding", index, write(vector)) for index, vector in enumerate(prepared.vectors(result))
        ]
        usage = InputUsage(tokens, tokens)
        return encode(CreateEmbeddingResponse(self._id, "list", self._created, prepared.model.id, data, usage))


def _write_floats(vector: Vector) -> Any:
    """Return a vector as JSON. Vectors are encoded one by one, so that other threads run in between."""
    return msgspec.Raw(encode(list(vector)))


def _write_base64(vector: Vector) -> str:
    data = vector if isinstance(vector, memoryview) else array("f", vector)
    return base64.b64encode(data).decode()
