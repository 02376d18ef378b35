"""Streams of tiny models that move between replicas at a known point: after a crash, and when a replica is drained."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import step_gate
from tests.e2e.replica_requests import KINDS, Outcome, RequestClient
from tests.e2e.replica_server import check_equal, check_idle, drain, moves, ready_replicas, run_all, tokens, until
from tests.e2e.server import Server, serve
from tests.e2e.service import usage_records
from tests.e2e.step_gate import StepGate
from tests.engine.worker.tiny_llama import save_tiny_llama

TOKENS = 8  # of each sequence before the faults: every stream has begun, and none has ended
STREAMS = 8  # of the requests of all kinds that show output by then
SETTINGS = ("--replicas", "2", "--threads", "2", "--served-model-name", "m")
IMAGE_TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}<turn>{% endfor %}"
)
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking %}<think>{% endif %}{% endif %}"
)


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StepGate:
    path = tmp_path / "gate"
    monkeypatch.setenv(step_gate.VARIABLE, str(path))
    return StepGate(path)


async def run_disturbed(server: Server, gate: StepGate, numbers: range, streams: int, **options: Any) -> list[Outcome]:
    """Run requests of which so many show output early. They lose two replicas: one is killed, the other drained."""

    async def disturb(client: RequestClient) -> None:
        before = set(ready_replicas(server))
        await until(lambda: len(client.begun) >= streams)
        os.kill(server.children(step_gate.MODULE)[0], signal.SIGKILL)
        await until(lambda: moves(server).get("crash"))
        await until(lambda: len(before & set(ready_replicas(server))) == 1)  # the other one is reported as lost later
        (drained,) = before & set(ready_replicas(server))
        await drain(client, drained, grace=0.0)
        await until(lambda: drained not in ready_replicas(server))
        assert not client.done
        gate.open()

    gate.close(TOKENS)
    return await run_all(server.url, numbers, disturb, **options)


async def compare(server: Server, gate: StepGate, numbers: range, streams: int, **options: Any) -> list[Outcome]:
    """Check that requests that are disturbed end like those that are not. Return the outcomes of all."""
    expected = await run_all(server.url, numbers, **options)
    assert set(moves(server)) <= {"balance"}  # the second replica may become ready meanwhile
    await until(lambda: len(ready_replicas(server)) == 2)
    disturbed = await run_disturbed(server, gate, numbers, streams, **options)
    check_equal(disturbed, expected)
    assert set(moves(server)) - {"balance"} == {"crash", "drain"}
    check_idle(server)
    return expected + disturbed


def test_requests_of_all_kinds_survive_a_killed_and_a_drained_replica(gate: StepGate, tmp_path: Path) -> None:
    folder, database = tmp_path / "model", str(tmp_path / "syringa.db")
    folder.mkdir()
    save_tiny_llama(folder, max_length=2048)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    numbers = range(len(KINDS), 2 * len(KINDS))  # these are long enough
    settings = ("--model", str(folder), *SETTINGS, "--dtype", "int8", "--database", database)
    with serve(*settings, module=step_gate.MODULE) as server:
        outcomes = asyncio.run(compare(server, gate, numbers, STREAMS))
    rows = usage_records(database)
    assert {row.outcome for row in rows} == {"ok"}
    assert Counter((row.input_tokens, row.output_tokens) for row in rows) == tokens(outcomes)


@pytest.mark.slow
def test_streams_with_images_survive_a_killed_and_a_drained_replica(gate: StepGate, tmp_path: Path) -> None:
    """The new replica gets the images again, and computes them again."""
    from tests.engine.vision.tiny_models import make_image, save

    async def describe(client: RequestClient, number: int) -> Outcome:
        images = [make_image(number + seed, 64, 48).data for seed in range(1 + number % 2)]
        urls = ["data:image/png;base64," + base64.b64encode(each).decode() for each in images]
        parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]
        return await client.chat(number, 40, messages=messages, logprobs=True, n=1 + number % 2)

    folder = tmp_path / "model"
    save("smolvlm", folder)
    (folder / "chat_template.jinja").write_text(IMAGE_TEMPLATE)
    with serve("--model", str(folder), *SETTINGS, "--dtype", "int8", module=step_gate.MODULE) as server:
        outcomes = asyncio.run(compare(server, gate, range(4), 4, kinds=[describe]))
    assert len({repr(outcome["choices"]) for outcome in outcomes}) == 4
