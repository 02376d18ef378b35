"""The subcommands and their options. Each is implemented in a module beside this one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from syringa.cli import admin
from syringa.cli.options import (
    ENGINE_SETTINGS,
    ConfigFile,
    sampling_options,
    settings_options,
    split_options,
    with_options,
)

app = typer.Typer(
    name="syringa",
    help="An LLM inference server with OpenAI-compatible APIs, for laptops and GPU servers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="Use this running server instead of loading a model."),
]
Key = Annotated[
    str | None, typer.Option("--api-key", metavar="KEY", help="API key for --url.", envvar="SYRINGA_API_KEY")
]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as installed

        try:
            typer.echo(f"syringa {installed('syringa')}")
        except PackageNotFoundError:
            typer.echo("syringa (not installed)")
        raise typer.Exit


@app.command()
@with_options(*settings_options())
def serve(config: ConfigFile = None, **options: Any) -> None:
    """Start the server.

    Options take precedence over SYRINGA_* environment variables, and these over syringa.toml.
    """
    from syringa.cli.serve import run

    raise typer.Exit(run(options, config))


@app.command()
@with_options(*settings_options(ENGINE_SETTINGS), *sampling_options())
def complete(
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="The text to continue; default: standard input.")
    ] = None,
    config: ConfigFile = None,
    url: Url = None,
    api_key: Key = None,
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt before its continuation.")] = False,
    **options: Any,
) -> None:
    """Continue a text in the terminal."""
    from syringa.cli.complete import run

    settings, fields = split_options(options)
    raise typer.Exit(run(text, settings, fields, config, url, api_key, echo=echo))


@app.command()
@with_options(*settings_options(ENGINE_SETTINGS), *sampling_options(exclude=("n", "truncate_sequence")))
def chat(
    config: ConfigFile = None,
    url: Url = None,
    api_key: Key = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system message.")] = None,
    **options: Any,
) -> None:
    """Chat with a model in the terminal."""
    from syringa.cli.chat import run

    settings, fields = split_options(options)
    raise typer.Exit(run(settings, fields, config, url, api_key, system))


@app.command()
def models() -> None:
    """List known models and the files of those on this machine."""
    from syringa.cli.models import list_models

    list_models()


@app.command()
def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="`default`, or a Hugging Face model id.")] = "default",
) -> None:
    """Download a model."""
    from syringa.cli.models import download

    download(model)


@app.command()
def bench(
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Measure this running server instead of starting one.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The model to serve, or to request from --url.")
    ] = None,
    api_key: Key = None,
    streams: Annotated[
        str, typer.Option(metavar="LIST", help="Numbers of concurrent streams, separated by commas.")
    ] = "1,4,16,64",
    repeats: Annotated[
        int, typer.Option(min=1, metavar="N", help="Runs per number of streams, for median and spread.")
    ] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="A short run to check that everything works.")] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the results to this file, as JSON.")
    ] = None,
) -> None:
    """Measure tokens per second and time to first token over HTTP."""
    from syringa.bench.runner import run_syringa_bench
    from syringa.errors import ConfigError

    try:
        counts = tuple(int(each) for each in streams.split(","))
    except ValueError:
        raise ConfigError(f"--streams {streams!r}: expected whole numbers separated by commas") from None
    run_syringa_bench(
        url=url, model=model, api_key=api_key, streams=counts, repeats=repeats, quick=quick, output=output
    )


app.add_typer(admin.keys, name="keys")
app.add_typer(admin.organizations, name="organizations")
app.command()(admin.usage)
