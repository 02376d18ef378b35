"""The cluster's server as the process that a supervisor starts."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from syringa import logs
from syringa.cluster.folder import ClusterFolder
from syringa.cluster.join import join
from syringa.cluster.join_tokens import JoinTokens
from syringa.cluster.served_models import publish
from syringa.engine.processes import cluster_server, managed_process
from syringa.engine.processes.cluster_server import CLUSTER_SERVER_MODULE, ClusterServerOptions
from syringa.engine.processes.model_fetcher import ModelFetcher
from syringa.engine.worker.options import WorkerOptions
from tests.cluster.serving import HANG_SECONDS, write_model


def start(options: ClusterServerOptions) -> subprocess.Popen[bytes]:
    """Start the process as `managed_process.spawn` does, with a pipe for its messages."""
    command = [sys.executable, "-m", CLUSTER_SERVER_MODULE]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(options) + b"\n")
    process.stdin.flush()
    return process


def test_process_admits_a_node_and_gives_it_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYRINGA_HOME", str(tmp_path / "home"))
    model = write_model(tmp_path / "model")
    ClusterFolder(tmp_path / "cluster").create("head", ["127.0.0.1"])
    publish(tmp_path / "models", [str(model)])
    options = ClusterServerOptions(
        address="127.0.0.1:0",
        cluster_dir=str(tmp_path / "cluster"),
        models_file=str(tmp_path / "models"),
        ray_port=6380,
    )
    with start(options) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline().decode()
            address = re.search(r"listening: address=(\S+)", line)
            assert address is not None, line
            membership = join(address[1], JoinTokens(tmp_path / "cluster").create(), tmp_path / "node", name="node")
            assert membership.ray_port == 6380
            fetched = ModelFetcher(tmp_path / "node").fetch(
                WorkerOptions(socket="", model=str(model)), lambda progress: None
            )
            assert fetched.model == str(model)  # it is the same machine
            process.send_signal(signal.SIGTERM)
            assert process.wait(HANG_SECONDS) == 0
        finally:
            process.kill()


def test_process_that_cannot_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ClusterServerOptions(address="127.0.0.1:0", cluster_dir=str(tmp_path), models_file="models")
    monkeypatch.setattr(managed_process, "attach_to_parent", lambda options_type: options)
    monkeypatch.setattr(logs, "configure", lambda *_: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as stopped:
        cluster_server.main()
    assert stopped.value.code == managed_process.EXIT_CANNOT_START
    assert capsys.readouterr().err.startswith(f"syringa: {tmp_path}/ca.pem: No such file")
