"""A model as the API server sees it: names, tokenizer, chat template and limits, without weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from syringa.config import Prices, ReasoningFields, RequestChatTemplates
from syringa.errors import ContextLengthExceeded, Forbidden, InvalidRequest, NotFound
from syringa.modelfiles import EmbeddingSpec
from syringa.output_formats import TOOL_CALL_BEGIN, ModelFormats
from syringa.prompt.chat.template import Message, Template
from syringa.prompt.chat.tools import ToolUse
from syringa.prompt.grammar.validation import check_in_process
from syringa.prompt.images.loader import ImagePolicy
from syringa.prompt.tokens.encoder_tokenizer import EncoderTokenizer
from syringa.prompt.tokens.tokenizer import Tokenizer
from syringa.types import Grammar, ModelKind, ModelLoading

T = TypeVar("T")

ModelStatus = Literal["loaded", "hanging", "loading", "cold", "failed"]
"""Whether a model is in memory. A cold model is loaded by its first request."""

GrammarCheck = Callable[[Grammar, str, str | None], Awaitable[int]]
"""Return the memory that a compiled grammar takes in bytes, 0 if unknown, given the tenant and cache salt of a request.

Raises `InvalidRequest` for a grammar that cannot be compiled.
"""

GENERATING: tuple[ModelKind, ...] = ("generate",)
EMBEDDING: tuple[ModelKind, ...] = ("embed",)
SCORING: tuple[ModelKind, ...] = ("score", "embed")  # an embedding model scores by similarity
ALL_KINDS: tuple[ModelKind, ...] = ("generate", "embed", "score")

_USES: dict[ModelKind, tuple[str, str]] = {
    "generate": ("generates text", "/v1/chat/completions, /v1/completions or /v1/responses"),
    "embed": ("makes embeddings", "/v1/embeddings, /v1/rerank or /v1/score"),
    "score": ("scores pairs of texts", "/v1/rerank or /v1/score"),
}
DEFAULT_NAMES = (None, "", "default")  # in a request, of the default model

# Below this many characters tokenizing inline is cheaper than in a thread.
_INLINE_CHARS = 4096
_MAX_SHOWN_NAME = 200  # characters of an unknown name in an error message


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """What endpoints need of an embedding model or a cross-encoder."""

    spec: EmbeddingSpec
    tokenizer: EncoderTokenizer
    max_request_tokens: int = 1_000_000  # of all inputs of a request


@dataclass(kw_only=True)
class ServedModel:
    """A model with what endpoints need. `max_model_len` may shrink once the worker knows the size of its cache."""

    id: str
    tokenizer: Tokenizer
    max_model_len: int
    end_tokens: frozenset[int]
    bos_token: int | None = None
    aliases: tuple[str, ...] = ()
    architecture: str = ""
    template: Template | None = None
    special_tokens: dict[str, Any] = field(default_factory=dict)  # token texts by name: bos_token, eos_token, …
    formats: ModelFormats = field(default_factory=ModelFormats)
    supports_images: bool = False
    image_policy: ImagePolicy = field(default_factory=ImagePolicy)
    max_choices: int = 2048  # of one request
    unsupported_tools: Literal["ignore", "refuse"] = "ignore"
    request_chat_templates: RequestChatTemplates = "auto"
    reasoning_fields: ReasoningFields = "both"  # in which chat returns reasoning
    system_fingerprint: str = "fp_unknown"  # of the model's files and the version of the server
    prices: Prices | None = None
    defaults: dict[str, Any] = field(default_factory=dict)  # of request fields, see `api/fields/defaults.py`
    system: str = ""  # system message of conversations that have none
    preset_messages: tuple[Message, ...] = ()  # before those of every conversation
    created: int = field(default_factory=lambda: int(time.time()))
    check_grammar: GrammarCheck = check_in_process  # a server replaces it by its grammar probe
    encoder: Encoder | None = None  # of a model that does not generate text

    def __post_init__(self) -> None:
        self._token_texts: dict[int, str] = {}
        self._opening: tuple[int, ...] | None = None

    @property
    def kind(self) -> ModelKind:
        return "generate" if self.encoder is None else self.encoder.spec.kind

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def start_token(self) -> int | None:
        """The token that starts a document: BOS, or an end-of-sequence token if the model has no BOS."""
        if self.bos_token is not None:
            return self.bos_token
        return min(self.end_tokens, default=None)

    async def encode_all(
        self, texts: list[str], *, special: bool = True, truncate: Literal["left", "right"] | None = None
    ) -> list[list[int]]:
        """Tokenize raw prompts; `special` adds the tokenizer's special tokens, such as BOS.

        A text that is too long whatever its tokens are is refused before it is tokenized, or cut from the side that
        `truncate` names.
        """
        max_chars = self.max_model_len * self.tokenizer.longest_token
        if truncate is not None:
            texts = [text[:max_chars] if truncate == "right" else text[-max_chars:] for text in texts]
        else:
            self.check_length(max(map(len, texts), default=0), "prompt")

        def encode() -> list[list[int]]:
            return [self.tokenizer.encode(text, add_special=special) for text in texts]

        return encode() if sum(map(len, texts)) <= _INLINE_CHARS else await asyncio.to_thread(encode)

    def check_length(self, characters: int, param: str) -> None:
        """Raise `ContextLengthExceeded` if a text of so many characters is too long whatever its tokens are."""
        if characters > self.max_model_len * self.tokenizer.longest_token:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.max_model_len} tokens; a prompt of {characters} "
                "characters has more.",
                param=param,
            )

    def opening(self, tools: ToolUse | None) -> tuple[int, ...]:
        """Return the tokens that open a tool call, for a model that was not trained to call tools and may choose to.

        The engine takes such an opening if it is the most likely continuation, instead of sampling: a small model would
        otherwise miss half of its calls to the rest of the distribution.
        """
        if tools is None or tools.mode != "auto" or self.formats.tool_calls != "plain":
            return ()
        if self._opening is None:
            self._opening = tuple(self.tokenizer.encode(TOOL_CALL_BEGIN, add_special=False))
        return self._opening

    def decode_tokens(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, including special tokens."""
        return self.tokenizer.decode(tokens, skip_special=False)

    def token_text(self, token: int) -> str:
        """Return the text of a token for log-probabilities; incomplete UTF-8 is written as `bytes:\\x…`."""
        text = self._token_texts.get(token)
        if text is None:
            raw = self.tokenizer.token_bytes(token)
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            self._token_texts[token] = text
        return text

    def card(self, status: ModelStatus = "loaded") -> ModelCard:
        """Return the public description of the model."""
        return ModelCard(
            id=self.id,
            aliases=self.aliases,
            created=self.created,
            max_model_len=self.max_model_len,
            kind=self.kind,
            dimensions=None if self.encoder is None else vector_dimensions(self.encoder.spec),
            capabilities=encoder_capabilities(self.encoder.spec)
            if self.encoder is not None
            else capabilities(
                chat=self.template is not None,
                vision=self.supports_images,
                reasoning=self.formats.reasoning is not None,
            ),
            prices=self.prices,
            status=status,
        )


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """The public description of a model, loaded or not. Values from its files are None if they cannot be read."""

    id: str
    created: int
    aliases: tuple[str, ...] = ()
    max_model_len: int | None = None
    kind: ModelKind | None = None
    dimensions: int | None = None  # of an embedding model's vectors
    capabilities: tuple[str, ...] | None = None
    prices: Prices | None = None
    status: ModelStatus = "loaded"
    loading: ModelLoading | None = None  # how far it is, if that is known


