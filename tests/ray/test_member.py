"""The node of a machine, without Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from syringa.cluster.folder import ClusterFolder
from syringa.ray import member
from syringa.ray.internals import RayNode
from syringa.ray.member import LISTED_SECONDS, ClusterMember, MemberOptions
from tests.ray.fake_driver import Clock


class FakeProcess:
    """A process of Ray that has just ended."""

    running = False

    def failure(self) -> str:
        return "signal SIGKILL"

    def stop(self) -> None:
        pass


@pytest.mark.parametrize("noticed", [True, False])
def test_a_node_is_started_again_when_ray_has_noticed_its_end(
    noticed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, it would get another name, by which its failures are not known; after a while it is started anyway."""
    started: list[FakeProcess] = []

    def start(*_: object) -> FakeProcess:
        started.append(FakeProcess())
        return started[-1]

    monkeypatch.setattr(member, "RayProcess", start)
    monkeypatch.setattr(member, "environment", lambda _: {})
    clock = Clock()
    node = ClusterMember(MemberOptions(head="h:1", folder=ClusterFolder(tmp_path), name="n", address="10.0.0.8"), clock)
    alive = True
    monkeypatch.setattr(node, "_look", lambda: RayNode("1", "n", "10.0.0.8", alive, False, {}, {}))
    node._process = node._spawn()
    assert node.poll() == "waiting"  # it has ended
    clock.now += 10
    assert (node.poll(), len(started)) == ("waiting", 1)
    if noticed:
        alive = False
    else:
        clock.now += LISTED_SECONDS
    assert (node.poll(), len(started)) == ("waiting", 2)
