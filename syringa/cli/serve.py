"""`syringa serve`: read the settings, take the port, and hand over to the supervisor."""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from syringa import config as settings
from syringa.cli.reading import read_settings
from syringa.config import Config, ModelSpec
from syringa.errors import ConfigError, StartupError, StoreError
from syringa.types import ModelInfo

if TYPE_CHECKING:
    from syringa.engine.processes.supervisor import Shared

DTYPES = {"int8": "int8 weights", "bf16": "bf16 weights", "fp32": "fp32 weights"}


def run(flags: Mapping[str, Any], file: Path | None) -> int:
    """Blocks until the server ends; the result is the exit status."""
    config = read_settings(flags, file)

    from syringa.api.models.loading import serving_specs
    from syringa.http.server.server import check, listen

    # What can be wrong is found before anything slow starts.
    specs = serving_specs(config)
    check_files(specs)
    check(config)
    check_keys(config)
    with listen(config) as listener:
        from syringa.engine.processes import supervisor

        port = listener.getsockname()[1]
        console = Console(highlight=False, soft_wrap=True)
        started = time.monotonic()
        if specs[0].preload:
            console.print(f"Loading [bold]{escape(specs[0].id)}[/] …")

        def greet(info: ModelInfo | None) -> None:
            console.print(banner(config, port, specs, info, time.monotonic() - started))

        return supervisor.run(config, specs[0], listener, greet, functools.partial(share, config))


def check_files(specs: Sequence[ModelSpec]) -> None:
    """Without its default model a server does not start; of the others, people are told."""
    from syringa import modelfiles

    modelfiles.describe(modelfiles.locate(specs[0].path))
    for spec in specs[1:]:
        try:
            modelfiles.locate(spec.path)
        except StartupError as error:
            print(f"syringa: model {spec.id}: {error.message} (requests for it get 503)", file=sys.stderr)


def check_keys(config: Config) -> None:
    """Whoever can reach a server beyond this machine needs a key, so there has to be one."""
    if config.api_key or settings.is_loopback(config.host):
        return
    from syringa.service.auth.key_cache import usable
    from syringa.store import Store

    async def has_key() -> bool:
        async with Store(config.database) as store:
            try:
                return await usable(store)
            except StoreError as error:
                raise StartupError(f"{store.location.shown}: keys cannot be read: {error.message}") from None

    if not asyncio.run(has_key()):
        raise ConfigError(
            f"listening on {config.host} lets others in, and there is no key yet: make one with "
            "`syringa keys create ORGANISATION`, set one with --api-key or SYRINGA_API_KEY, or listen on 127.0.0.1",
            param="host",
        )


def share(config: Config, folder: str) -> Shared:
    """What API processes share: limits, which one that dies and comes back must still know; and metrics."""
    from syringa.engine.processes.supervisor import Shared
    from syringa.service.limits.rate_limiter import Limiter

    limits, metrics = Path(folder) / "limits", Path(folder) / "metrics"
    Limiter.create(str(limits))
    metrics.mkdir()
    return Shared(limits=str(limits), metrics=str(metrics) if config.workers > 1 else None)


def banner(config: Config, port: int, specs: Sequence[ModelSpec], info: ModelInfo | None, seconds: float) -> str:
    """What a person sees once the server answers: where it is, what it runs, and a line to try it with."""
    host = config.host.strip("[]")
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    url = f"http://{host}:{port}"
    key = "" if settings.is_loopback(config.host) and not config.api_key else " -H 'Authorization: Bearer YOUR_KEY'"
    facts = "loaded on first use"
    if info is not None:
        dtype = DTYPES.get(info.dtype, info.dtype)
        size = f"{info.parameters / 1e6:,.1f} M parameters"
        facts = f"{size}, {dtype}, {info.threads} threads, context {info.max_model_len:,}"
    others = ", ".join(spec.id for spec in specs[1:])
    body = '{"prompt": "The capital of France is", "max_tokens": 32, "temperature": 0}'
    return (
        f"[bold green]Syringa is ready[/] after {seconds:.1f} s\n"
        f"  URL     [bold]{url}/v1[/]\n"
        f"  Model   [bold]{escape(specs[0].id)}[/] ({facts})\n"
        + (f"  Others  {escape(others)}\n" if others else "")
        + f"  Try     curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{escape(body)}'\n"
        "Stop with Ctrl-C."
    )