def capabilities(*, chat: bool, vision: bool, reasoning: bool) -> tuple[str, ...]:
    flags = {"completion": True, "chat": chat, "vision": vision, "reasoning": reasoning}
    return tuple(name for name, enabled in flags.items() if enabled)


def encoder_capabilities(spec: EmbeddingSpec) -> tuple[str, ...]:
    return ("embedding", "rerank", "score") if spec.kind == "embed" else ("rerank", "score")


def vector_dimensions(spec: EmbeddingSpec) -> int | None:
    return spec.dimensions if spec.kind == "embed" else None


class Models(Protocol):
    """The models that an API key may use."""

    @property
    def default(self) -> str:
        """Id of the default model."""
        ...

    @property
    def ids(self) -> Sequence[str]:
        """Ids of all models, the default model first."""
        ...

    async def find(self, name: str | None, kinds: Sequence[ModelKind] = GENERATING) -> ServedModel:
        """Return the model with an id or alias; None, "" and `default` are the default model.

        Where that does not generate text and none that does was asked for, they are the first model of one of `kinds`,
        the first kind first. Reads its files on first use.

        Raises `NotFound`, `Forbidden` if the key may not use it, or `InvalidRequest` if it is of another kind.
        """
        ...

    async def all(self) -> list[ModelCard]:
        """Return the cards of all models without loading any."""
        ...

    async def show(self, name: str) -> ModelCard:
        """Return the card of one model. Raises like `find`."""
        ...

    def for_key(self, allowed: frozenset[str] | None) -> Models:
        """Return the subset that a key with these allowed ids may use; None means all."""
        ...


