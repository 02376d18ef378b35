"""SmolLM2 on the real vLLM, beside the same model on Syringa's own engine.

    VLLM_PYTHON=.venvs/vllm/bin/python pytest -n0 tests/e2e/test_vllm.py

`python -m bench.peers vllm` makes such an environment. `VLLM_MODEL` names the folder of the model; by default, it is
converted from the GGUF file. Loading takes a minute or more.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from syringa.engine.vllm.launch import MODULE
from syringa.modelfiles import locate
from tests.e2e.server import Server, serve, wait_for

PYTHON, MODEL = os.environ.get("VLLM_PYTHON", ""), os.environ.get("VLLM_MODEL", "")
LOAD_SECONDS = 1200.0

pytestmark = [pytest.mark.model, pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON is not set")]

SETTINGS = """
model = "on-vllm"
load_timeout = 0
[[models]]
id = "on-vllm"
path = "{path}"
engine = "vllm"
python = "{python}"
engine_args = {{enforce_eager = true}}
dtype = "fp32"
kv_cache_gb = 1
max_model_len = 2048
[[models]]
id = "own"
path = "{path}"
dtype = "fp32"
max_model_len = 2048
"""
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    if MODEL:
        return MODEL
    source, target = Path(locate("default").path), tmp_path_factory.mktemp("smollm2")
    script = Path(__file__).parents[2] / "bench" / "convert_gguf.py"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [PYTHON, str(script), str(source.parent), source.name, str(target)]
    subprocess.run(command, check=True, env=environment)
    return str(target)


@pytest.fixture(scope="module")
def server(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("settings") / "syringa.toml"
    file.write_text(SETTINGS.format(path=folder, python=os.path.abspath(PYTHON)))
    with serve("--config", str(file), ready=False) as running:
        running.wait_ready(LOAD_SECONDS)
        yield running


def post(server: Server, path: str, model: str, **body: Any) -> httpx.Response:
    given = {"model": model, "temperature": 0, "max_tokens": 12, **body}
    return httpx.post(server.url + path, json=given, timeout=LOAD_SECONDS)


def shape(value: Any) -> Any:
    """Return a value with types in the place of texts and numbers. Lists of equal shapes are as long as one."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    if isinstance(value, list):
        shapes = [shape(each) for each in value]
        return [each for index, each in enumerate(shapes) if each not in shapes[:index]]
    return type(value).__name__


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Name a color."}]}
TEXT: dict[str, Any] = {"prompt": "The capital of France is"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "n": 2, "temperature": 1, "seed": 1}),
        ("/v1/completions", {**TEXT, "logprobs": 2}),
        ("/v1/completions", {**TEXT, "echo": True, "logprobs": 1, "max_tokens": 0}),
        ("/v1/completions", {**TEXT, "prompt_logprobs": 1}),
        ("/v1/completions", {**TEXT, "stop_token_ids": [260], "min_tokens": 2, "max_tokens": 40}),
        ("/v1/completions", {**TEXT, "logit_bias": {"260": 100}, "bad_words": ["Paris"], "max_tokens": 3}),
        ("/v1/completions", {**TEXT, "allowed_token_ids": [260, 253], "ignore_eos": True}),
        ("/v1/completions", {**TEXT, "frequency_penalty": 1, "presence_penalty": 1, "repetition_penalty": 1.2}),
        ("/v1/completions", {**TEXT, "best_of": 2, "n": 1, "temperature": 1}),
        ("/v1/completions", {**TEXT, "use_beam_search": True, "n": 2, "max_tokens": 4}),
    ],
)
def test_answers_have_the_shape_of_those_of_the_own_engine(server: Server, path: str, body: dict[str, Any]) -> None:
    on_vllm, own = (post(server, path, model, **body) for model in ("on-vllm", "own"))
    assert (on_vllm.status_code, own.status_code) == (200, 200), on_vllm.text + own.text
    ours, theirs = own.json(), on_vllm.json()
    assert shape(theirs) == shape(ours)
    assert theirs["usage"]["prompt_tokens"] == ours["usage"]["prompt_tokens"]
    if body.get("temperature", 0) == 0 and "use_beam_search" not in body:
        assert [each["finish_reason"] for each in theirs["choices"]] == [
            each["finish_reason"] for each in ours["choices"]
        ]


