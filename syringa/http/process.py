"""The process that answers HTTP: `python -m syringa.http.process`, started by the supervisor."""

from __future__ import annotations

import logging
import signal
import socket
import sys

import uvloop

from syringa.engine import child
from syringa.engine.client import WorkerClient
from syringa.engine.supervisor import ApiOptions
from syringa.errors import StartupError
from syringa.http.server import serve_api


async def answer(options: ApiOptions) -> None:
    client = WorkerClient(options.worker_socket)
    client.start()
    try:
        await serve_api(options.config, client, socket.socket(fileno=options.listener))
    finally:
        await client.close()


def main() -> None:
    options = child.begin(ApiOptions)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every child; the supervisor decides what ends when
    logging.basicConfig(
        level=options.config.log_level.upper(), format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    try:
        uvloop.run(answer(options))
    except StartupError as error:
        print(f"syringa: {error.message}", file=sys.stderr)
        sys.exit(child.CANNOT_START)


if __name__ == "__main__":
    main()
