"""The subcommands and their options. What they do lies in the modules beside this one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from syringa.cli import accounts
from syringa.cli.accounts import ConfigFile
from syringa.cli.options import ENGINE_SETTINGS, sampling_options, settings_options, split, takes

app = typer.Typer(
    name="syringa",
    help="An LLM inference server: the OpenAI APIs on an engine that starts on a laptop.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="Use this running server instead of loading the model here."),
]
Key = Annotated[str | None, typer.Option("--api-key", metavar="KEY", help="Key for --url.", envvar="SYRINGA_API_KEY")]


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
@takes(*settings_options())
def serve(config: ConfigFile = None, **given: Any) -> None:
    """Start the server."""
    from syringa.cli.serve import run

    raise typer.Exit(run(given, config))


@app.command()
@takes(*settings_options(ENGINE_SETTINGS), *sampling_options())
def complete(
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="The text to continue; without it, standard input.")
    ] = None,
    config: ConfigFile = None,
    url: Url = None,
    api_key: Key = None,
    echo: Annotated[bool, typer.Option("--echo", help="Show the prompt too.")] = False,
    **given: Any,
) -> None:
    """Continue a text, in the terminal."""
    from syringa.cli.complete import run

    settings, fields = split(given)
    raise typer.Exit(run(text, settings, fields, config, url, api_key, echo=echo))


@app.command()
@takes(*settings_options(ENGINE_SETTINGS), *sampling_options(leave_out=("n", "truncate_sequence")))
def chat(
    config: ConfigFile = None,
    url: Url = None,
    api_key: Key = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="Instructions to begin with.")] = None,
    **given: Any,
) -> None:
    """Talk with the model."""
    from syringa.cli.chat import run

    settings, fields = split(given)
    raise typer.Exit(run(settings, fields, config, url, api_key, system))


@app.command()
def models() -> None:
    """List the models that are known, and where they lie."""
    from syringa.cli.models import show

    show()


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="The default model, or a Hugging Face id.")] = "default",
) -> None:
    """Fetch a model."""
    from syringa.cli.models import fetch

    fetch(model)


@app.command()
def bench(
    url: Annotated[str | None, typer.Option(help="Measure this running server instead of starting one.")] = None,
    model: Annotated[str | None, typer.Option(help="The model to start the server with, or to ask for.")] = None,
    api_key: Key = None,
    streams: Annotated[str, typer.Option(help="Numbers of parallel streams.")] = "1,4,16,64",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, for median and spread.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="A short run, to see that it works.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the figures there, as JSON.")] = None,
) -> None:
    """Measure tokens per second and time to first token over HTTP."""
    from syringa.bench.runner import run_syringa_bench
    from syringa.errors import ConfigError

    try:
        counts = tuple(int(each) for each in streams.split(","))
    except ValueError:
        raise ConfigError(f"--streams {streams!r}: expected whole numbers with commas between them") from None
    run_syringa_bench(
        url=url, model=model, api_key=api_key, streams=counts, repeats=repeats, quick=quick, output=output
    )


app.add_typer(accounts.keys, name="keys")
app.add_typer(accounts.organisations, name="organisations")
app.command()(accounts.usage)
