"""A bridge without a cluster, run as `python -m tests.engine.processes.stub_bridge`.

It reports no nodes until the supervisor's socket is closed. With the address "broken" it cannot start.
"""

from __future__ import annotations

import signal
import socket
import sys

from syringa.engine.client import protocol
from syringa.engine.processes import managed_process
from syringa.fleet.bridge_protocol import BridgeOptions, FleetReport


def main() -> None:
    options = managed_process.attach_to_parent(BridgeOptions)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if options.cluster_dir == "broken":
        print("syringa: Ray is not installed", file=sys.stderr)
        sys.exit(managed_process.EXIT_CANNOT_START)
    with socket.socket(socket.AF_UNIX) as supervisor:
        supervisor.connect(options.socket)
        supervisor.sendall(protocol.frame(FleetReport()))
        while supervisor.recv(1 << 16):
            pass


if __name__ == "__main__":
    main()
