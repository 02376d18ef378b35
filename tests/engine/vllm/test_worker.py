"""The process of a worker on vLLM, with a stand-in for vLLM (`fake/vllm.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from syringa.engine.client import protocol
from syringa.engine.client.worker_client import WorkerClient
from syringa.engine.processes import managed_process
from syringa.engine.processes.health import HealthPage, create_page
from syringa.engine.processes.worker_process import spawn_worker
from syringa.engine.vllm import bootstrap, launch
from syringa.engine.worker.options import WorkerOptions
from syringa.errors import ConfigError, EngineError, InvalidRequest, WorkerLost
from syringa.types import EngineDelta, EngineRequest
from tests.cluster.certificates import Certificates
from tests.engine.vllm.fake.vllm import DEADLY, FAILING, KILLED, NO_LOAD, NO_MEMORY, REFUSED, SILENT
from tests.engine.vllm.test_requests import request

HANG_SECONDS = 60.0  # limit of every wait: a test that reaches it has failed
HEADER = b'{"w": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}'
TOKENIZER = '{"added_tokens": [{"id": 2, "content": "<|im_end|>", "special": true}], "model": {"vocab": {"a": 0}}}'


def write_model(folder: Path) -> Path:
    """Write the files of a model folder, as far as a worker on vLLM reads them itself."""
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "tokenizer.json").write_text(TOKENIZER)
    (folder / "model.safetensors").write_bytes(len(HEADER).to_bytes(8, "little") + HEADER + bytes(12))
    return folder


def write_interpreter(path: Path, log: Path) -> str:
    """Write an interpreter of another environment, which has the stand-in for vLLM."""
    fake = Path(__file__).with_name("fake")
    path.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{fake}" FAKE_VLLM_LOG="{log}" exec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return str(path)


class WorkerHarness:
    """A worker process, its health page, and what its vLLM has logged."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder, self.log = folder, folder / "log"
        self.options = WorkerOptions(
            **{
                "socket": str(folder / "w.sock"),
                "model": str(write_model(folder / "model")),
                "engine": "vllm",
                "python": write_interpreter(folder / "python", self.log),
                "health_fd": create_page(),
                **settings,
            }
        )
        self.health = HealthPage(self.options.health_fd)
        self.process = spawn_worker(self.options)
        os.close(self.options.health_fd)

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    @property
    def engine_pid(self) -> int:
        return next(int(line.split()[1]) for line in self.lines() if line.startswith("engine"))

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            while not condition():  # noqa: ASYNC110 - it is about another process
                await asyncio.sleep(0.01)

    def reason(self) -> str:
        return Path(self.options.reason_file).read_text()

    async def exit_status(self) -> int:
        return await asyncio.to_thread(self.process.wait, HANG_SECONDS)

    def close(self) -> None:
        managed_process.terminate(self.process, HANG_SECONDS)
        self.health.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@contextlib.contextmanager
def started(folder: Path, **settings: Any) -> Iterator[WorkerHarness]:
    harness = WorkerHarness(folder, **settings)
    try:
        yield harness
    finally:
        harness.close()


async def connect(harness: WorkerHarness) -> WorkerClient:
    client = WorkerClient(f"unix:{harness.options.socket}")
    client.start()
    waiting = asyncio.create_task(client.wait_ready())
    await harness.wait_until(lambda: waiting.done() or harness.process.poll() is not None)
    assert waiting.done(), "the worker has ended"
    return client


async def run(client: WorkerClient, made: EngineRequest) -> list[EngineDelta]:
    received: list[EngineDelta] = []

    def receive(delta: EngineDelta) -> bool:
        received.append(delta)
        return False

    await asyncio.wait_for(client.submit(made, receive), HANG_SECONDS)
    return received


