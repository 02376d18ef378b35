"""Uses the private parts of Ray on a cluster with one node, and prints what they do, as JSON."""

from __future__ import annotations

import json
import sys
import time

NAMES = ("a", "A-b_c.9", "9", "-a", "a-", ".", "", "a b", "a/b", "ä", "a" * 63, "a" * 64)


def main(address: str) -> None:
    from ray._private.label_utils import LABEL_REGEX
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    from syringa.cli.cluster_join import _NAME
    from syringa.ray import internals
    from syringa.ray.driver import RayDriver

    internals.CONNECT_SECONDS = 120.0  # a busy machine
    client = internals.HeadClient(address)
    internals.connect(address, "contract")
    found: dict[str, object] = {
        "drain reason": DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION") == internals._DRAIN_PREEMPTION,
        "label names": [name for name in NAMES if bool(LABEL_REGEX.fullmatch(name)) != bool(_NAME.fullmatch(name))],
    }

    def node() -> tuple[internals.RayNode, internals.RayNode]:
        """Return the node as a client and as a driver see it."""
        both = [[each for each in nodes if each.name == "a"] for nodes in (client.nodes(), internals.nodes())]
        return both[0][0], both[1][0]

    found["same view"] = node()[0] == node()[1]
    found["labels"], found["cpus"] = node()[0].labels, node()[0].resources["CPU"]
    found["draining before"] = internals.draining_nodes()
    deadline = time.time() + 1000
    driver = RayDriver(address)
    agent = driver.start_agent(node()[0])
    call = driver.call(agent, "observe")
    while not driver.finished([call]):
        time.sleep(0.05)
    found["observation"] = bool(driver.result(call))
    client.drain(node()[0].id, "contract", deadline)
    while not (draining := internals.draining_nodes()):
        time.sleep(0.05)
    found["draining id"] = list(draining) == [node()[0].id]
    found["draining deadline"] = abs(draining[node()[0].id] - deadline) < 0.01
    found["alive while it is occupied"] = node()[0].alive
    driver.kill(agent)
    while node()[0].alive:
        time.sleep(0.05)
    found["drained"] = [each.drained for each in node()]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
