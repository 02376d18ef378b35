from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray.harness import BridgePeer, LocalCluster, bridge, local_cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A Ray cluster with a head, to which tests add nodes."""
    with local_cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def peer(cluster: LocalCluster) -> Iterator[BridgePeer]:
    """A bridge that is connected to the cluster."""
    with tempfile.TemporaryDirectory() as folder, bridge(cluster, Path(folder)) as made:
        made.until(lambda report: report.connected)
        yield made