async def test_worker_serves_requests_and_retires(folder: Path, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    with started(folder, max_running=4, listen="tcp:127.0.0.1:0", tls=certificates.server) as harness:
        client = await connect(harness)
        info, _ = await client.wait_ready()
        assert (info.architecture, info.dtype, info.max_model_len) == ("LlamaForCausalLM", "bfloat16", 512)
        assert (info.vocab_size, info.parameters, info.kernels) == (10_000, 6, "vllm 0.32.0")
        assert harness.health.read().phase == "serving"

        deltas = await run(client, request(prompt=[5, 6, 2, 7], choices=2))
        for choice in (0, 1):
            own = [delta for delta in deltas if delta.choice == choice]
            assert [delta.tokens for delta in own] == [[5], [6], [2]]
            assert (own[-1].finish, own[-1].stop_token) == ("stop", 2)
        with pytest.raises(InvalidRequest, match="it is not to my taste") as refused:
            await run(client, request(id="refused", prompt=[REFUSED]))
        assert refused.value.param == "prompt"
        with pytest.raises(InvalidRequest, match="dry_multiplier"):
            await run(client, request({"dry_multiplier": 1.0}, id="dry"))
        (failed,) = await run(client, request(id="failing", prompt=[FAILING]))
        assert (failed.finish, failed.error_kind) == ("error", "engine")
        stats = await client.stats()
        assert (stats.steps, stats.output_tokens, stats.running, stats.blocks_total) == (6, 6, 0, 64)

        # Clients of other machines connect over TLS.
        remote = WorkerClient((await read_ready(harness)).address, tls=certificates.client)
        remote.start()
        await asyncio.wait_for(remote.wait_ready(), HANG_SECONDS)
        assert [delta.tokens for delta in await run(remote, request(prompt=[5, 2]))] == [[5], [2]]
        await remote.close()

        # Requests of a client that disconnects are aborted.
        begun = asyncio.Event()

        def receive(delta: EngineDelta) -> bool:
            begun.set()
            return False

        long = request(id="long", prompt=[5], stopping={"max_tokens": 10**6})
        stream = asyncio.create_task(client.submit(long, receive))
        await asyncio.wait_for(begun.wait(), HANG_SECONDS)
        await harness.wait_until(lambda: harness.health.read().step_started_at is not None)
        await client.close()
        with contextlib.suppress(EngineError):
            await stream
        await harness.wait_until(lambda: any("aborted" in line for line in harness.lines()))
        await harness.wait_until(lambda: harness.health.read().step_started_at is None)

        client = await connect(harness)
        client._send(protocol.Retire())
        assert await harness.exit_status() == 0
        assert harness.lines()[-1] == "shutdown"
        await client.close()


async def test_end_of_vllm_ends_the_worker_as_a_crash(folder: Path) -> None:
    with started(folder) as harness:
        client = await connect(harness)
        engine = harness.engine_pid
        deadly = request(prompt=[SILENT], fingerprint=b"0123456789abcdef")
        waiting = asyncio.create_task(run(client, deadly))
        await harness.wait_until(lambda: bool(harness.health.running()))
        await harness.wait_until(lambda: harness.health.read().step_started_at is not None)  # for the watchdog
        with pytest.raises(WorkerLost):
            await run(client, request(id="deadly", prompt=[DEADLY], fingerprint=b"fedcba9876543210"))
        with pytest.raises(WorkerLost):
            await waiting
        assert await harness.exit_status() == 1
        assert set(harness.health.running()) == {b"0123456789abcdef", b"fedcba9876543210"}
        await harness.wait_until(lambda: has_ended(engine))  # it was not shut down, and would have outlived the worker
        await client.close()


def has_ended(pid: int) -> bool:
    """Return whether a process, whose parent may not have waited for it, has ended."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


async def read_ready(harness: WorkerHarness) -> protocol.Ready:
    reader, writer = await asyncio.open_unix_connection(harness.options.socket)
    decoder = protocol.client_decoder()
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            for message in decoder.feed(await reader.read(1 << 16)):
                if isinstance(message, protocol.Ready):
                    writer.close()
                    return message


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"engine_args": {"tensor_paralel_size": 2}}, "engine_args.tensor_paralel_size: this version of vLLM has no"),
        ({"engine_args": {"tensor_parallel_size": 9}}, '(engine_args {"tensor_parallel_size":9}): World size is'),
        ({"engine_args": {"hf_token": "hf_x", "tensor_parallel_size": 9}}, '(engine_args {"hf_token":"***","tensor_'),
        ({"python": "/no/such/python"}, "/no/such/python cannot be run: No such file or directory"),
        ({"python": sys.executable}, f"{sys.executable} has no module vllm: name the environment of vLLM with python"),
    ],
    ids=["unknown argument", "refused argument", "secret argument", "missing interpreter", "interpreter without vLLM"],
)
async def test_worker_that_cannot_start_leaves_the_reason(folder: Path, settings: dict[str, Any], reason: str) -> None:
    with started(folder, **settings) as harness:
        assert await harness.exit_status() == managed_process.EXIT_CANNOT_START
        found = harness.reason()
        assert reason in found
        assert "\n" not in found


@pytest.mark.parametrize(
    ("length", "status", "reason"),
    [
        (NO_MEMORY, managed_process.EXIT_NO_MEMORY, "RuntimeError: DefaultCPUAllocator: can't allocate memory"),
        (NO_LOAD, 1, "ValueError: there is no q: see"),
        (KILLED, managed_process.EXIT_NO_MEMORY, "a process of it was killed, perhaps out of memory"),
    ],
)
async def test_failure_of_a_process_of_vllm_is_reported_in_one_line(
    folder: Path, length: int, status: int, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with started(folder, max_model_len=length) as harness:
        assert await harness.exit_status() == status
        assert harness.reason().startswith(f"vLLM cannot load {harness.options.model}: {reason}")
    assert capfd.readouterr().err == f"syringa: {harness.reason()}\n"


async def test_version_of_vllm_that_was_not_tested_is_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_VLLM_VERSION", "0.99.1")
    with started(folder) as harness:
        client = await connect(harness)
        assert (await client.wait_ready()).info.kernels == "vllm 0.99.1"
        await client.close()
    assert "this version of vLLM was not tested: version=0.99.1 tested=0.32.x" in capfd.readouterr().err


def test_interpreter_is_checked_before_it_is_used(folder: Path) -> None:
    launch.check_interpreter(write_interpreter(folder / "python", folder / "log"))
    with pytest.raises(ConfigError, match=f"{sys.executable} has no module vllm: name the environment of vLLM"):
        launch.check_interpreter("")  # that of the server


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 3", "it ended with status 3"),
        ("kill -9 $$", "SIGKILL"),
        ("echo hello", "it printed something else than was expected"),
    ],
)
def test_interpreter_that_cannot_be_run_is_refused(folder: Path, script: str, reason: str) -> None:
    (folder / "python").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "python").chmod(0o755)
    with pytest.raises(ConfigError, match=f"cannot be run as a Python interpreter, 3.11 or newer: .*{reason}"):
        launch.check_interpreter(str(folder / "python"))


def test_missing_interpreter_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing cannot be run .*: No such file or directory$"):
        launch.check_interpreter(str(folder / "missing"))


def test_old_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "MIN_PYTHON", (99, 1))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert bootstrap.find_problem() == f"{sys.executable} is Python {version}: a worker needs 99.1 or newer"


def test_worker_needs_nothing_that_vllm_does_not_bring() -> None:
    code = (
        "import sys; before = set(sys.modules); import syringa.engine.vllm.worker; new = sys.modules.keys() - before; "
        "print(*{name.partition('.')[0] for name in new if name[0] != '_'} - sys.stdlib_module_names)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert set(found.split()) <= {"syringa", "msgspec", "numpy", "tokenizers", "llguidance", "typing_extensions"}
