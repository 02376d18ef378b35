"""Requests as the scheduler sees them: their validation, and the sequences that they become. Torch-free.

A new request becomes one sequence, from which the other choices fork once the prompt is computed. A request that
another worker began becomes a sequence for each choice that is not finished. Such a sequence is like one that was
preempted: its generated tokens are computed again with the prompt, and everything that depends on them (penalties,
grammar, noise, `min_tokens`) goes on where it was. It was accepted before, so neither a full queue nor `queue_seconds`
refuses it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from syringa.engine.sampling.sampler_input import SamplerState
from syringa.engine.scheduling.sequence import Sequence
from syringa.errors import InvalidRequest
from syringa.types import EngineRequest

if TYPE_CHECKING:
    from syringa.engine.structured_output.compiler import GrammarState
    from syringa.engine.vision.prompt_images import PromptImages


def validate_request(request: EngineRequest, *, vocab_size: int, max_length: int) -> None:
    """Raise `InvalidRequest` for a request that cannot be run, whatever its grammar and images are."""
    if not request.prompt:
        raise InvalidRequest("The prompt has no tokens.", param="prompt")
    if len(request.prompt) > max_length:
        raise InvalidRequest(f"The prompt has {len(request.prompt)} tokens; {max_length} fit.", param="prompt")
    if min(request.prompt) < 0 or max(request.prompt) >= vocab_size:
        raise InvalidRequest("The prompt has a token id outside the vocabulary.", param="prompt")
    if request.resumed:
        _validate_resumed(request, vocab_size, max_length)


def make_sequences(
    request: EngineRequest,
    client_id: int,
    submitted: float,
    grammars: Seq[GrammarState] = (),
    prompt_images: PromptImages | None = None,
    text_prompt: list[int] | None = None,
) -> list[Sequence]:
    """Return the sequences to queue for a request.

    `grammars` has the grammar state of each of them. `text_prompt` is the prompt before placeholders were expanded:
    penalties apply to text.
    """
    sequences = []
    for index, choice in enumerate(request.open_choices if request.resumed else [0]):
        output = request.resumed[choice].tokens if request.resumed else []
        sequences.append(
            Sequence(
                request,
                choice,
                SamplerState(request.sampling, text_prompt or request.prompt, output),
                grammars[index] if grammars else None,
                client_id,
                [*request.prompt, *output],
                siblings=0 if request.resumed else request.choices - 1,
                prompt_scores=[None] if request.prompt_logprobs is not None and index == 0 else None,
                begun=bool(request.resumed),
                submitted=submitted,
                prompt_images=prompt_images,
            )
        )
    return sequences


def _validate_resumed(request: EngineRequest, vocab_size: int, max_length: int) -> None:
    if len(request.resumed) != request.choices:
        raise InvalidRequest(f"The request resumes {len(request.resumed)} choices and has {request.choices}.")
    if not request.open_choices:
        raise InvalidRequest("All choices of the resumed request are finished.")
    for choice in request.open_choices:
        tokens = request.resumed[choice].tokens
        if not tokens:
            continue
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            raise InvalidRequest(f"Choice {choice} is resumed with a token id outside the vocabulary.")
        if len(tokens) >= request.stopping.max_tokens:
            raise InvalidRequest(
                f"Choice {choice} is resumed with {len(tokens)} tokens; it has {request.stopping.max_tokens} at most."
            )
    if len(request.prompt) + request.longest_resumed > max_length:
        raise InvalidRequest(
            f"The prompt has {len(request.prompt)} tokens and its output {request.longest_resumed} so far; "
            f"{max_length} fit.",
            param="prompt",
        )
