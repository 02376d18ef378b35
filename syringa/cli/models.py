"""`syringa models`, `syringa pull` and `syringa remove`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from syringa import modelfiles
from syringa.cli.download_progress import Checking, open_progress
from syringa.cli.options import load_config
from syringa.config import FILE_NAME, Config, ModelSpec, single_model_spec, top_level_spec
from syringa.errors import ModelError, StartupError
from syringa.modelfiles import catalog
from syringa.modelfiles.remove import remove as remove_files
from syringa.modelfiles.variants import HubName

_NUMBERS = {"size", "parameters", "download", "memory", "context"}


def list_models() -> None:
    """Print the models on this machine, and those of the settings file."""
    table = _table("model", "kind", "architecture", "size", "where")
    for known in modelfiles.known_models():
        if known.present:
            path = known.path or ""
            cells = known.name, _kind(known.name, path), known.architecture or "", decimal(known.size), path
            table.add_row(*map(escape, cells))
        else:
            where = f"{known.path} is incomplete" if known.path else f"not downloaded: syringa pull {known.name}"
            table.add_row(escape(known.name), "", "", "", f"[dim]{escape(where)}[/dim]")
    # As wide as necessary: a path that is broken into lines cannot be copied.
    console = Console(width=400)
    console.print(table, soft_wrap=True)
    if specs := load_config({}, None).models:
        console.print(f"\n[bold]In {FILE_NAME}[/]")
        console.print(_configured(specs), soft_wrap=True)


def list_available() -> None:
    """Print the models of the catalog, with what they need, and which of them fit on this machine, or on its GPU."""
    from syringa.engine.processes.startup_plan import catalog_needs

    try:
        config = load_config({}, None)
    except StartupError:  # settings that only a server needs, such as a file that is not here yet
        config = Config()
    needs = catalog_needs(config)
    table = _table("name", "kind", "parameters", "download", "memory", "fits", "context", "license", "source")
    for model in catalog.CATALOG:
        source = str(model.source) if isinstance(model.source, HubName) else "package index"
        table.add_row(
            model.name,
            model.kind,
            model.parameters,
            decimal(model.download_bytes),
            decimal(needs.models[model.name].memory),
            "yes" if needs.models[model.name].fits else "no",
            f"{model.context:,}",
            model.license,
            source,
        )
    console = Console(width=400, highlight=False)
    console.print(table, soft_wrap=True)
    where = "on the GPU" if needs.device == "cuda" else "here"
    console.print(
        f"\nMemory: weights, and a cache of {catalog.CONTEXT_SHOWN:,} tokens; {decimal(needs.free)} are free {where}. "
        "`syringa pull NAME` downloads a model, `syringa serve --model NAME` serves it.",
        soft_wrap=True,
    )


def _kind(name: str, path: str) -> str:
    """Return what a model does: generate text, embed it, or score pairs of texts."""
    if not Path(path).is_dir():
        return "generate"
    try:
        return modelfiles.model_kind(modelfiles.ModelFiles(name, path, "folder"))
    except ModelError:  # a folder that is not supported
        return ""


def _configured(specs: Sequence[ModelSpec]) -> Table:
    table = _table("id", "aliases", "model")
    for spec in specs:
        table.add_row(*(escape(cell) for cell in (spec.id, ", ".join(spec.aliases), spec.path)))
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in titles:
        table.add_column(title, no_wrap=True, justify="right" if title in _NUMBERS else "left")
    return table


def ensure_model(settings: Mapping[str, Any], file: Path | None) -> None:
    """Download the model of a command unless it is on this machine. Raise `StartupError` if it cannot run here."""
    config = load_config(settings, file)
    spec = single_model_spec(config)
    try:
        modelfiles.locate(spec.path)
    except ModelError:
        if not modelfiles.can_pull(spec.path):
            raise
        if (obstacle := _find_obstacle(spec, config)) is not None:
            raise obstacle from None
        download(spec.path)


def pull(model: str, *, offline: bool) -> None:
    """Download a model, and print a warning if it cannot run here: it may be for another machine."""
    note = ""
    if not offline and modelfiles.can_pull(model) and not _is_here(model):
        try:
            config = load_config({"model": model}, None)
            obstacle = _find_obstacle(top_level_spec(config), config)
        except ModelError:
            raise
        except StartupError as error:  # settings that only a server needs, such as a file that is not here yet
            obstacle = error
        if obstacle is not None:
            print(f"syringa: warning: {obstacle.message}", file=sys.stderr)
            note = " (see the warning above)"
    download(model, offline=offline, note=note)


def _find_obstacle(spec: ModelSpec, config: Config) -> StartupError | None:
    """Return why a model cannot run here, as far as the catalog or the Hub tells before its files are here.

    Raise `ModelError` if the Hub does not have it, or cannot be reached.
    """
    from syringa.engine.processes.startup_plan import check_catalog_model, check_preview

    if (entry := modelfiles.catalog_entry(spec.path)) is not None:
        return _error_of(lambda: check_catalog_model(entry, spec, config))
    console = Console(stderr=True, highlight=False)
    checking = Checking(console, spec.path)
    with checking.show(), modelfiles.open_preview(spec.path, checking.wait) as preview:
        return _error_of(lambda: check_preview(preview, spec, config))


def _error_of(check: Callable[[], None]) -> StartupError | None:
    try:
        check()
    except StartupError as error:
        return error
    return None


def _is_here(model: str) -> bool:
    try:
        modelfiles.locate(model)
    except ModelError:
        return False
    return True


def download(model: str, *, offline: bool = False, note: str = "") -> None:
    """Download a model, show the progress, and print where it is and `note`.

    Raise `ModelError` at the end if its files cannot be read, or are of an architecture that does not run.
    """
    console = Console(stderr=True)
    with open_progress(console, model) as progress:
        files = modelfiles.pull(model, progress.update, offline=offline, on_wait=progress.wait)
    console.print(f"{files.name} is at {files.path}{note}", highlight=False, markup=False, soft_wrap=True)
    modelfiles.describe(files)


def remove(model: str) -> None:
    """Delete the files of a model that was pulled. Raise `ModelError` for others."""
    files = modelfiles.locate(model)
    remove_files(files)
    Console(stderr=True).print(f"Deleted {files.path}", highlight=False, markup=False, soft_wrap=True)
