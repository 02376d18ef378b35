"""Ray's calls for nodes and actors, behind an interface that tests replace."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from syringa.fleet.bridge_protocol import LaunchReplica
from syringa.ray import internals
from syringa.ray.internals import RayNode

logger = logging.getLogger("syringa.bridge")

NAMESPACE = "syringa"
_PREFIX = "replica/"

Actor = Any  # a handle
Call = Any  # what an actor is asked, and will answer


class ActorGone(Exception):
    """An actor has died, or cannot be started. The text says why."""


class CallFailed(Exception):
    """A call got no answer. The actor may live."""


class ClusterDriver(Protocol):
    """May block while Ray's head does not respond, except for `call` and `finished`."""

    def nodes(self) -> Sequence[RayNode]: ...

    def draining(self) -> Mapping[str, float]:
        """Return the deadlines of the nodes that are being drained (Unix time; 0: none), by their ids."""
        ...

    def drain(self, node_id: str, grace: float) -> None: ...

    def replicas(self, known: Collection[str] = ()) -> Mapping[tuple[str, str], Actor]:
        """Return the replicas that run in the cluster but are not `known`, by their id and the key of their model."""
        ...

    def start_replica(self, launch: LaunchReplica, node: RayNode) -> Actor: ...

    def start_agent(self, node: RayNode) -> Actor: ...

    def call(self, actor: Actor, method: str, *arguments: object) -> Call: ...

    def finished(self, calls: Sequence[Call]) -> Sequence[Call]: ...

    def result(self, call: Call) -> bytes:
        """Return the answer to a call that has finished. Raises `ActorGone` and `CallFailed`."""
        ...

    def kill(self, actor: Actor) -> None: ...


class RayDriver:
    """The driver of a process that is connected to Ray."""

    def __init__(self, address: str) -> None:
        """`address`: of Ray's head, HOST:PORT."""
        import ray

        from syringa.ray.actors import NodeAgent, ReplicaActor

        self._ray = ray
        self._address = address
        self._replica_class: Any = ray.remote(ReplicaActor)
        self._agent_class: Any = ray.remote(NodeAgent)
        self._own_node = ray.get_runtime_context().get_node_id()

    def nodes(self) -> Sequence[RayNode]:
        """Return all nodes. Raises `HeadUnavailable` if that of this process has died: nothing can be started then."""
        found = internals.nodes()
        if any(node.id == self._own_node and not node.alive for node in found):
            raise internals.HeadUnavailable("Ray's head was started again")
        return found

    def draining(self) -> Mapping[str, float]:
        return internals.draining_nodes()

    def drain(self, node_id: str, grace: float) -> None:
        client = internals.HeadClient(self._address)
        client.drain(node_id, "syringa nodes drain", time.time() + grace)

    def replicas(self, known: Collection[str] = ()) -> dict[tuple[str, str], Actor]:
        found = {}
        for name in self._ray.util.list_named_actors():
            if name.startswith(_PREFIX):
                id, _, model = name.removeprefix(_PREFIX).partition("/")
                if id in known:
                    continue
                try:
                    found[id, model] = self._ray.get_actor(name, namespace=NAMESPACE)
                except ValueError:  # it has just died
                    logger.info("replica has gone: replica=%s", id)
        return found

    def start_replica(self, launch: LaunchReplica, node: RayNode) -> Actor:
        options = self._replica_class.options(
            name=f"{_PREFIX}{launch.id}/{launch.model}",
            namespace=NAMESPACE,
            lifetime="detached",  # it outlives this process, and a restarted server takes it over
            num_cpus=launch.cpus,
            num_gpus=launch.gpus,
            scheduling_strategy=self._on(node),
        )
        return options.remote(msgspec.msgpack.encode(launch), node.address)

    def start_agent(self, node: RayNode) -> Actor:
        options = self._agent_class.options(num_cpus=0, scheduling_strategy=self._on(node))
        return options.remote(int(node.resources.get("GPU", 0)))

    def call(self, actor: Actor, method: str, *arguments: object) -> Call:
        return getattr(actor, method).remote(*arguments)

    def finished(self, calls: Sequence[Call]) -> Sequence[Call]:
        if not calls:
            return ()
        ready, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=0, fetch_local=False)
        return list(ready)

    def result(self, call: Call) -> bytes:
        exceptions = self._ray.exceptions
        try:
            answer = self._ray.get(call, timeout=internals.CONNECT_SECONDS)
        except exceptions.ActorUnavailableError as error:
            raise CallFailed(internals.first_line(error)) from None
        except exceptions.RayTaskError as error:
            logger.exception("an actor has failed to answer")
            raise CallFailed(internals.first_line(error)) from None
        except (
            exceptions.RayActorError,
            exceptions.ActorUnschedulableError,
            exceptions.RuntimeEnvSetupError,
        ) as error:
            raise ActorGone(internals.first_line(error)) from None
        except exceptions.RayError as error:  # of this process, of the head or of the network: the actor may live
            raise CallFailed(internals.first_line(error)) from None
        return bytes(answer or b"")

    def kill(self, actor: Actor) -> None:
        try:
            self._ray.kill(actor, no_restart=True)
        except self._ray.exceptions.RayError as error:
            logger.warning("an actor cannot be killed: reason=%s", internals.first_line(error))

    def _on(self, node: RayNode) -> Any:
        return self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node.id, soft=False)
