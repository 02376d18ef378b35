"""Options shared by several commands, generated from tables: settings and sampling parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from syringa import config
from syringa.config import Config

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="Settings file; default: syringa.toml in the current folder, if any."
    ),
]

# The settings that apply without a server.
ENGINE_SETTINGS = ("model", "chat_template", "max_model_len", "dtype", "threads", "kv_cache_tokens", "kv_cache_gb")

_METAVARS = {int: "N", float: "NUMBER", list[int]: "N"}

# Every sampling parameter of the API: its type and its help. A test compares this table with the wire type.
SAMPLING: Mapping[str, tuple[Any, str]] = {
    "max_tokens": (int, "Maximum number of tokens to generate."),
    "temperature": (float, "0 to 2; 0 always takes the most likely token."),
    "top_p": (float, "Sample from the smallest set of tokens with this total probability."),
    "top_k": (int, "Sample from this many of the most likely tokens."),
    "min_p": (float, "Exclude tokens below this fraction of the highest probability."),
    "seed": (int, "Seed of the sampler; the same seed gives the same tokens."),
    "n": (int, "Number of completions."),
    "stop": (list[str], "Stop before this text. May be repeated, up to 64 times."),
    "include_stop_str_in_output": (bool, "Keep the stop text at the end of the output."),
    "frequency_penalty": (float, "-2 to 2; applied for each time a token was generated."),
    "presence_penalty": (float, "-2 to 2; applied once to a token that was generated."),
    "repetition_penalty": (float, "Above 1, tokens of prompt and output become less likely."),
    "logit_bias": (list[str], "ID=BIAS: a bias added to a token's logit. May be repeated."),
    "dry_multiplier": (float, "Strength of the DRY penalty on repeated token sequences; 0: off."),
    "dry_base": (float, "Growth of the DRY penalty with the length of the repetition."),
    "dry_allowed_length": (int, "Longest repetition without a DRY penalty."),
    "dry_sequence_breakers": (list[str], "Text at which a repetition ends for DRY. May be repeated."),
    "grammar": (str, "KIND:VALUE, with KIND regex, json_schema, lark or llguidance; @FILE as VALUE reads a file."),
    "response_format": (str, "json_object, or a JSON schema; @FILE reads a file."),
    "ignore_eos": (bool, "Continue after the model's end-of-sequence token."),
    "min_tokens": (int, "Minimum number of tokens to generate."),
    "stop_token_ids": (list[int], "Id of a token that ends the output. May be repeated."),
    "allowed_token_ids": (list[int], "Id of a token that may be generated, and no others. May be repeated."),
    "bad_words": (list[str], "Text that is not generated. May be repeated."),
    "skip_special_tokens": (bool, "Leave special tokens out of the text."),
    "spaces_between_special_tokens": (bool, "Put a space between two special tokens in a row."),
    "truncate_sequence": (bool, "Truncate a prompt that is too long, at its beginning."),
}


def settings_options(names: Iterable[str] = tuple(config.FIELDS)) -> list[inspect.Parameter]:
    """Return an option for each setting. Defaults and variables are shown here and applied by `config.load`."""
    options = []
    for name in names:
        kind, default = config.setting_type(name), config.FIELDS[name].default
        text = f"{config.describe(name)}  [env var: {config.variable(name)}"
        text += f"; default: {default}]" if default not in ((), "") else "]"
        metavar = "|".join(get_args(kind)) if get_origin(kind) is Literal else None
        # Values are passed on as text: `config.load` checks them, with error messages of one line.
        kind = bool if kind is bool else list[str] if get_origin(kind) is tuple else str
        options.append(_option(name, kind, text, metavar=metavar or _METAVARS.get(config.setting_type(name), "TEXT")))
    return options


def sampling_options(exclude: Iterable[str] = ()) -> list[inspect.Parameter]:
    on = ("skip_special_tokens",)  # by default, so that there has to be an option to switch it off
    return [
        _option(name, kind, text, metavar=_METAVARS.get(kind, "TEXT"), switch=kind is bool and name not in on)
        for name, (kind, text) in SAMPLING.items()
        if name not in exclude
    ]


def _option(name: str, kind: Any, help: str, *, metavar: str | None, switch: bool = False) -> inspect.Parameter:
    flag = "--" + name.replace("_", "-")
    if kind is bool and not switch:
        flag = f"{flag}/--no-{flag[2:]}"
    metavar = None if kind is bool else metavar
    info = typer.Option(flag, help=help, metavar=metavar, show_default=False)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )


def with_options(*options: inspect.Parameter) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add options to a command, which receives their values in its `**` argument."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(command, eval_str=True)
        retained = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        command.__signature__ = own.replace(parameters=[*retained, *options])  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in [*retained, *options]}
        return command

    return decorate


def split_options(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the given options, separated into settings and sampling parameters."""
    present = {name: value for name, value in given.items() if value is not None and value != []}
    settings = {name: value for name, value in present.items() if name in config.FIELDS}
    return settings, {name: value for name, value in present.items() if name in SAMPLING}


def load_config(flags: Mapping[str, Any], file: Path | None) -> Config:
    """Load the settings of a command that runs models; model defaults are checked by the rules of the API."""
    return config.load(flags, file=file, read_defaults=_read_defaults)


def _read_defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
    if not fields:
        return {}
    from syringa.api.fields.defaults import read_defaults

    return read_defaults(fields)
