"""`syringa serve`: load the settings, bind the port, and run the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.markup import escape

from syringa import config as settings
from syringa.cli.database_records import cluster_records
from syringa.cli.options import load_config
from syringa.config import Config, ModelSpec
from syringa.errors import ConfigError, StartupError, StoreError
from syringa.types import ModelInfo

if TYPE_CHECKING:
    from syringa.engine.processes.supervisor import SharedPaths

DTYPES = {"int8": "int8 weights", "gguf": "GGUF blocks", "bf16": "bf16 weights", "fp32": "fp32 weights"}


def run(flags: Mapping[str, Any], file: Path | None) -> int:
    """Run the server until it ends. Return the exit status."""
    config = load_config(flags, file)

    from syringa.api.models.specs import serving_specs
    from syringa.cli.startup import print_plan
    from syringa.engine.processes.startup_plan import plan_model
    from syringa.http.server.listener import check, listen, listen_for_ollama

    # Report configuration errors before anything slow starts.
    check(config)
    check_keys(config)
    config = check_certificates(config)
    download_default_models(config)
    specs = serving_specs(config)
    check_files(specs)
    local = specs[0].preload and not config.cluster  # the nodes of a cluster find out whether the model fits
    plan = plan_model(specs[0], config, specs[0].replicas.max) if local else None
    with listen(config) as listener, listen_for_ollama(config) or contextlib.nullcontext() as ollama:
        from syringa.engine.processes import supervisor

        port = listener.getsockname()[1]
        console = Console(highlight=False, soft_wrap=True)
        started = time.monotonic()
        if local:
            console.print(f"Loading [bold]{escape(specs[0].id)}[/] …")
        if plan is not None:
            print_plan(console, plan)

        def print_banner(info: ModelInfo | None) -> None:
            console.print(banner(config, port, specs, info, time.monotonic() - started))

        planned_free = plan.free if plan is not None and plan.device == "cpu" else 0
        prepare = functools.partial(create_shared_files, config)
        records = cluster_records(config) if config.cluster else None
        return supervisor.run(
            config,
            specs[0],
            listener,
            print_banner,
            prepare,
            planned_free=planned_free,
            records=records,
            ollama=ollama,
        )


def download_default_models(config: Config) -> None:
    """Download the default models if they are served and missing, so that a first start needs no other step."""
    from syringa.modelfiles.locate import default_path, embedding_path, is_default, is_default_embedding

    first = settings.model_specs(config)[0].path
    missing = [first] if is_default(first) and default_path() is None else []
    embedding = next((path for path in (first, config.embedding_model) if is_default_embedding(path)), None)
    if embedding is not None and embedding_path() is None:
        missing.append(embedding)
    if missing:
        from syringa.cli.models import download

        for model in missing:
            download(model)


def check_files(specs: Sequence[ModelSpec]) -> None:
    """Check the model files: raise `StartupError` for the default model, print a warning for the others."""
    from syringa import modelfiles

    modelfiles.describe(modelfiles.locate(specs[0].path))
    for spec in specs[1:]:
        try:
            modelfiles.locate(spec.path)
        except StartupError as error:
            print(f"syringa: model {spec.id}: {error.message} (requests for this model get 503)", file=sys.stderr)


def check_keys(config: Config) -> None:
    """Raise `ConfigError` if other machines can reach the server and there is no API key."""
    if config.api_key or settings.is_loopback(config.host):
        return
    from syringa.service.auth.key_cache import has_valid_key
    from syringa.store import Store

    async def has_key() -> bool:
        async with Store(config.database) as store:
            try:
                return await has_valid_key(store)
            except StoreError as error:
                raise StartupError(f"{store.location.display}: API keys cannot be read: {error.message}") from None

    if not asyncio.run(has_key()):
        raise ConfigError(
            f"host {config.host!r}: other machines can reach it, and there is no API key yet: create one with "
            "`syringa keys create ORGANIZATION`, set one with --api-key or SYRINGA_API_KEY, or listen on 127.0.0.1",
            param="host",
        )


def check_certificates(config: Config) -> Config:
    """Return the settings with the folder of the certificates, if workers need any. Raises `ConfigError`."""
    if not config.worker_host and not config.cluster:
        return config
    from syringa.cli.cluster import cluster_folder

    folder = cluster_folder(Path(config.cluster_dir) if config.cluster_dir else None)
    folder.check()
    return msgspec.structs.replace(config, cluster_dir=str(folder.path))


def create_shared_files(config: Config, folder: str) -> SharedPaths:
    """Create what API processes share in `folder`: rate limits, which survive a restarted process, and metrics."""
    from syringa.engine.processes.supervisor import SharedPaths
    from syringa.service.limits.rate_limiter import RateLimiter

    limits, metrics = Path(folder) / "limits", Path(folder) / "metrics"
    RateLimiter.create(str(limits))
    metrics.mkdir()
    return SharedPaths(limits=str(limits), metrics=str(metrics) if config.workers > 1 else None)


def banner(config: Config, port: int, specs: Sequence[ModelSpec], info: ModelInfo | None, seconds: float) -> str:
    """Return the text printed when the server is ready: URL, models and a command to try it."""
    host = config.host.strip("[]")
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    url = f"http://{host}:{port}"
    key = "" if settings.is_loopback(config.host) and not config.api_key else " -H 'Authorization: Bearer YOUR_KEY'"
    facts = "runs on the nodes of the cluster" if config.cluster else "loaded on first use"
    if info is not None:
        dtype = DTYPES.get(info.dtype, info.dtype)
        size = f"{info.parameters / 1e6:,.1f} M parameters"
        threads = f"{info.threads} threads, " if info.threads else ""
        facts = f"{size}, {dtype}, {threads}context {info.max_model_len:,}"
    others = ", ".join(spec.id for spec in specs[1:])
    path, body = "completions", '{"prompt": "The capital of France is", "max_tokens": 32, "temperature": 0}'
    if info is not None and info.kind == "embed":
        path, body = "embeddings", '{"input": "The capital of France is Paris."}'
    elif info is not None and info.kind == "score":
        path, body = "score", '{"text_1": "What is the capital of France?", "text_2": ["Paris", "Rome"]}'
    return (
        f"[bold green]Syringa is ready[/] after {seconds:.1f} s\n"
        f"  URL     [bold]{url}/v1[/]\n"
        f"  Model   [bold]{escape(specs[0].id)}[/] ({facts})\n"
        + (f"  Others  {escape(others)}\n" if others else "")
        + f"  Try     curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d '{escape(body)}'\n"
        "Stop with Ctrl-C."
    )