class FixedModels:
    """A fixed list of models; the first is the default."""

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

    async def find(self, name: str | None, kinds: Sequence[ModelKind] = GENERATING) -> ServedModel:
        if "generate" not in kinds and name in DEFAULT_NAMES:
            name = first_of_kinds(await self.all(), kinds)
        model = self._find(name)
        check_kind(model, kinds)
        return model

    async def all(self) -> list[ModelCard]:
        return [each.card() for each in self._all if self._allowed is None or each.id in self._allowed]

    async def show(self, name: str) -> ModelCard:
        return self._find(name).card()

    def for_key(self, allowed: frozenset[str] | None) -> Models:
        return self if allowed is None else FixedModels(self._all, allowed)

    def _find(self, name: str | None) -> ServedModel:
        try:
            model = find_by_name(self._by_name, name) if name else self._all[0]
        except KeyError:
            raise unknown_model(name, self.ids) from None
        if self._allowed is not None and model.id not in self._allowed:
            raise forbidden_model(model.id)
        return model


def find_by_name(names: Mapping[str, T], name: str) -> T:
    """Return the value of a name, or of the longest pattern that it matches: a name that ends with `*`.

    Raises `KeyError`.
    """
    if (found := names.get(name)) is not None:
        return found
    patterns = [each for each in names if each.endswith("*") and name.startswith(each[:-1])]
    return names[max(patterns, key=len, default=name)]


def unknown_model(name: str | None, known: Iterable[str]) -> NotFound:
    """Return the error for a model name that does not exist."""
    if name is not None and len(name) > _MAX_SHOWN_NAME:
        name = name[:_MAX_SHOWN_NAME] + "…"
    return NotFound(
        f"The model {name!r} does not exist. Available: {', '.join(known)}.", param="model", code="model_not_found"
    )


def forbidden_model(name: str) -> Forbidden:
    """Return the error for a model that the key may not use."""
    return Forbidden(f"This key may not use the model {name!r}.", param="model", code="model_not_allowed")


def check_kind(model: ServedModel, kinds: Sequence[ModelKind]) -> None:
    """Raise `InvalidRequest` for a model that an endpoint cannot use."""
    if model.kind not in kinds:
        does, endpoints = _USES[model.kind]
        raise InvalidRequest(
            f"The model {model.id!r} {does} and cannot be used here: use it with {endpoints}.",
            param="model",
            code="wrong_model_kind",
        )


def first_of_kinds(cards: Iterable[ModelCard], kinds: Sequence[ModelKind]) -> str:
    """Return the id of the first model of the first kind that there is. Raises `InvalidRequest` if there is none."""
    cards = list(cards)
    for kind in kinds:
        for card in cards:
            if card.kind == kind:
                return card.id
    wanted = " or ".join(_USES[kind][0] for kind in kinds)
    raise InvalidRequest(
        f"This server has no model that {wanted}: start it with `--embedding-model embedding`, or name a model.",
        param="model",
        code="wrong_model_kind",
    )
