"""Compare a real model on a GPU with the same weights on the CPU in fp32, over HTTP: `python -m bench.gpu_vs_cpu`.

Random weights show speed and arithmetic; only a trained model shows that weights, tokenizer, chat template and sampling
parameters are applied correctly. Two servers get the same requests. A text is scored by both; greedy outputs must be
equal up to a token where the CPU's two best are nearly equal; then the GPU server is tested with what clients use:
chats, grammars, tools, stop strings, and seeds beside other streams.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.gpu_workloads import log

PORTS = {"cuda": 18801, "cpu": 18802}
STARTUP_SECONDS = 300
# By precision: mean error of log-probabilities, and the largest gap between two tokens that may change their order.
ROUNDING = {"bf16": (0.05, 0.25), "fp8": (0.3, 0.8)}
TEXT = Path("README.md")
PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "The three primary colors are",
    "To make bread you need",
    "In 1969, the first",
    "Q: What is 7 times 8?\nA:",
    "The opposite of hot is",
    "La tour Eiffel se trouve",
    "import json\n\nwith open(",
    "Dear Sir or Madam,",
    "The mitochondria is",
    "1, 2, 3, 5, 8, 13,",
    "SELECT name FROM",
    "Shakespeare wrote",
]


def post(device: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORTS[device]}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            result: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{path}: {error.read().decode()}") from None
    return result


def complete(device: str, prompt: str, **fields: Any) -> dict[str, Any]:
    choice: dict[str, Any] = post(device, "/v1/completions", {"prompt": prompt, **fields})["choices"][0]
    return choice


def chat(text: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 120, **fields}
    choice: dict[str, Any] = post("cuda", "/v1/chat/completions", body)["choices"][0]
    return choice


def check_scores(dtype: str, deterministic: bool) -> bool:
    text = TEXT.read_text()[:6000]
    scores = {
        device: complete(device, text, echo=True, max_tokens=0, logprobs=0)["logprobs"]["token_logprobs"][1:]
        for device in PORTS
    }
    errors = [abs(a - b) for a, b in zip(*scores.values(), strict=True)]
    mean, off = sum(errors) / len(errors), abs(sum(scores["cuda"]) - sum(scores["cpu"])) / abs(sum(scores["cpu"]))
    log(f"  {len(errors)} tokens scored: mean error {mean:.4f}, maximum {max(errors):.3f}, error of the sum {off:.2%}")
    return mean < ROUNDING[dtype][0] and off < 0.02


def check_greedy(dtype: str, deterministic: bool) -> bool:
    same = wrong = 0
    for prompt in PROMPTS:
        params = {"temperature": 0, "max_tokens": 64, "logprobs": 2}
        gpu, cpu = (complete(device, prompt, **params)["logprobs"] for device in ("cuda", "cpu"))
        if gpu["tokens"] == cpu["tokens"]:
            same += 1
            continue
        pairs = itertools.zip_longest(gpu["tokens"], cpu["tokens"])
        diverged = next(i for i, (a, b) in enumerate(pairs) if a != b)
        if diverged == len(cpu["tokens"]):  # the CPU's output ended there
            wrong += 1
            continue
        first, second = sorted(cpu["top_logprobs"][diverged].values(), reverse=True)[:2]
        near = first - second < ROUNDING[dtype][1]
        wrong += not near
        log(f"  {prompt!r}: differs from token {diverged} on, where the CPU's best two are {first - second:.3f} apart")
    log(f"  {same} of {len(PROMPTS)} greedy outputs equal the CPU's, {wrong} differ where they should not")
    return wrong == 0


def check_clients(dtype: str, deterministic: bool) -> bool:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    answer = chat("What is the capital of France?")["message"]["content"]
    structured = chat(
        "Invent a person.",
        temperature=1,
        seed=3,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}},
    )["message"]["content"]
    call = chat("What is the weather in Paris?", tools=[tool], tool_choice="required")["message"]["tool_calls"][0]
    stopped = complete("cuda", "1, 2, 3, 4, 5,", temperature=0, max_tokens=40, stop=" 9")
    regex = complete("cuda", "My number is", grammar={"type": "regex", "value": "[0-9]{3}-[0-9]{4}"}, seed=1)["text"]
    log(f"  chat: {answer!r}\n  schema: {structured!r}\n  call: {call['function']}")
    log(f"  stop: {stopped['text']!r}, regex: {regex!r}")
    person = json.loads(structured)
    return (
        "Paris" in answer
        and set(person) == {"name", "age"}
        and call["function"]["name"] == "get_weather"
        and "city" in json.loads(call["function"]["arguments"])
        and stopped["finish_reason"] == "stop"
        and " 9" not in stopped["text"]
        and len(regex) == 8
    )


def check_seeds(dtype: str, deterministic: bool) -> bool:
    """Compare seeded outputs alone and beside other streams: with `--deterministic` all must be equal."""
    params = {"temperature": 0.8, "seed": 7, "max_tokens": 64}
    alone = [complete("cuda", prompt, **params)["text"] for prompt in PROMPTS]
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        background = [pool.submit(complete, "cuda", p * 3, max_tokens=200, ignore_eos=True) for p in PROMPTS * 3]
        batched = list(pool.map(lambda prompt: complete("cuda", prompt, **params)["text"], PROMPTS))
        for each in background:
            each.result()
    same = sum(a == b for a, b in zip(alone, batched, strict=True))
    log(f"  {same} of {len(PROMPTS)} seeded outputs are equal beside {len(background)} other streams")
    return same == len(PROMPTS) or not deterministic


CHECKS: list[Callable[[str, bool], bool]] = [check_scores, check_greedy, check_clients, check_seeds]


def start_server(
    device: str, model: str, dtype: str, folder: Path, deterministic: bool = False
) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, "-m", "syringa", "serve", "--model", model, "--port", str(PORTS[device])),
        *("--device", device, "--dtype", dtype, "--requests-per-minute", "0", "--log-level", "warning"),
        *("--database", str(folder / f"{device}.db")),
        *(["--deterministic"] if deterministic else []),
    ]
    return subprocess.Popen(command, stdout=(folder / f"{device}.log").open("wb"), stderr=subprocess.STDOUT)


def wait_until_ready(device: str, server: subprocess.Popen[bytes], log_file: Path) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"the server on {device} ended with status {server.returncode}:\n{log_file.read_text()}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORTS[device]}/ready", timeout=2)
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"the server on {device} was not ready in time")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtypes", default="bf16", help="GPU precisions, one after another: bf16,fp8")
    parser.add_argument("--deterministic", action="store_true")
    options = parser.parse_args()
    passed_all = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(os.environ.get("OUT") or name)
        reference = start_server("cpu", options.model, "fp32", folder)
        try:
            for dtype in options.dtypes.split(","):
                began = time.perf_counter()
                server = start_server("cuda", options.model, dtype, folder, options.deterministic)
                try:
                    wait_until_ready("cuda", server, folder / "cuda.log")
                    log(f"{options.model}, {dtype}: ready after {time.perf_counter() - began:.1f} s")
                    wait_until_ready("cpu", reference, folder / "cpu.log")
                    for check in CHECKS:
                        passed = check(dtype, options.deterministic)
                        log(f"{'ok   ' if passed else 'WRONG'} {check.__name__}")
                        passed_all = passed_all and passed
                finally:
                    server.terminate()
                    server.wait(60)
        finally:
            reference.terminate()
            reference.wait(60)
    return 0 if passed_all else 1


if __name__ == "__main__":
    sys.exit(main())
