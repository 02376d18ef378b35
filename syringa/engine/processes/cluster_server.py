"""The process of the cluster's server, which the supervisor starts as `python -m` with the name of this module."""

from __future__ import annotations

import logging
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Literal

import msgspec

from syringa import logs
from syringa.engine.processes import managed_process
from syringa.errors import StartupError

logger = logging.getLogger("syringa.cluster")

CLUSTER_SERVER_MODULE = "syringa.engine.processes.cluster_server"
OPEN_FILES = 4096


class ClusterServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the cluster's server."""

    address: str  # HOST:PORT, at which it listens
    cluster_dir: str
    models_file: str  # written by `served_models.publish`
    ray_port: int = 0  # of Ray's head, which nodes are told; 0: without Ray
    hub: bool = False  # whether nodes may fetch files from the Hugging Face Hub
    log_level: str = "info"
    log_format: Literal["text", "json"] = "text"


def _raise_file_limit() -> None:
    """Allow as many open files as connections may need: each has a socket, and perhaps a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> None:
    # The supervisor, which imports this module for the options, does not need them.
    from syringa.cluster.checksums import Checksums
    from syringa.cluster.join import parse_server_address
    from syringa.cluster.served_models import ServedModels
    from syringa.cluster.server import POLL_SECONDS, ClusterServer

    options = managed_process.attach_to_parent(ClusterServerOptions)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the supervisor stops them in order
    logs.configure(options.log_level, options.log_format)
    _raise_file_limit()
    folder = Path(options.cluster_dir)
    try:
        models = ServedModels(Path(options.models_file), Checksums(folder / "checksums.json"), hub=options.hub)
        server = ClusterServer(
            parse_server_address(options.address, listening=True), folder, models, ray_port=options.ray_port
        )
    except StartupError as error:
        print(f"syringa: {error.message}", file=sys.stderr)
        sys.exit(managed_process.EXIT_CANNOT_START)
    # `shutdown` waits for the loop that the signal interrupts, so it runs in another thread.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown, daemon=True).start())
    logger.info("cluster: listening: address=%s", server.address)
    with server:
        server.serve_forever(POLL_SECONDS)


if __name__ == "__main__":
    main()
