"""Request fields of chat completions and completions that are about tokens, vLLM's extensions, and their output."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from syringa.api.fields.common import UsageBody
from syringa.api.fields.compatibility import CompatibilityFields
from syringa.api.fields.sampling import MAX_COUNT, check_tokens
from syringa.api.fields.schema import doc
from syringa.api.models.served_model import ServedModel
from syringa.errors import InvalidRequest
from syringa.types import TokenLogprobs

MAX_LOGPROBS = 20
_REQUEST_ID = r"^[A-Za-z0-9._:-]+(?![\s\S])"  # unlike in JavaScript, $ also matches before a final newline

TruncationSide = Literal["left", "right"]


class TokenFields(CompatibilityFields, kw_only=True):
    """Base of the bodies of chat completions and completions."""

    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=MAX_COUNT, extra_json_schema={"not": {"const": 0}})] | None,
        doc("Cut the prompt to this many tokens; -1: to what the context leaves for it. Not with images."),
    ] = None
    truncation_side: Annotated[
        TruncationSide | None,
        doc("Side from which `truncate_prompt_tokens` cuts: `left` keeps the last tokens, `right` the first.", "left"),
    ] = None
    prompt_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None,
        doc(
            "Return the log-probability of each prompt token, with this many most likely tokens at each position, 0 "
            "to 20. Not with images."
        ),
    ] = None
    logprob_token_ids: Annotated[
        Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1, max_length=256)] | None,
        doc(
            "Return the log-probabilities of these token ids at each position, at most 256, instead of those of the "
            "most likely tokens; requires `logprobs`."
        ),
    ] = None
    return_token_ids: Annotated[
        bool | None, doc("Return the ids of the prompt's and the output's tokens; in a stream, with each chunk.", False)
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, doc("Write tokens in `logprobs` as `token_id:123` instead of their text.", False)
    ] = None
    return_token_offsets: Annotated[
        bool | None,
        doc(
            "Return the start and end of each prompt token in the text of the prompt, in characters, as "
            "`prompt_token_offsets`; null if the tokens do not spell the text.",
            False,
        ),
    ] = None
    use_beam_search: Annotated[
        bool | None,
        doc(
            "Return the `n` best results of a beam search with `n` beams, best first, instead of sampling. Cannot be "
            "combined with `stop`, constraints, penalties or images; fields of sampling are reported as ignored.",
            False,
        ),
    ] = None
    length_penalty: Annotated[
        Annotated[float, Meta(ge=-10, le=10)] | None,
        doc(
            "With `use_beam_search`: beams are ranked by their log-probability divided by their number of tokens to "
            "this power.",
            1.0,
        ),
    ] = None
    request_id: Annotated[
        Annotated[str, Meta(min_length=1, max_length=128, pattern=_REQUEST_ID)] | None,
        doc("Id of the response, after the prefix that ids of the endpoint have. Default: random."),
    ] = None
    stream_interval: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_COUNT)] | None,
        doc("With `stream`: tokens in each chunk of a choice, except for its first and its last.", 1),
    ] = None
    n_predict: Annotated[
        Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None,
        doc("Same as `max_tokens`, and takes precedence; -1: the rest of the context."),
    ] = None
    n_cmpl: Annotated[Annotated[int, Meta(ge=1, le=128)] | None, doc("Same as `n`, which takes precedence.", 1)] = None
    n_probs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None,
        doc("Return log-probabilities, with this many most likely tokens at each position, unless `logprobs` is set."),
    ] = None


class PromptLogprob(msgspec.Struct):
    """The log-probability of a token at a position of the prompt."""

    logprob: float
    rank: Annotated[int, doc("1 for the most likely token.")]
    decoded_token: str


Offsets = list[tuple[int, int]]
PromptLogprobs = list[dict[str, PromptLogprob] | None]

StopReasonField = Annotated[
    str | int | None, doc("The stop string or the id of the stop token that ended the output; null: another reason.")
]
TokenIdsField = Annotated[list[int] | UnsetType, doc("Ids of the output's tokens, with `return_token_ids`.")]
PromptTokenIdsField = Annotated[list[int] | UnsetType, doc("Ids of the prompt's tokens, with `return_token_ids`.")]
PromptOffsetsField = Annotated[
    Offsets | UnsetType | None,
    doc("Start and end of each prompt token in the prompt's text, in characters, with `return_token_offsets`."),
]
PromptLogprobsField = Annotated[
    PromptLogprobs | UnsetType,
    doc("For each prompt token, log-probabilities by token id, with `prompt_logprobs`; null for the first."),
]


class TokenCounter:
    """The token counts of a stream so far."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0

    @property
    def usage(self) -> UsageBody:
        total = self.prompt_tokens + self.completion_tokens
        return UsageBody(self.prompt_tokens, self.completion_tokens, total)


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What a response returns about tokens. Lists have an entry for each prompt."""

    token_ids: bool = False
    as_token_ids: bool = False
    prompt_logprobs: int | None = None
    prompts: Sequence[list[int]] = ()
    offsets: Sequence[Offsets | None] | None = None

    def prompt_token_ids(self, prompt: int) -> list[int] | UnsetType:
        return self.prompts[prompt] if self.token_ids else UNSET

    def prompt_offsets(self, prompt: int) -> Offsets | UnsetType | None:
        return UNSET if self.offsets is None else self.offsets[prompt]

    def token_text(self, token: int, model: ServedModel) -> str:
        """Return a token as it is written in `logprobs`."""
        return f"token_id:{token}" if self.as_token_ids else model.token_text(token)

    def prompt_scores(self, scores: list[TokenLogprobs | None], model: ServedModel) -> PromptLogprobs:
        """Return `prompt_logprobs`, with each token and its most likely alternatives by id."""
        count = self.prompt_logprobs or 0
        return [None if each is None else _prompt_logprob(each, count, model) for each in scores]


def _prompt_logprob(scores: TokenLogprobs, count: int, model: ServedModel) -> dict[str, PromptLogprob]:
    found = {str(scores.token): PromptLogprob(scores.logprob, scores.rank, model.token_text(scores.token))}
    for rank, (token, logprob) in enumerate(scores.top[:count], 1):
        found.setdefault(str(token), PromptLogprob(logprob, rank, model.token_text(token)))
    return found


def read_token_output(
    fields: TokenFields,
    model: ServedModel,
    prompts: Sequence[list[int]],
    texts: Sequence[str | None],
    *,
    logprobs: bool,
    images: bool = False,
) -> TokenOutput:
    """Validate the fields and return what the response has to contain of the tokens of its prompts.

    A text is None if the client sent token ids. Raises `InvalidRequest`.
    """
    if images and fields.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs: not supported with images.", param="prompt_logprobs")
    if fields.logprob_token_ids is not None:
        if not logprobs:
            raise InvalidRequest("logprob_token_ids requires logprobs.", param="logprob_token_ids")
        check_tokens(fields.logprob_token_ids, model.vocab_size, "logprob_token_ids")
    offsets = None
    if fields.return_token_offsets:
        offsets = [
            None if text is None or images else token_offsets(tokens, text, model)
            for tokens, text in zip(prompts, texts, strict=True)
        ]
    return TokenOutput(
        token_ids=bool(fields.return_token_ids),
        as_token_ids=bool(fields.return_tokens_as_token_ids),
        prompt_logprobs=fields.prompt_logprobs,
        prompts=prompts if fields.return_token_ids else (),
        offsets=offsets,
    )


def token_offsets(tokens: Sequence[int], text: str, model: ServedModel) -> Offsets | None:
    """Return the start and end of each token in `text`, in characters; None if the tokens do not spell the text.

    A character of several tokens belongs to each of them. A leading token that is not in the text, like BOS, is empty.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets: Offsets = []
    parts: list[str] = []
    position = 0
    for token in tokens:
        part = decoder.decode(model.tokenizer.token_bytes(token))
        parts.append(part)
        pending = bool(decoder.getstate()[0])
        offsets.append((position, position + len(part) + pending))
        position += len(part)
    spelled = "".join(parts)
    if not spelled.endswith(text):
        return None
    extra = len(spelled) - len(text)  # a BOS token, or the leading space that some tokenizers add
    return [(max(0, start - extra), max(0, end - extra)) for start, end in offsets]


def truncate_prompt(tokens: list[int], *, fields: TokenFields, model: ServedModel, max_tokens: int) -> list[int]:
    """Return the tokens that `truncate_prompt_tokens` leaves of a prompt before `max_tokens` of output.

    Raises `InvalidRequest`.
    """
    limit = fields.truncate_prompt_tokens
    if limit is None:
        return tokens
    param = "truncate_prompt_tokens"
    if limit == 0 or limit > model.max_model_len:
        raise InvalidRequest(
            f"{param}: expected -1, or 1 to {model.max_model_len} (the model's context), not {limit}.", param=param
        )
    limit = max(1, model.max_model_len - max_tokens) if limit < 0 else limit
    return tokens[:limit] if fields.truncation_side == "right" else tokens[-limit:]
