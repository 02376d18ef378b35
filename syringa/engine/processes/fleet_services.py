"""The processes that a server has on a cluster, besides its API servers: the bridge and the cluster's own server."""

from __future__ import annotations

from syringa.config import Config
from syringa.engine.processes import managed_process
from syringa.engine.processes.cluster_server import CLUSTER_SERVER_MODULE, ClusterServerOptions
from syringa.engine.processes.managed_process import ManagedProcess
from syringa.fleet.bridge_protocol import BridgeOptions

BRIDGE_MODULE = "syringa.ray.bridge"


def cluster_services(config: Config, bridge_socket: str, models_file: str) -> list[ManagedProcess]:
    """Return the processes, which are started by their first poll.

    `bridge_socket`: that of the bridge provider; `models_file`: names the models whose files nodes may fetch. Without
    `cluster_address` there is no server for nodes.
    """
    bridge = BridgeOptions(
        socket=bridge_socket,
        cluster_dir=config.cluster_dir,
        address=config.cluster_address,
        ray_port=config.ray_port,
        log_level=config.log_level,
        log_format=config.log_format,
    )
    services = [ManagedProcess("bridge", lambda: managed_process.spawn(BRIDGE_MODULE, bridge))]
    if config.cluster_address:
        server = ClusterServerOptions(
            address=config.cluster_address,
            cluster_dir=config.cluster_dir,
            models_file=models_file,
            ray_port=config.ray_port,
            hub=config.cluster_hub,
            log_level=config.log_level,
            log_format=config.log_format,
        )
        services.append(ManagedProcess("cluster server", lambda: managed_process.spawn(CLUSTER_SERVER_MODULE, server)))
    return services
