"""`/api/embed` and its older form `/api/embeddings`: wire types, and their conversion to requests of the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from syringa.api.embeddings.inputs import MAX_INPUTS, Truncation, read_texts
from syringa.api.embeddings.prepare import PreparedEmbeddings, prepare_embeddings
from syringa.api.fields.sampling import MAX_COUNT
from syringa.api.fields.schema import doc, nullable
from syringa.api.models.served_model import EMBEDDING, Models, ServedModel
from syringa.api.ollama.common import KeepAliveField, ModelField, find_model
from syringa.api.ollama.options import OptionsField, read_options, with_context
from syringa.api.ollama.writer import Durations
from syringa.types import EmbeddingResult

_TEXT = {"type": "string"}
_OPTIONS = "`num_ctx` is the maximum length of an input. The others are for generation, and reported as ignored."


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /api/embed`."""

    model: ModelField
    input: Annotated[
        Any,
        doc(
            f"A text, or at most {MAX_INPUTS}. Empty: the model is loaded, or unloaded with `keep_alive: 0`.",
            **nullable(_TEXT, {"type": "array", "items": _TEXT, "maxItems": MAX_INPUTS}),
        ),
    ] = None
    truncate: Annotated[bool | None, doc("Cut the end of inputs that are too long; false: refuse them.", True)] = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None,
        doc("Number of values to keep of each vector, as for `/v1/embeddings`. Default, and 0: all."),
    ] = None
    options: Annotated[OptionsField, doc(_OPTIONS)] = None
    keep_alive: KeepAliveField = None

    @property
    def is_empty(self) -> bool:
        return self.input in (None, "", [])


class OllamaEmbeddingsRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /api/embeddings`."""

    model: ModelField
    prompt: Annotated[str | None, doc("A text. Empty: the model is loaded, or unloaded with `keep_alive: 0`.")] = None
    options: Annotated[OptionsField, doc(_OPTIONS)] = None
    keep_alive: KeepAliveField = None

    @property
    def is_empty(self) -> bool:
        return not self.prompt


class OllamaEmbedResponse(msgspec.Struct, kw_only=True):
    model: Annotated[str, doc("The name in the request.")]
    embeddings: Annotated[list[list[float]], doc("A vector of length 1 for each input.")]
    total_duration: Annotated[int, doc("In nanoseconds.")]
    load_duration: Annotated[int, doc("In nanoseconds.")]
    prompt_eval_count: Annotated[int, doc("Tokens of all inputs.")]


class OllamaEmbeddingsResponse(msgspec.Struct):
    embedding: list[float]


class PreparedEmbed:
    """A validated request of either endpoint. `prepared` is None if there is nothing to embed."""

    def __init__(self, name: str, model: ServedModel, prepared: PreparedEmbeddings | None, *, single: bool) -> None:
        self.model, self.prepared = model, prepared
        self._name, self._single = name, single

    def render(self, result: EmbeddingResult | None, durations: Callable[[], Durations]) -> bytes:
        """Return the JSON body. `result`: None if there was nothing to embed."""
        vectors: list[list[float]] = []
        if result is not None and self.prepared is not None:
            vectors = [list(each) for each in self.prepared.vectors(result)]
        if self._single:
            return msgspec.json.encode(OllamaEmbeddingsResponse(vectors[0] if vectors else []))
        took = durations()
        return msgspec.json.encode(
            OllamaEmbedResponse(
                model=self._name,
                embeddings=vectors,
                total_duration=took.total,
                load_duration=took.load,
                prompt_eval_count=self.prepared.tokens if self.prepared is not None else 0,
            )
        )


async def prepare_embed(
    body: OllamaEmbedRequest | OllamaEmbeddingsRequest, models: Models, ignored: list[str], tenant: str = ""
) -> PreparedEmbed:
    """Validate the request and tokenize its inputs. The paths of ignored fields are appended to `ignored`."""
    model = await find_model(lambda name: models.find(name, EMBEDDING), body.model)
    if isinstance(body, OllamaEmbeddingsRequest):
        given, param, truncate, dimensions = body.prompt, "prompt", True, None
    else:
        given, param, truncate, dimensions = body.input, "input", body.truncate is not False, body.dimensions or None
    single = param == "prompt"
    options = body.options or {}
    ignored += [f"options.{name}" for name, value in options.items() if value is not None and name != "num_ctx"]
    model = with_context(model, read_options(options, []), ignored)
    if body.is_empty:
        return PreparedEmbed(body.model, model, None, single=single)
    prepared = await prepare_embeddings(
        read_texts(given, param, allow_empty=True),
        model,
        tenant=tenant,
        truncation=Truncation() if truncate else None,
        dimensions=dimensions,
        normalized=not single,
        param=param,
    )
    return PreparedEmbed(body.model, model, prepared, single=single)
