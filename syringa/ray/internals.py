"""The parts of Ray that are not public. Nothing else uses them; tests/ray/test_internals.py pins how they behave."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from syringa.cluster.tls import TlsFiles, describe_tls_error

CONNECT_SECONDS = 5.0

# `DrainNodeReason` of Ray's autoscaler.proto: the node goes, whatever runs on it.
_DRAIN_PREEMPTION = 2
_RAY_LABELS = "ray.io/"


@dataclass(frozen=True)
class RayNode:
    """A node in Ray's table, which keeps those that have died."""

    id: str
    name: str
    address: str
    alive: bool
    drained: bool = False  # of one that has died: it was drained, or asked to end
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)


class HeadUnavailable(Exception):
    """Ray's head cannot be reached, or refuses this process. The text says why, for an operator."""


class ConnectionRefused(HeadUnavailable):
    """The head has refused this process; another attempt will have the same end."""


def check_head(address: str, files: TlsFiles) -> None:
    """Raise `HeadUnavailable` unless Ray's head is at an address (HOST:PORT) and accepts certificate and token.

    Ray itself retries for most of a minute and does not say why. Its environment must have been set.
    """
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(files.ca)
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2"])  # gRPC requires it
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host.strip("[]")) as connection,
        ):
            connection.settimeout(CONNECT_SECONDS)
    except ssl.SSLError as error:
        reason = f"Ray's head at {address} cannot be trusted: {describe_tls_error(error)}"
        raise ConnectionRefused(reason) from None
    except OSError as error:
        raise HeadUnavailable(f"Ray's head at {address} cannot be reached: {describe_tls_error(error)}") from None
    HeadClient(address)


class HeadClient:
    """A connection to Ray's head (GCS) without joining the cluster as a driver."""

    def __init__(self, address: str) -> None:
        """Raises `HeadUnavailable`."""
        from ray._raylet import GcsClient  # type: ignore[attr-defined]
        from ray.exceptions import AuthenticationError, RayError

        try:
            with _silenced_stderr():  # Ray's C++ code writes to it
                self._client = GcsClient(address=address)
        except AuthenticationError:
            raise ConnectionRefused(f"Ray's head at {address} refuses the token of this cluster (ray.token)") from None
        except RayError as error:
            raise HeadUnavailable(f"Ray's head at {address} cannot be reached: {error}") from None
        self._address = address

    def nodes(self) -> list[RayNode]:
        """Return the nodes that are alive and those that have died. Raises `HeadUnavailable`."""
        from ray.core.generated.gcs_pb2 import GcsNodeInfo
        from ray.exceptions import RayError

        try:
            found = self._client.get_all_node_info(timeout=CONNECT_SECONDS)
        except RayError as error:
            raise HeadUnavailable(f"Ray's head at {self._address} does not respond: {error}") from None
        alive = GcsNodeInfo.GcsNodeState.Value("ALIVE")
        return [
            RayNode(
                id=node.node_id.hex(),
                name=node.node_name,
                address=node.node_manager_address,
                alive=node.state == alive,
                drained=_is_expected(node.death_info.reason),
                labels=_own_labels(node.labels),
                resources=dict(node.resources_total),
            )
            for node in found.values()
        ]

    def drain(self, node_id: str, reason: str, deadline: float) -> None:
        """Mark a node as draining until `deadline` (Unix time): nothing is placed there any more. Nothing is killed.

        The node exits when nothing runs on it. This cannot be undone. Raises `HeadUnavailable`.
        """
        from ray.exceptions import RayError

        try:
            accepted, message = self._client.drain_node(
                node_id, _DRAIN_PREEMPTION, reason, int(deadline * 1000), timeout=CONNECT_SECONDS
            )
        except (RayError, ValueError) as error:
            raise HeadUnavailable(f"Ray's head at {self._address} does not respond: {error}") from None
        if not accepted:
            raise HeadUnavailable(f"Ray does not drain the node: {message}")


def connect(address: str, namespace: str) -> None:
    """Connect this process to the cluster as a driver. Raises `HeadUnavailable`."""
    import ray
    from ray.exceptions import RayError

    try:
        with _silenced_stderr():
            ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
    except (RayError, OSError, RuntimeError, ValueError) as error:
        raise HeadUnavailable(f"the cluster at {address} cannot be joined: {first_line(error)}") from None


def nodes() -> list[RayNode]:
    """Return the nodes of the cluster that this driver is connected to, with those that have died."""
    import ray

    return [
        RayNode(
            id=node["NodeID"],
            name=node["NodeName"],
            address=node["NodeManagerAddress"],
            alive=bool(node["Alive"]),
            drained=_is_expected(node["DeathReason"]),
            labels=_own_labels(node["Labels"]),
            resources=node["Resources"],
        )
        for node in ray.nodes()
    ]


def draining_nodes() -> dict[str, float]:
    """Return the deadlines (Unix time; 0: none) of the nodes that are being drained, by their ids."""
    from ray._private.state import state

    return {node: deadline / 1000 for node, deadline in state.get_draining_nodes().items()}


def run_command(arguments: list[str]) -> None:
    """Run the command `ray` in this process until it exits, as if Ray were installed without its extras.

    With them, a head would have a port for Ray Client, and each node one for jobs and one that shows its metrics to
    everything that connects. There are no options against these.
    """
    import sys

    from ray._private import utils
    from ray.scripts import scripts

    def missing() -> ImportError:
        return ImportError("a cluster uses no extras of Ray")

    utils.get_dashboard_dependency_error = missing
    scripts.get_ray_client_dependency_error = missing
    sys.argv = ["ray", *arguments]
    scripts.main()


def _own_labels(labels: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in labels.items() if not name.startswith(_RAY_LABELS)}


def _is_expected(reason: Any) -> bool:
    from ray.core.generated.common_pb2 import NodeDeathInfo

    return reason in (
        NodeDeathInfo.Reason.Value("EXPECTED_TERMINATION"),
        NodeDeathInfo.Reason.Value("AUTOSCALER_DRAIN_PREEMPTED"),
        NodeDeathInfo.Reason.Value("AUTOSCALER_DRAIN_IDLE"),
    )


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


@contextlib.contextmanager
def _silenced_stderr() -> Iterator[None]:
    """Discard what C++ code writes to standard error."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
