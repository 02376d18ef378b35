"""A Ray cluster on this machine, in a process of its own: Ray reads its environment once, when it is imported.

Reads commands from standard input, a JSON object per line, and answers each with a line.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    from ray.cluster_utils import Cluster

    from syringa.ray.processes import HEAD_LABEL, OBJECT_STORE_BYTES

    address, port = sys.argv[1], int(sys.argv[2])
    common: dict[str, Any] = {
        "node_ip_address": address,
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_log_monitor": False,
        "num_gpus": 0,
    }
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            **common,
            "gcs_server_port": port,
            "num_cpus": 0,
            "include_dashboard": False,
            "no_monitor": True,
            "labels": {HEAD_LABEL: "true"},
        },
    )
    nodes = {}
    print(json.dumps({"address": cluster.address}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        name = command.get("node", "")
        answer: object = None
        match command["do"]:
            case "add":
                nodes[name] = cluster.add_node(
                    node_name=name, num_cpus=command["cpus"], labels=command["labels"], **common
                )
                answer = {"id": nodes[name].node_id, "raylet": nodes[name].all_processes["raylet"][0].process.pid}
            case "remove":
                cluster.remove_node(nodes.pop(name), allow_graceful=False)
            case "gcs":
                answer = cluster.head_node.all_processes["gcs_server"][0].process.pid
            case "restart gcs":
                cluster.head_node.kill_gcs_server()
                cluster.head_node.start_gcs_server()
        print(json.dumps(answer), flush=True)
    cluster.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