def test_prompt_gets_the_log_probabilities_of_the_own_engine(server: Server) -> None:
    scored = []
    for model in ("on-vllm", "own"):
        answer = post(server, "/v1/completions", model, **TEXT, echo=True, logprobs=0, max_tokens=0).json()
        scored.append(answer["choices"][0]["logprobs"]["token_logprobs"])
    assert scored[0][0] is None
    assert scored[0][1:] == pytest.approx(scored[1][1:], abs=0.02)


def test_streams_have_the_shape_of_those_of_the_own_engine(server: Server) -> None:
    def chunks(model: str) -> list[Any]:
        answer = post(
            server, "/v1/chat/completions", model, **CHAT, stream=True, stream_options={"include_usage": True}
        )
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    assert shape(chunks("on-vllm")) == shape(chunks("own"))


def test_seed_repeats_the_answer(server: Server) -> None:
    def answer(**fields: Any) -> str:
        return str(post(server, "/v1/completions", "on-vllm", **TEXT, temperature=1, **fields).json()["choices"])

    assert answer(seed=5) == answer(seed=5)
    assert answer(seed=5) != answer(seed=6)


def test_stop_string_ends_the_answer(server: Server) -> None:
    body = {**TEXT, "max_tokens": 40, "ignore_eos": True}
    text = post(server, "/v1/completions", "on-vllm", **body).json()["choices"][0]["text"]
    choice = post(server, "/v1/completions", "on-vllm", **body, stop=text[8:11]).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == text[: text.index(text[8:11])]


@pytest.mark.parametrize(
    ("field", "pattern"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}, "age"),
        ({"structured_outputs": {"regex": "[0-9]{3}-[0-9]{4}"}}, ""),
        ({"structured_outputs": {"choice": ["red", "blue"]}}, ""),
        ({"structured_outputs": {"grammar": 'start: "<" WORD ">"\nWORD: /[a-z]{1,5}/'}}, ""),
    ],
    ids=["schema", "regex", "choice", "lark"],
)
def test_structured_output(server: Server, field: dict[str, Any], pattern: str) -> None:
    answer = post(server, "/v1/chat/completions", "on-vllm", **CHAT, **field, max_tokens=60)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    if pattern:
        assert isinstance(json.loads(choice["message"]["content"])[pattern], int)


def test_tool_is_called(server: Server) -> None:
    body = {**CHAT, "tools": [TOOL], "tool_choice": "required", "max_tokens": 80}
    (choice,) = post(server, "/v1/chat/completions", "on-vllm", **body).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert isinstance(json.loads(call["function"]["arguments"])["age"], int)


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
        ({"min_tokens": 3, "structured_outputs": {"regex": "[0-9]+"}}, "min_tokens"),
    ],
)
def test_what_vllm_cannot_do_is_refused_by_name(server: Server, field: dict[str, Any], param: str) -> None:
    answer = post(server, "/v1/completions", "on-vllm", **TEXT, **field)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert "vLLM" in answer.json()["error"]["message"]


def test_prefix_cache_is_reported(server: Server) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 40
    usages = [post(server, "/v1/completions", "on-vllm", prompt=prompt).json()["usage"] for _ in range(2)]
    cached = [(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) for usage in usages]
    assert cached[0] == 0
    assert 0 < cached[1] < usages[1]["prompt_tokens"]


def test_disconnected_client_frees_its_sequences(server: Server) -> None:
    body = {"model": "on-vllm", **TEXT, "max_tokens": 2000, "ignore_eos": True, "n": 2, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=LOAD_SECONDS) as answer:
        lines = answer.iter_lines()  # kept: its end would close the connection
        next(lines)
        wait_for(lambda: running(server) == 2)
    wait_for(lambda: running(server) == 0)


def test_worker_is_started_again_when_vllm_dies(server: Server) -> None:
    """The last test: loading the model again is not waited for."""
    (worker,) = server.children(MODULE)
    engine = next(pid for pid in children(worker) if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text())
    os.kill(engine, signal.SIGKILL)
    wait_for(lambda: "vLLM has ended unexpectedly" in server.log.read_text())
    wait_for(lambda: server.children(MODULE) not in ([], [worker]))


def children(parent: int) -> list[int]:
    """Return the child processes of a process, whichever thread has started them."""
    found = [path.read_text().split() for path in Path(f"/proc/{parent}/task").glob("*/children")]
    return [int(pid) for each in found for pid in each]


def running(server: Server) -> float:
    """Return the number of running sequences of the model on vLLM, by the metrics."""
    for line in server.get("/metrics").text.splitlines():
        if line.startswith("syringa_num_requests_running") and "on-vllm" in line:
            return float(line.rpartition(" ")[2])
    return 0.0
