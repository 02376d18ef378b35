"""Reasoning fields: switches of the chat template, an effort, and a token budget."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from syringa.api.fields.schema import doc
from syringa.api.models.served_model import ServedModel
from syringa.errors import InvalidRequest
from syringa.output_formats import REASONING_MARKERS
from syringa.prompt.chat.template import opens_reasoning
from syringa.prompt.grammar.output_grammar import ReasoningOptions

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
BudgetField = Annotated[
    Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None,
    doc("Maximum number of reasoning tokens; the reasoning is then closed. -1: no maximum."),
]

# Token budgets that stand for an effort if the template has no variable for it; higher efforts are unlimited.
_BUDGETS: dict[Effort, int] = {"minimal": 256, "low": 1024, "medium": 4096}
# Model families use different names for the same switch: all of them are set to what the client set.
_SWITCHES = ("thinking", "enable_thinking")


class ReasoningRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The reasoning settings of a request. `kwargs` are all variables for the chat template."""

    kwargs: dict[str, Any]
    allowed: bool = True
    budget: int | None = None
    template_ignores_switch: bool = False

    def for_prompt(self, prompt: str, model: ServedModel) -> ReasoningOptions | None:
        """Return the reasoning options after a rendered prompt; None for a model without reasoning."""
        format = model.formats.reasoning
        if format is None:
            return None
        return ReasoningOptions(
            format=format,
            opened=opens_reasoning(prompt, REASONING_MARKERS[format]),
            allowed=self.allowed,
            forbid_marker=not self.allowed and self.template_ignores_switch,
            # If the prompt opens the reasoning in spite of the switch, it is closed at once.
            budget=self.budget if self.allowed else 0,
        )


def read_reasoning_request(
    kwargs: dict[str, Any] | None,
    effort: Effort | None,
    budget: int | None,
    model: ServedModel,
    ignored: list[str],
    *,
    effort_field: str = "reasoning_effort",
) -> ReasoningRequest:
    """Combine the reasoning fields of a request.

    The paths of fields without effect on this model are appended to `ignored`. `effort_field` is that of the effort.
    """
    budget = None if budget == -1 else budget
    variables = model.template.variables if model.template is not None else frozenset()
    given = dict(kwargs or {})
    ignored += [f"chat_template_kwargs.{name}" for name in given if name not in variables and name not in _SWITCHES]
    allowed = _set_switches(given, effort, model, ignored, effort_field)
    if effort is not None and effort != "none":
        if "reasoning_effort" in variables:
            honored = given.setdefault("reasoning_effort", effort) == effort
        else:
            effort_budget = _BUDGETS.get(effort)
            honored = model.formats.reasoning is not None and (
                effort_budget is None or budget is not None or can_enforce_budget(model)
            )
            budget = effort_budget if honored and budget is None else budget
        if not honored:
            ignored.append(effort_field)
    if budget is not None and model.formats.reasoning is None:
        ignored.append("thinking_token_budget")
    ignores_switch = not variables.intersection((*_SWITCHES, "reasoning_effort"))
    return ReasoningRequest(kwargs=given, allowed=allowed, budget=budget, template_ignores_switch=ignores_switch)


def can_enforce_budget(model: ServedModel) -> bool:
    """Return whether reasoning can be closed after a budget, which takes a special token that ends it."""
    format = model.formats.reasoning
    return format is not None and model.tokenizer.lark_vocabulary.starts_with_special(REASONING_MARKERS[format].end)


def _set_switches(
    given: dict[str, Any], effort: Effort | None, model: ServedModel, ignored: list[str], effort_field: str
) -> bool:
    """Set the switch under all of its names. Returns whether reasoning is allowed."""
    switches = {name: given.pop(name) for name in _SWITCHES if name in given}
    switches = {name: value for name, value in switches.items() if value is not None}
    for name, value in switches.items():
        param = f"chat_template_kwargs.{name}"
        if not isinstance(value, bool):
            raise InvalidRequest(f"{param}: expected true or false.", param=param)
        if value and effort == "none":
            raise InvalidRequest(f"{effort_field} is none, but {param} turns reasoning on.", param=effort_field)
        if value and model.formats.reasoning is None:
            ignored.append(param)
    if effort == "none":
        switches = dict.fromkeys(_SWITCHES, False)
    for name in _SWITCHES if switches else ():
        given[name] = switches.get(name, next(iter(switches.values())))
    return all(switches.values())
