"""The `thinking` field, the effort, and the signatures of thinking blocks.

The signature of a thinking block is its text, encrypted for the organization of the client, so that a block whose text
is omitted can be sent back, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from syringa.api.anthropic.request import OutputConfig
from syringa.api.decoding import convert
from syringa.api.fields.reasoning import ReasoningRequest, can_enforce_budget, read_reasoning_request
from syringa.api.models.served_model import ServedModel
from syringa.api.responses.context import Cipher, decrypt_reasoning
from syringa.errors import InvalidRequest

Display = Literal["summarized", "omitted", "updates"]
_THINKING_TYPES = ("thinking", "redacted_thinking")
OpenThinking = Callable[[str, str | None, str], str]
"""Returns the text of a thinking block, given its signature, the text that it shows if any, and its path."""


class ThinkingTypeField(msgspec.Struct, kw_only=True):
    type: str


class EnabledThinkingField(msgspec.Struct, kw_only=True):
    type: str
    budget_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    display: Display = "summarized"


class AdaptiveThinkingField(msgspec.Struct, kw_only=True):
    type: str
    display: Display = "summarized"


class ThinkingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Whether and how much the model thinks, and whether the client sees it."""

    reasoning: ReasoningRequest
    enabled: bool
    shown: bool = True


def read_thinking(given: Any, config: OutputConfig, model: ServedModel, ignored: list[str]) -> ThinkingRequest:
    """Validate `thinking`, and combine it with `output_config.effort`.

    What has no effect on this model is appended to `ignored`.
    """
    path = "thinking"
    kind = "disabled" if given is None else convert(given, ThinkingTypeField, path=path).type
    budget, display = None, "summarized"
    match kind:
        case "enabled":
            enabled = convert(given, EnabledThinkingField, path=path, ignored=ignored)
            budget, display = enabled.budget_tokens, enabled.display
        case "adaptive":
            display = convert(given, AdaptiveThinkingField, path=path, ignored=ignored).display
        case "disabled" | "between_tools":  # the latter turns thinking off, too
            if given is not None:
                convert(given, ThinkingTypeField, path=path, ignored=ignored)
        case _:
            raise InvalidRequest(
                f"{path}.type: expected enabled, adaptive, disabled or between_tools, not {kind!r}.",
                param=f"{path}.type",
            )
    if display == "updates":  # texts that a model writes between its calls
        ignored.append(f"{path}.display")
    wanted = kind in ("enabled", "adaptive")
    if budget is not None and model.formats.reasoning is not None and not can_enforce_budget(model):
        ignored.append(f"{path}.budget_tokens")
        budget = None
    if wanted and model.formats.reasoning is None:
        ignored.append(path)
    if not wanted or model.formats.reasoning is None:
        if config.effort is not None:
            ignored.append("output_config.effort")
        reasoning = read_reasoning_request(
            None, None if model.formats.reasoning is None else "none", None, model, ignored
        )
        return ThinkingRequest(reasoning=reasoning, enabled=False)
    reasoning = read_reasoning_request(
        {"enable_thinking": True}, config.effort, budget, model, ignored, effort_field="output_config.effort"
    )
    return ThinkingRequest(reasoning=reasoning, enabled=True, shown=display != "omitted")


def thinking_opener(cipher: Cipher | None) -> OpenThinking:
    """Return the function that verifies thinking blocks of an organization. It raises `InvalidRequest`.

    Without a cipher, no block is valid.
    """

    def open_thinking(signature: str, shown: str | None, path: str) -> str:
        text = None if cipher is None else decrypt_reasoning(cipher, signature)
        if text is None:
            name = "data" if shown is None else "signature"
            raise InvalidRequest(
                f"{path}.{name}: invalid: the block was not made by this server for this organization.",
                param=f"{path}.{name}",
            )
        if shown and shown != text:
            raise InvalidRequest(
                f"{path}.thinking: the signature is of another text: send thinking blocks back unchanged.",
                param=f"{path}.thinking",
            )
        return text

    return open_thinking


def has_thinking(messages: list[dict[str, Any]]) -> bool:
    """Return whether any message has a thinking block, whose signature has to be verified."""
    contents = (message.get("content") for message in messages)
    blocks = (block for content in contents if isinstance(content, list) for block in content)
    return any(isinstance(block, dict) and block.get("type") in _THINKING_TYPES for block in blocks)
