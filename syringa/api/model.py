"""A model as the API process knows it: its names, its tokenizer and its limits, but none of its weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from syringa import modelfiles
from syringa.config import Config
from syringa.dialect import Dialect
from syringa.errors import ConfigError, ContextLengthExceeded, ModelError, NotFound
from syringa.prompt.dialect import choose
from syringa.prompt.images import ImagePolicy
from syringa.prompt.template import ChatTemplate
from syringa.prompt.tokenizer import Tokenizer

# Below this many characters tokenizing is cheaper than the hop to a thread.
_INLINE_CHARS = 4096


@dataclass(kw_only=True)
class ServedModel:
    """What endpoints need of a model. `max_model_len` may still shrink when the worker has said what fits."""

    id: str
    tokenizer: Tokenizer
    max_model_len: int
    end_tokens: frozenset[int]
    bos_token: int | None = None
    aliases: tuple[str, ...] = ()
    architecture: str = ""
    template: ChatTemplate | None = None
    dialect: Dialect = field(default_factory=Dialect)
    sees_images: bool = False
    image_policy: ImagePolicy = field(default_factory=ImagePolicy)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._token_texts: dict[int, str] = {}

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def start_token(self) -> int | None:
        """The token that opens a document: where none is declared, the one that ends the document before."""
        if self.bos_token is not None:
            return self.bos_token
        return min(self.end_tokens, default=None)

    async def encode_all(self, texts: list[str], *, special: bool = True, truncate: bool = False) -> list[list[int]]:
        """Raw prompts' token ids; `special`: with what the model puts before every text.

        A text that cannot fit whatever its tokens are is refused, or cut, before time is spent on it.
        """
        most = self.max_model_len * self.tokenizer.longest_token
        if truncate:
            texts = [text[-most:] for text in texts]
        elif any(len(text) > most for text in texts):
            raise ContextLengthExceeded(
                f"The model's context is {self.max_model_len} tokens; "
                f"a prompt of {max(map(len, texts))} characters has more.",
                param="prompt",
            )

        def encode() -> list[list[int]]:
            return [self.tokenizer.encode(text, add_special=special) for text in texts]

        return encode() if sum(map(len, texts)) <= _INLINE_CHARS else await asyncio.to_thread(encode)

    def spell(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, special ones spelt out."""
        return self.tokenizer.decode(tokens, skip_special=False)

    def token_text(self, token: int) -> str:
        """A token as log-probabilities name it. Bytes that are no whole character are spelt out."""
        text = self._token_texts.get(token)
        if text is None:
            raw = self.tokenizer.token_bytes(token)
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            self._token_texts[token] = text
        return text


class Models:
    """The models that this server answers for. The first is the default."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self.all = list(models)
        self._by_name = {name: model for model in reversed(self.all) for name in (model.id, *model.aliases)}
        self._by_name.setdefault("default", self.all[0])

    def find(self, name: str | None) -> ServedModel:
        """The model of that id or alias; None and `default` are the default model."""
        if name is None:
            return self.all[0]
        try:
            return self._by_name[name]
        except KeyError:
            known = ", ".join(model.id for model in self.all)
            raise NotFound(
                f"The model {name!r} does not exist. Available: {known}.", param="model", code="model_not_found"
            ) from None


def load_model(config: Config) -> ServedModel:
    """Reads what the API needs of `config.model`: description, tokenizer and template. Raises `StartupError`."""
    files = modelfiles.locate(config.model)
    description = modelfiles.describe(files)
    names = config.served_model_name or (description.name,)
    limit = description.max_model_len
    tokenizer = Tokenizer.load(files, description)
    sources = _sources(config, description)
    template = _template(config, sources, description.special_tokens)  # first: it says what is wrong with a broken one
    return ServedModel(
        id=names[0],
        aliases=(*names[1:], description.name, config.model),
        tokenizer=tokenizer,
        max_model_len=min(config.max_model_len or limit, limit),
        end_tokens=description.end_tokens,
        bos_token=description.bos_token,
        architecture=description.architecture,
        template=template,
        dialect=choose(*sources, tokenizer.added_tokens, calls=config.tool_format, thought=config.reasoning_format),
        sees_images=bool(description.config.get("vision_config")),
        image_policy=image_policy(config),
    )


def image_policy(config: Config) -> ImagePolicy:
    """What the settings say of images."""
    return ImagePolicy(
        private=config.image_hosts_private,
        max_bytes=config.image_max_bytes,
        timeout=config.image_timeout,
        max_pixels=config.image_max_pixels,
        max_images=config.images_per_request,
    )


def _sources(config: Config, description: modelfiles.ModelDescription) -> tuple[str | None, str | None]:
    """The text of the chat template, and of the one for requests with tools where there is another."""
    if not config.chat_template:
        return description.chat_template, description.tool_template
    try:
        return Path(config.chat_template).read_text(encoding="utf-8"), None
    except FileNotFoundError:
        raise ConfigError(f"chat_template: there is no file {config.chat_template}", param="chat_template") from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"chat_template: {config.chat_template} cannot be read: {error}", param="chat_template"
        ) from None


def _template(
    config: Config, sources: tuple[str | None, str | None], special_tokens: dict[str, Any]
) -> ChatTemplate | None:
    source, tool_source = sources
    if not source:
        return None
    try:
        return ChatTemplate(source, special_tokens, tool_source)
    except ModelError as error:
        if not config.chat_template:
            raise
        raise ConfigError(f"{config.chat_template}: {error.message}", param="chat_template") from None
