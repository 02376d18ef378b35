"""What is relied on of Ray and is not public."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from syringa.ray import internals, processes
from syringa.ray.internals import ConnectionRefused, HeadUnavailable, check_head
from tests.ray.harness import LocalCluster, cluster_folder

pytestmark = pytest.mark.slow


def test_nodes_are_listed_and_drained_as_expected(cluster: LocalCluster) -> None:
    cluster.add("a", cpus=3, labels={"pool": "x"})
    result = subprocess.run(
        [sys.executable, "-m", "tests.ray.contract", cluster.address],
        env={**os.environ, **cluster.variables},
        stdout=subprocess.PIPE,
        timeout=300,
        check=True,
    )
    found = json.loads(result.stdout.splitlines()[-1])
    assert found == {
        "drain reason": True,
        "label names": [],
        "same view": True,
        "labels": {"pool": "x"},
        "cpus": 3,
        "draining before": {},
        "observation": True,
        "draining id": True,
        "draining deadline": True,
        "alive while it is occupied": True,
        "drained": [True, True],
    }


def test_the_programs_by_which_a_head_and_a_node_are_watched_have_their_names(cluster: LocalCluster) -> None:
    cluster.add("watched")
    assert processes._runs(cluster.raylets["watched"], processes.RAYLET)
    assert processes._runs(cluster.gcs(), processes.GCS)


def test_a_head_that_cannot_be_used_is_described(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token is tried in tests/ray/test_security.py."""
    monkeypatch.setattr(internals, "CONNECT_SECONDS", 120.0)  # a busy machine
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(HeadUnavailable, match=rf"{address} cannot be reached: Connection refused"):
            check_head(address, cluster.folder.ray_files())
    foreign = cluster_folder(tmp_path / "foreign")
    with pytest.raises(ConnectionRefused, match="cannot be trusted: its certificate is not from the authority"):
        check_head(cluster.address, foreign.ray_files())
