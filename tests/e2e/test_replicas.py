"""Three replicas, of which one is killed, one stopped and one drained while the same requests of all kinds run."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import struct
from collections import Counter
from pathlib import Path

import pytest

from syringa.cluster.folder import ClusterFolder
from syringa.config import Config
from syringa.modelfiles import locate
from tests.e2e import step_gate
from tests.e2e.replica_requests import Outcome, RequestClient
from tests.e2e.replica_server import (
    check_equal,
    check_idle,
    drain,
    moves,
    ready_replicas,
    run_all,
    tokens,
    until,
)  # fmt: skip
from tests.e2e.server import Server, serve
from tests.e2e.service import WORKER, usage_records
from tests.e2e.step_gate import StepGate

pytestmark = pytest.mark.model

COUNT = 100
HELD_TOKENS = 16  # of each sequence before a replica is killed: most streams have begun, and few have ended
SETTINGS = ("--served-model-name", "m", "--requests-per-minute", "0")
# SmolLM2 does not reason. In a copy of its file, tokens that it does not use become the markers of reasoning, and its
# template begins with them if that is requested. The file keeps its length, and with it the offsets of the weights.
TOKENS = {b"<file_sep>": b"<think>", b"<filename>": b"</think>", b"<gh_stars>": b"<not-for-use-->"}
TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return the settings of a model that reasons."""
    folder = tmp_path_factory.mktemp("model")
    file, template = folder / "thinking.gguf", folder / "template.jinja"
    shutil.copyfile(locate(Config().model).path, file)
    template.write_text(TEMPLATE)
    with file.open("r+b") as opened:
        data = opened.read(1 << 22)
        for old, new in TOKENS.items():
            found, wanted = (struct.pack("<Q", len(each)) + each for each in (old, new))
            assert data.count(found) == 1
            data = data.replace(found, wanted)
        assert len(data) == 1 << 22
        opened.seek(0)
        opened.write(data)
    return "--model", str(file), "--chat-template", str(template)


async def all_ready(server: Server) -> list[int]:
    """Wait until three replicas are ready and no other process is left. Return the process ids."""
    await until(lambda: len(ready_replicas(server)) == 3 and len(server.children(WORKER)) == 3)
    return sorted(server.children(WORKER))


def run_undisturbed(model: tuple[str, ...], database: str, count: int) -> list[Outcome]:
    """Run the requests on a server with one replica, which none of them can leave."""
    with serve(*model, *SETTINGS, "--database", database) as server:
        outcomes = asyncio.run(run_all(server.url, range(count)))
        assert moves(server) == {}
        return outcomes


def is_stopped(pid: int) -> bool:
    return process_fields(pid)[0] == "T"


def start_time(pid: int) -> tuple[int, int]:
    """Return a value by which processes can be sorted in the order of their start."""
    return int(process_fields(pid)[19]), pid


def process_fields(pid: int) -> list[str]:
    """Return what the system tells of a process, from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


@pytest.mark.slow
def test_requests_of_all_kinds_survive_a_killed_a_stopped_and_a_drained_replica(
    model: tuple[str, ...], tmp_path: Path
) -> None:
    """One replica is stopped and one killed while all requests run, and the last one drained once there is another.

    A request that is computed at two crashes may be their cause, and ends. So the killed replica gets no requests of
    the stopped one, which is killed for it, and the other way around: both faults come at the same time. Steps are
    short, so that no other replica is taken for silent on a busy machine.
    """
    database = str(tmp_path / "syringa.db")
    expected = run_undisturbed(model, database, COUNT)
    settings = ("--replicas", "3", "--threads", "3", "--heartbeat-timeout", "20", "--step-tokens", "128")
    with serve(*model, *SETTINGS, *settings, "--database", database) as server:

        async def disturb(client: RequestClient) -> None:
            before = sorted(ready_replicas(server), key=lambda id: int(id.rpartition("-")[2]))
            stopped, killed, _ = sorted(server.children(WORKER), key=start_time)  # in the order of their ids
            await until(lambda: len(client.begun) >= COUNT // 2)
            os.kill(stopped, signal.SIGSTOP)
            await until(lambda: is_stopped(stopped))
            os.kill(killed, signal.SIGKILL)
            await until(lambda: before[1] not in ready_replicas(server))
            await until(lambda: set(ready_replicas(server)) - set(before))
            await drain(client, before[2], grace=0.5)
            assert len(client.done) < COUNT

        async def run() -> list[Outcome]:
            await all_ready(server)
            outcomes = await run_all(server.url, range(COUNT), disturb)
            await all_ready(server)
            return outcomes

        disturbed = asyncio.run(run())
        check_equal(disturbed, expected)
        assert set(moves(server)) - {"balance"} == {"crash", "silence", "drain"}
        check_idle(server)
    rows = usage_records(database)
    assert {row.outcome for row in rows} == {"ok"}
    assert Counter((row.input_tokens, row.output_tokens) for row in rows) == tokens(expected) + tokens(disturbed)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["unix", "tls"])
def test_streams_survive_a_killed_replica(
    model: tuple[str, ...], tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small version of the test above, with two replicas. The streams are held back until one of them is killed."""
    database, count = str(tmp_path / "syringa.db"), 8
    expected = run_undisturbed(model, database, count)
    settings: tuple[str, ...] = ("--replicas", "2", "--threads", "2")
    if transport == "tls":
        folder = tmp_path / "cluster"
        ClusterFolder(folder).create("node", ["127.0.0.1"])
        settings += ("--worker-host", "127.0.0.1", "--cluster-dir", str(folder))
    monkeypatch.setenv(step_gate.VARIABLE, str(tmp_path / "gate"))
    gate = StepGate(tmp_path / "gate")
    with serve(*model, *SETTINGS, *settings, "--database", database, module=step_gate.MODULE) as server:

        async def disturb(client: RequestClient) -> None:
            await until(lambda: len(client.begun) >= 6)
            os.kill(server.children(step_gate.MODULE)[0], signal.SIGKILL)
            gate.open()

        async def run() -> list[Outcome]:
            await until(lambda: len(ready_replicas(server)) == 2)
            gate.close(HELD_TOKENS)
            return await run_all(server.url, range(count), disturb)

        assert asyncio.run(run()) == expected
        assert "crash" in moves(server)
