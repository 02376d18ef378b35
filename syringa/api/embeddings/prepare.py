"""What the engine embeds for a request: tokens of its inputs, and how vectors are made of the result."""

from __future__ import annotations

from dataclasses import dataclass

from syringa.api.embeddings.inputs import Truncation, check_total, encode_texts, fit, input_length, require_encoder
from syringa.api.embeddings.vectors import Vector, normalize, read_vectors
from syringa.api.models.served_model import ServedModel
from syringa.errors import InvalidRequest
from syringa.ids import random_id
from syringa.modelfiles import EmbeddingSpec
from syringa.types import EmbeddingRequest, EmbeddingResult

# Names of prompts that mean the same, in sentence-transformers, Cohere's API and others.
_SYNONYMS = ({"query", "search_query"}, {"document", "search_document", "passage", "corpus"})


@dataclass(frozen=True, kw_only=True)
class PreparedEmbeddings:
    """A validated request: what to embed, and how many values of each vector are returned."""

    request: EmbeddingRequest
    model: ServedModel
    user: str | None = None
    dimensions: int | None = None  # fewer than the vectors have
    normalized: bool = False  # scale vectors to the length 1

    @property
    def tokens(self) -> int:
        return sum(map(len, self.request.inputs))

    def vectors(self, result: EmbeddingResult) -> list[Vector]:
        """Return the embeddings in the order of the inputs."""
        vectors = read_vectors(result)
        if self.dimensions is not None:
            vectors = [vector[: self.dimensions] for vector in vectors]
        return [normalize(vector) for vector in vectors] if self.normalized else vectors


async def prepare_embeddings(
    inputs: list[str] | list[list[int]],
    model: ServedModel,
    *,
    tenant: str = "",
    prompt: str | None = None,
    truncation: Truncation | None = None,
    dimensions: int | None = None,
    normalized: bool | None = None,
    special: bool = True,
    priority: int = 0,
    user: str | None = None,
    param: str = "input",
) -> PreparedEmbeddings:
    """Tokenize the inputs of a request to an embedding model. Raises `InvalidRequest`.

    Texts come after `prompt`, by default that of the model; inputs that are token ids are used as they are. `special`
    puts special tokens around texts. Inputs that are too long are cut, or refused without a `truncation`. `normalized`:
    whether vectors have the length 1; None: those that are shortened have it, others as the model does. `param` names
    the field of the inputs in errors.
    """
    spec = require_encoder(model).spec
    dimensions = _check_dimensions(spec, dimensions, model)
    if normalized is None:
        normalized = dimensions is not None
    params = [param] if len(inputs) == 1 else [f"{param}[{index}]" for index in range(len(inputs))]
    if isinstance(inputs[0], str):
        tokens = await _encode(inputs, model, prompt, truncation, params, special=special, param=param)
    else:
        length = input_length(model, truncation)
        tokens = [fit(ids, length, model, truncation, where) for ids, where in zip(inputs, params, strict=True)]
    check_total(sum(map(len, tokens)), model, param)
    request = EmbeddingRequest(id=random_id("embd-"), inputs=tokens, tenant=tenant, priority=priority)
    return PreparedEmbeddings(
        request=request,
        model=model,
        user=user,
        dimensions=dimensions,
        normalized=normalized and (dimensions is not None or not spec.normalize),
    )


def find_prompt(spec: EmbeddingSpec, name: str) -> str | None:
    """Return the prompt with a name or one that means the same; None if there is none."""
    names = next((names for names in _SYNONYMS if name in names), {name})
    return next((spec.prompts[each] for each in (name, *sorted(names)) if each in spec.prompts), None)


async def _encode(
    texts: list[str],
    model: ServedModel,
    prompt: str | None,
    truncation: Truncation | None,
    params: list[str],
    *,
    special: bool,
    param: str,
) -> list[list[int]]:
    encoder = require_encoder(model)
    spec, tokenizer = encoder.spec, encoder.tokenizer
    if prompt is None and spec.default_prompt is not None:
        prompt = spec.prompts[spec.default_prompt]
    if prompt:
        texts = [prompt + text for text in texts]
    around = tokenizer.special_tokens_single if special else 0
    length = input_length(model, truncation) - around

    def keep(index: int, tokens: list[int]) -> list[int]:
        return fit(tokens, length, model, truncation, params[index], around)

    fitted = await encode_texts(texts, model, truncation, params, keep=keep, total_param=param)
    if special:
        return [tokenizer.wrap(tokens) for tokens in fitted]
    for tokens, where in zip(fitted, params, strict=True):
        if not tokens:
            raise InvalidRequest(f"{where}: the text has no tokens without special tokens.", param=where)
    return fitted


def _check_dimensions(spec: EmbeddingSpec, dimensions: int | None, model: ServedModel) -> int | None:
    """Return how many values of a vector are kept, None for all. Raises `InvalidRequest`."""
    if dimensions is None or dimensions == spec.dimensions:
        return None
    if not spec.matryoshka:
        expected = f"{spec.dimensions}: the vectors of the model {model.id!r} cannot be shortened"
    elif spec.matryoshka_dimensions and dimensions not in spec.matryoshka_dimensions:
        expected = f"one of {', '.join(map(str, spec.matryoshka_dimensions))}"
    elif not spec.matryoshka_dimensions and not spec.min_dimensions <= dimensions <= spec.dimensions:
        expected = f"{spec.min_dimensions} to {spec.dimensions}"
    else:
        return dimensions
    raise InvalidRequest(f"dimensions: expected {expected}.", param="dimensions")
