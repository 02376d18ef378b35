"""How much a request lets a model think: a switch in the template, an effort, a budget."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from syringa.api.models.served_model import ServedModel
from syringa.errors import InvalidRequest
from syringa.output_formats import THOUGHTS
from syringa.prompt.chat.template import opens_thought
from syringa.prompt.grammar.answer import Thinking

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# What an effort comes to where the template has no word for it; the others leave the thought free.
_BUDGETS: dict[Effort, int] = {"minimal": 256, "low": 1024, "medium": 4096}
# Families call the same switch by different names: whichever a client sets, the template finds its own.
_SWITCHES = ("thinking", "enable_thinking")


class ThinkingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says of thinking. `kwargs` are for the template, with all else that the client gave it."""

    kwargs: dict[str, Any]
    allowed: bool = True
    budget: int | None = None
    unheard: bool = False  # the template reads none of the switches

    def begin(self, prompt: str, model: ServedModel) -> Thinking | None:
        """How the thought goes behind a rendered prompt; None for a model that does not think."""
        thought = model.dialect.thought
        if thought is None:
            return None
        return Thinking(
            format=thought,
            opened=opens_thought(prompt, THOUGHTS[thought]),
            allowed=self.allowed,
            forbidden=not self.allowed and self.unheard,
            # Where the prompt opens a thought whatever it is told, that is closed at once.
            budget=self.budget if self.allowed else 0,
        )


def read_thinking(
    kwargs: dict[str, Any] | None,
    effort: Effort | None,
    budget: int | None,
    model: ServedModel,
    ignored: list[str],
    *,
    asked: str = "reasoning_effort",
) -> ThinkingRequest:
    """Three fields as one. What this model cannot do of them is added to `ignored`. `asked`: where the effort stood."""
    reads = model.template.variables if model.template is not None else frozenset()
    given = dict(kwargs or {})
    ignored += [f"chat_template_kwargs.{name}" for name in given if name not in reads and name not in _SWITCHES]
    allowed = _switch(given, effort, model, ignored, asked)
    if effort is not None and effort != "none":
        if "reasoning_effort" in reads:
            heeded = given.setdefault("reasoning_effort", effort) == effort
        else:
            wanted = _BUDGETS.get(effort)
            heeded = model.dialect.thought is not None and (wanted is None or budget is not None or _can_hold(model))
            budget = wanted if heeded and budget is None else budget
        if not heeded:
            ignored.append(asked)
    if budget is not None and model.dialect.thought is None:
        ignored.append("thinking_token_budget")
    unheard = not reads.intersection((*_SWITCHES, "reasoning_effort"))
    return ThinkingRequest(kwargs=given, allowed=allowed, budget=budget, unheard=unheard)


def _can_hold(model: ServedModel) -> bool:
    """Whether a thought can be ended at a budget: its end has to be a token of its own."""
    thought = model.dialect.thought
    return thought is not None and model.tokenizer.spelling.begins_special(THOUGHTS[thought].end)


def _switch(given: dict[str, Any], effort: Effort | None, model: ServedModel, ignored: list[str], asked: str) -> bool:
    """Sets the switch under all its names, and says whether the model may think."""
    set_ = {name: given.pop(name) for name in _SWITCHES if name in given}
    set_ = {name: value for name, value in set_.items() if value is not None}
    for name, value in set_.items():
        param = f"chat_template_kwargs.{name}"
        if not isinstance(value, bool):
            raise InvalidRequest(f"{param}: expected true or false.", param=param)
        if value and effort == "none":
            raise InvalidRequest(f"{asked} is none, and {param} turns thinking on.", param=asked)
        if value and model.dialect.thought is None:
            ignored.append(param)
    if effort == "none":
        set_ = dict.fromkeys(_SWITCHES, False)
    for name in _SWITCHES if set_ else ():
        given[name] = set_.get(name, next(iter(set_.values())))
    return all(set_.values())
