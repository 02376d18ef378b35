"""Token counts of a message: what the prefix cache had, and what `cache_control` marks as new in it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from syringa.api.anthropic.conversation import CacheMark, Conversation
from syringa.api.anthropic.message import CacheCreationBody, MessageUsage, OutputTokensBody
from syringa.api.chat.prompt import ChatPrompt, PromptRenderer
from syringa.errors import InvalidRequest
from syringa.events import Usage


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """Splits the tokens of a prompt into those that were cached, those up to the last mark, and the rest."""

    prompt_tokens: int  # before the engine replaces placeholders of images by their tokens
    marked_tokens: int = 0
    marked_images: float = 0.0  # share of the images that precede the mark
    ttl: str = "5m"

    def usage(self, usage: Usage) -> MessageUsage:
        """Return the counts of a message."""
        counts = self.total_usage(usage)
        created = counts.cache_creation_input_tokens
        counts.cache_creation = CacheCreationBody(
            ephemeral_5m_input_tokens=created if self.ttl == "5m" else 0,
            ephemeral_1h_input_tokens=created if self.ttl == "1h" else 0,
        )
        counts.service_tier = "standard"
        return counts

    def total_usage(self, usage: Usage) -> MessageUsage:
        """Return the counts at the end of a stream, without what its start has said."""
        image_tokens = usage.prompt_tokens - self.prompt_tokens
        marked = self.marked_tokens + round(image_tokens * self.marked_images)
        created = max(0, marked - usage.cached_tokens)
        return MessageUsage(
            input_tokens=usage.prompt_tokens - usage.cached_tokens - created,
            cache_creation_input_tokens=created,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensBody(thinking_tokens=usage.reasoning_tokens),
        )


async def count_tokens(
    renderer: PromptRenderer, conversation: Conversation, mark: CacheMark | None, prompt: ChatPrompt
) -> TokenCounts:
    """Return the counts of a prompt.

    The tokens up to the mark are those that the prompt has in common with that of the conversation up to the mark.
    """
    total = len(prompt.tokens)
    if mark is None:
        return TokenCounts(prompt_tokens=total)
    same_tools = dataclasses.replace(
        renderer, add_generation_prompt=False, continue_final_message=False, short_tools=prompt.short_tools
    )
    try:
        marked = await same_tools.build(conversation.marked_messages(mark))
    except InvalidRequest:  # the template does not render a conversation that ends there
        return TokenCounts(prompt_tokens=total)
    return TokenCounts(
        prompt_tokens=total,
        marked_tokens=_common_prefix(prompt.tokens, marked.tokens),
        marked_images=len(marked.images) / len(prompt.images) if prompt.images else 0.0,
        ttl=mark.control.ttl,
    )


def _common_prefix(first: list[int], second: list[int]) -> int:
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(index for index in range(length) if first[index] != second[index])
