"""Loading of served models: description, tokenizer and chat template, without weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from syringa import modelfiles
from syringa.api.models.served_model import (
    Encoder,
    ModelCard,
    ServedModel,
    capabilities,
    encoder_capabilities,
    vector_dimensions,
)
from syringa.api.models.specs import named
from syringa.config import Config, ModelSpec, single_model_spec
from syringa.errors import ConfigError, ModelError
from syringa.heap import trim_heap
from syringa.prompt.chat.format_detection import resolve_formats
from syringa.prompt.chat.template import ChatTemplate
from syringa.prompt.images.loader import ImagePolicy
from syringa.prompt.tokens.encoder_tokenizer import EncoderTokenizer
from syringa.prompt.tokens.tokenizer import Tokenizer
from syringa.version import installed_version


def load_model(config: Config, spec: ModelSpec | None = None) -> ServedModel:
    """Load a model for the API server. Raises `StartupError`.

    Without a `spec`, load the single model that `config.model` names.
    """
    given = single_model_spec(config) if spec is None else spec
    files = modelfiles.locate(given.path)
    description = modelfiles.describe(files)
    spec = named(given, description) if spec is None and given not in config.models else given
    if (embedding := modelfiles.read_embedding_spec(files)) is not None:
        return _load_encoder(config, spec, files, description, embedding)
    tokenizer = Tokenizer.load(files, description)
    modelfiles.forget_gguf()
    trim_heap()  # building a tokenizer takes twice the memory of a tokenizer
    sources = _sources(spec, description)
    template = _template(
        spec, sources, description.special_tokens
    )  # before format detection, since it reports template errors
    return ServedModel(
        id=spec.id,
        aliases=spec.aliases,
        tokenizer=tokenizer,
        max_model_len=_context_length(spec, description),
        end_tokens=description.end_tokens,
        bos_token=description.bos_token,
        architecture=description.architecture,
        template=template,
        special_tokens=description.special_tokens,
        formats=resolve_formats(
            *sources, tokenizer.added_tokens, tool_calls=spec.tool_format, reasoning=spec.reasoning_format
        ),
        supports_images=description.supports_images,
        image_policy=image_policy(config),
        max_choices=config.max_choices,
        unsupported_tools=config.unsupported_tools,
        request_chat_templates=config.request_chat_templates,
        reasoning_fields=config.reasoning_fields,
        system_fingerprint=_fingerprint(spec, files),
        prices=spec.prices,
        defaults=spec.defaults,
        system=spec.system,
        preset_messages=tuple({"role": each.role, "content": each.content} for each in spec.messages),
    )


def _load_encoder(
    config: Config,
    spec: ModelSpec,
    files: modelfiles.ModelFiles,
    description: modelfiles.ModelDescription,
    embedding: modelfiles.EmbeddingSpec,
) -> ServedModel:
    """Load an embedding model or a cross-encoder, which has neither a chat template nor anything that depends on it."""
    tokenizer = EncoderTokenizer.load_encoder(files, description, lower_case=embedding.lower_case)
    trim_heap()
    return ServedModel(
        id=spec.id,
        aliases=spec.aliases,
        tokenizer=tokenizer,
        max_model_len=_input_length(spec, embedding),
        end_tokens=frozenset(),
        architecture=embedding.architecture,
        special_tokens=description.special_tokens,
        system_fingerprint=_fingerprint(spec, files),
        prices=spec.prices,
        encoder=Encoder(spec=embedding, tokenizer=tokenizer, max_request_tokens=config.embedding_max_tokens),
    )


def _input_length(spec: ModelSpec, embedding: modelfiles.EmbeddingSpec) -> int:
    return min(spec.max_model_len or embedding.max_length, embedding.max_length)


def _fingerprint(spec: ModelSpec, files: modelfiles.ModelFiles) -> str:
    """Return the fingerprint of a model: a hash of the server's version, its settings, and its files by size."""
    path = Path(files.path)
    found = [path] if files.kind == "gguf" else sorted(each for each in path.iterdir() if each.is_file())
    sizes = [(each.name, each.stat().st_size) for each in found]
    identity = (installed_version(), files.name, spec.dtype, spec.deterministic, sizes)
    return "fp_" + hashlib.blake2b(msgspec.json.encode(identity), digest_size=6).hexdigest()


def describe_model(spec: ModelSpec, created: int) -> ModelCard:
    """Return the card of a model without loading its tokenizer. Raises `StartupError`."""
    files = modelfiles.locate(spec.path)
    if (embedding := modelfiles.read_embedding_spec(files)) is not None:
        return ModelCard(
            id=spec.id,
            aliases=spec.aliases,
            created=created,
            max_model_len=_input_length(spec, embedding),
            kind=embedding.kind,
            dimensions=vector_dimensions(embedding),
            capabilities=encoder_capabilities(embedding),
            prices=spec.prices,
            status="cold",
        )
    description = modelfiles.describe(files)
    sources = _sources(spec, description)
    formats = resolve_formats(*sources, (), tool_calls=spec.tool_format, reasoning=spec.reasoning_format)
    return ModelCard(
        id=spec.id,
        aliases=spec.aliases,
        created=created,
        max_model_len=_context_length(spec, description),
        kind="generate",
        capabilities=capabilities(
            chat=bool(sources[0]), vision=description.supports_images, reasoning=formats.reasoning is not None
        ),
        prices=spec.prices,
        status="cold",
    )


def _context_length(spec: ModelSpec, description: modelfiles.ModelDescription) -> int:
    limits = (spec.max_model_len, spec.context_limit, description.max_model_len)
    return min(limit for limit in limits if limit)


def image_policy(config: Config) -> ImagePolicy:
    """Return the image limits of the settings."""
    return ImagePolicy(
        allow_private=config.image_hosts_private,
        max_bytes=config.image_max_bytes,
        timeout=config.image_timeout,
        max_pixels=config.image_max_pixels,
        max_side=config.image_max_side,
        max_memory=config.image_memory,
        max_images=config.images_per_request,
    )


def _sources(spec: ModelSpec, description: modelfiles.ModelDescription) -> tuple[str | None, str | None]:
    """Return the sources of the chat template, and of a separate one for requests with tools if there is one."""
    if spec.template:
        return spec.template, None
    if not spec.chat_template:
        return description.chat_template, description.tool_template
    try:
        return Path(spec.chat_template).read_text(encoding="utf-8"), None
    except FileNotFoundError:
        raise ConfigError(f"chat_template: file not found: {spec.chat_template}", param="chat_template") from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"chat_template: {spec.chat_template} cannot be read: {error}", param="chat_template"
        ) from None


def _template(
    spec: ModelSpec, sources: tuple[str | None, str | None], special_tokens: dict[str, Any]
) -> ChatTemplate | None:
    source, tool_source = sources
    if not source:
        return None
    try:
        return ChatTemplate(source, special_tokens, tool_source)
    except ModelError as error:
        if spec.template:
            raise ConfigError(f"template: {error.message}", param="template") from None
        if not spec.chat_template:
            raise
        raise ConfigError(f"{spec.chat_template}: {error.message}", param="chat_template") from None
