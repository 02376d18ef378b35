"""A model as the API process knows it: its names, its tokenizer and its limits, but none of its weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from syringa.config import Prices
from syringa.errors import ContextLengthExceeded, Forbidden, NotFound
from syringa.output_formats import Dialect
from syringa.prompt.chat.template import ChatTemplate
from syringa.prompt.chat.tools import BEGIN, ToolUse
from syringa.prompt.images.images import ImagePolicy
from syringa.prompt.tokens.tokenizer import Tokenizer

Status = Literal["loaded", "loading", "cold", "failed"]
"""Whether a model is in memory. A cold one is loaded by the first request for it."""

# Below this many characters tokenizing is cheaper than the hop to a thread.
_INLINE_CHARS = 4096
_LONGEST_SHOWN = 200  # characters of a name that nobody has


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
    prices: Prices | None = None
    defaults: dict[str, Any] = field(default_factory=dict)  # of requests' fields, see `defaults.py`
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._token_texts: dict[int, str] = {}
        self._opening: tuple[int, ...] | None = None

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

    def opening(self, tools: ToolUse | None) -> tuple[int, ...]:
        """The tokens that begin a call where the model may call or answer, and was never taught to choose.

        It decides by what it holds most likely, and not by a draw: a small model that thinks a call likelier than any
        other beginning would, drawn from, answer every second time with whatever the rest of the distribution holds.
        """
        if tools is None or tools.mode != "auto" or self.dialect.calls != "plain":
            return ()
        if self._opening is None:
            self._opening = tuple(self.tokenizer.encode(BEGIN, add_special=False))
        return self._opening

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

    def card(self, status: Status = "loaded") -> ModelCard:
        return ModelCard(
            id=self.id,
            aliases=self.aliases,
            created=self.created,
            max_model_len=self.max_model_len,
            capabilities=capabilities(
                chat=self.template is not None, vision=self.sees_images, reasoning=self.dialect.thought is not None
            ),
            prices=self.prices,
            status=status,
        )


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What the world is told of a model, whether or not it is loaded. None is what only its files could tell, where
    they cannot be read."""

    id: str
    created: int
    aliases: tuple[str, ...] = ()
    max_model_len: int | None = None
    capabilities: tuple[str, ...] | None = None
    prices: Prices | None = None
    status: Status = "loaded"


def capabilities(*, chat: bool, vision: bool, reasoning: bool) -> tuple[str, ...]:
    able = {"completion": True, "chat": chat, "vision": vision, "reasoning": reasoning}
    return tuple(name for name, can in able.items() if can)


class Models(Protocol):
    """The models that a server answers for, as one key sees them."""

    @property
    def default(self) -> str:
        """The id of the default model."""
        ...

    @property
    def ids(self) -> Sequence[str]:
        """Of all models, the default one first."""
        ...

    async def find(self, name: str | None) -> ServedModel:
        """The model of that id or alias; None and `default` are the default model. It is read first if it has to be.
        Raises `NotFound`, or `Forbidden` where the key may not use it."""
        ...

    async def all(self) -> list[ModelCard]:
        """What there is, at little cost: nothing is loaded for it."""
        ...

    async def show(self, name: str) -> ModelCard:
        """The same of one. Raises as `find` does."""
        ...

    def for_key(self, allowed: frozenset[str] | None) -> Models:
        """The same, for a key that may use these alone; None: all."""
        ...


class FixedModels:
    """Models that were read when the server began. The first is the default."""

    def __init__(self, models: Iterable[ServedModel], allowed: frozenset[str] | None = None) -> None:
        self._all = list(models)
        self._allowed = allowed
        self._by_name = {name: model for model in reversed(self._all) for name in (model.id, *model.aliases)}
        self._by_name.setdefault("default", self._all[0])

    @property
    def default(self) -> str:
        return self._all[0].id

    @property
    def ids(self) -> Sequence[str]:
        return [each.id for each in self._all if self._allowed is None or each.id in self._allowed]

    async def find(self, name: str | None) -> ServedModel:
        try:
            model = self._all[0] if name is None else self._by_name[name]
        except KeyError:
            raise unknown_model(name, [each.id for each in await self.all()]) from None
        if self._allowed is not None and model.id not in self._allowed:
            raise forbidden_model(model.id)
        return model

    async def all(self) -> list[ModelCard]:
        return [each.card() for each in self._all if self._allowed is None or each.id in self._allowed]

    async def show(self, name: str) -> ModelCard:
        return (await self.find(name)).card()

    def for_key(self, allowed: frozenset[str] | None) -> Models:
        return self if allowed is None else FixedModels(self._all, allowed)


def unknown_model(name: str | None, known: Iterable[str]) -> NotFound:
    if name is not None and len(name) > _LONGEST_SHOWN:
        name = name[:_LONGEST_SHOWN] + "…"
    return NotFound(
        f"The model {name!r} does not exist. Available: {', '.join(known)}.", param="model", code="model_not_found"
    )


def forbidden_model(name: str) -> Forbidden:
    return Forbidden(f"This key may not use the model {name!r}.", param="model", code="model_not_allowed")
