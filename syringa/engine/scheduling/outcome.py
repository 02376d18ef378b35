"""What a drawn token means for its choice."""

from __future__ import annotations

from syringa.engine.sampling.draw import NO_TOKEN
from syringa.engine.scheduling.sequence import Sequence, check_stop
from syringa.types import FinishReason


def take_token(sequence: Sequence, token: int, max_length: int) -> tuple[list[int], FinishReason | None, str | None]:
    """Adds a token to its sequence. What the client is told: the tokens, why the choice ends, and what went wrong."""
    stopping, grammar = sequence.request.stopping, sequence.grammar
    if stopping.max_tokens == 0:  # the prompt was to be scored, nothing more
        return [], "length", None
    if token == NO_TOKEN:
        if grammar is not None and grammar.accepting and not grammar.error:
            return [], "stop", None
        return [], "error", (grammar and grammar.error) or "The model gave no usable probabilities."
    sequence.add(token)
    sequence.state.observe(token)
    finish = check_stop(stopping, token, sequence.generated, max_length - len(sequence.tokens))
    if grammar is not None and finish != "stop":
        grammar.accept(token)
        if grammar.error:
            return [token], "error", grammar.error
        if grammar.finished:
            finish = "stop"
    return [token], finish, None
