"""Options that several commands share, made from tables so that a setting or a field is described in one place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from syringa import config

# Settings that make sense without a server.
ENGINE_SETTINGS = ("model", "chat_template", "max_model_len", "dtype", "threads", "kv_cache_tokens", "kv_cache_gb")

_METAVARS = {int: "N", float: "NUMBER", list[int]: "N"}

# Every sampling field of the API: its type and what it does. A test holds this table to the wire type.
SAMPLING: Mapping[str, tuple[Any, str]] = {
    "max_tokens": (int, "Tokens to generate at most."),
    "temperature": (float, "0 to 2; 0 always takes the likeliest token."),
    "top_p": (float, "Draw from the smallest set of tokens with this much probability."),
    "top_k": (int, "Draw from this many of the likeliest tokens."),
    "min_p": (float, "Leave out tokens below this fraction of the likeliest one's probability."),
    "seed": (int, "The same seed draws the same tokens."),
    "n": (int, "Number of answers."),
    "stop": (list[str], "End before this text. Up to 4."),
    "frequency_penalty": (float, "-2 to 2, for each time a token was generated."),
    "presence_penalty": (float, "-2 to 2, once for a token that was generated."),
    "repetition_penalty": (float, "Above 1, makes tokens of prompt and answer less likely."),
    "logit_bias": (list[str], "ID=BIAS, added to a token's logit. May be repeated."),
    "dry_multiplier": (float, "Strength of the DRY penalty on repeated runs; 0 is off."),
    "dry_base": (float, "How fast the DRY penalty grows with the run's length."),
    "dry_allowed_length": (int, "Longest repeated run that DRY leaves alone."),
    "dry_sequence_breakers": (list[str], "Text that ends a run for DRY. May be repeated."),
    "grammar": (str, "KIND:VALUE, with kind regex, json_schema, lark or llguidance; @FILE reads the value."),
    "response_format": (str, "json_object, or a JSON schema (@FILE reads it)."),
    "ignore_eos": (bool, "Go on after the model's own end token."),
    "min_tokens": (int, "No end before this many tokens."),
    "stop_token_ids": (list[int], "Token that ends the answer. May be repeated."),
    "truncate_sequence": (bool, "Cut a prompt that is too long from its beginning."),
}


def settings_options(names: Iterable[str] = tuple(config.FIELDS)) -> list[inspect.Parameter]:
    """An option for each setting; its default and its variable are shown, but read by `config.load` alone."""
    made = []
    for name in names:
        kind, default = config.bare_type(name), config.FIELDS[name].default
        told = f"{config.describe(name)}  [{config.variable(name)}"
        told += f", default {default}]" if default not in ((), "") else "]"
        metavar = "|".join(get_args(kind)) if get_origin(kind) is Literal else None
        # Values are read as text and checked by `config.load`, which says in one line what is wrong with them.
        kind = bool if kind is bool else list[str] if get_origin(kind) is tuple else str
        made.append(_option(name, kind, told, metavar=metavar or _METAVARS.get(config.bare_type(name), "TEXT")))
    return made


def sampling_options(leave_out: Iterable[str] = ()) -> list[inspect.Parameter]:
    return [
        _option(name, kind, told, metavar=_METAVARS.get(kind, "TEXT"), switch=kind is bool)
        for name, (kind, told) in SAMPLING.items()
        if name not in leave_out
    ]


def _option(name: str, kind: Any, told: str, *, metavar: str | None, switch: bool = False) -> inspect.Parameter:
    flag = "--" + name.replace("_", "-")
    if kind is bool and not switch:
        flag = f"{flag}/--no-{flag[2:]}"
    metavar = None if kind is bool else metavar
    info = typer.Option(flag, help=told, metavar=metavar, show_default=False)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )


def takes(*options: inspect.Parameter) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command the options, which reach it in its `**` argument."""

    def give(command: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(command, eval_str=True)
        kept = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        command.__signature__ = own.replace(parameters=[*kept, *options])  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in [*kept, *options]}
        return command

    return give


def split(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options that were given: settings, and sampling fields."""
    present = {name: value for name, value in given.items() if value is not None and value != []}
    settings = {name: value for name, value in present.items() if name in config.FIELDS}
    return settings, {name: value for name, value in present.items() if name in SAMPLING}
