"""`syringa serve`: read the settings, take the port, and hand over to the supervisor."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from syringa import config as settings
from syringa.config import Config
from syringa.types import ModelInfo

DTYPES = {"int8": "int8 weights", "bf16": "bf16 weights", "fp32": "fp32 weights"}


def run(flags: Mapping[str, Any], file: Path | None) -> int:
    """Blocks until the server ends; the result is the exit status."""
    config = settings.load(flags, file=file)

    from syringa import modelfiles
    from syringa.http.server import check, listen

    # What can be wrong is found before anything slow starts.
    name = modelfiles.describe(modelfiles.locate(config.model)).name
    check(config)
    with listen(config) as listener:
        from syringa.engine import supervisor

        port = listener.getsockname()[1]
        console = Console(highlight=False, soft_wrap=True)
        started = time.monotonic()
        console.print(f"Loading [bold]{escape(name)}[/] …")

        def greet(info: ModelInfo) -> None:
            console.print(banner(config, port, name, info, time.monotonic() - started))

        return supervisor.run(config, listener, greet)


def banner(config: Config, port: int, name: str, info: ModelInfo, seconds: float) -> str:
    """What a person sees once the server answers: where it is, what it runs, and a line to try it with."""
    host = config.host.strip("[]")
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    url = f"http://{host}:{port}"
    served = (config.served_model_name or (name,))[0]
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.api_key else ""
    facts = f"{info.parameters / 1e6:,.1f} M parameters, {DTYPES.get(info.dtype, info.dtype)}, {info.threads} threads"
    body = '{"prompt": "The capital of France is", "max_tokens": 32, "temperature": 0}'
    return (
        f"[bold green]Syringa is ready[/] after {seconds:.1f} s\n"
        f"  URL     [bold]{url}/v1[/]\n"
        f"  Model   [bold]{escape(served)}[/] ({facts}, context {info.max_model_len:,})\n"
        f"  Try     curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{escape(body)}'\n"
        "Stop with Ctrl-C."
    )
