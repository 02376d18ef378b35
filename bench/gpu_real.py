"""A real model on a GPU, over HTTP, beside the same weights on the CPU in fp32: `python -m bench.gpu_real [--model …]`.

Random weights show speed and arithmetic; whether a file's numbers, its tokenizer, its template and every rule of
sampling end up where they should shows only with a model that says something. Two servers get the same requests. A
text is scored by both; greedy answers have to be the same up to where the CPU holds two tokens nearly equal; then what
any client uses is asked of the GPU: chats, grammars, tools, stops, seeds beside other streams.
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

from bench.gpu import say

PORTS = {"cuda": 18801, "cpu": 18802}
STARTUP_SECONDS = 300
# By how much log-probabilities may be off on average, and how far apart two may be that change places: by precision.
ROUNDING = {"bf16": (0.05, 0.25), "fp8": (0.3, 0.8)}
TEXT = Path("README.md")
PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "The three primary colours are",
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
        with urllib.request.urlopen(request, timeout=300) as answer:
            result: dict[str, Any] = json.load(answer)
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
    apart = [abs(a - b) for a, b in zip(*scores.values(), strict=True)]
    mean, off = sum(apart) / len(apart), abs(sum(scores["cuda"]) - sum(scores["cpu"])) / abs(sum(scores["cpu"]))
    say(f"  {len(apart)} tokens scored: {mean:.4f} apart on average, {max(apart):.3f} at most, sums {off:.2%}")
    return mean < ROUNDING[dtype][0] and off < 0.02


def check_greedy(dtype: str, deterministic: bool) -> bool:
    same = wrong = 0
    for prompt in PROMPTS:
        asked = {"temperature": 0, "max_tokens": 64, "logprobs": 2}
        here, there = (complete(device, prompt, **asked)["logprobs"] for device in ("cuda", "cpu"))
        if here["tokens"] == there["tokens"]:
            same += 1
            continue
        pairs = itertools.zip_longest(here["tokens"], there["tokens"])
        parted = next(i for i, (a, b) in enumerate(pairs) if a != b)
        if parted == len(there["tokens"]):  # the CPU's answer had ended
            wrong += 1
            continue
        first, second = sorted(there["top_logprobs"][parted].values(), reverse=True)[:2]
        near = first - second < ROUNDING[dtype][1]
        wrong += not near
        say(f"  {prompt!r}: parts at token {parted}, where the CPU's best two are {first - second:.3f} apart")
    say(f"  {same} of {len(PROMPTS)} greedy answers are the CPU's, {wrong} part where they should not")
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
    said = chat("What is the capital of France?")["message"]["content"]
    shaped = chat(
        "Invent a person.",
        temperature=1,
        seed=3,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}},
    )["message"]["content"]
    call = chat("What is the weather in Paris?", tools=[tool], tool_choice="required")["message"]["tool_calls"][0]
    stopped = complete("cuda", "1, 2, 3, 4, 5,", temperature=0, max_tokens=40, stop=" 9")
    regex = complete("cuda", "My number is", grammar={"type": "regex", "value": "[0-9]{3}-[0-9]{4}"}, seed=1)["text"]
    say(f"  chat: {said!r}\n  schema: {shaped!r}\n  call: {call['function']}\n  stop: {stopped['text']!r}, {regex!r}")
    person = json.loads(shaped)
    return (
        "Paris" in said
        and set(person) == {"name", "age"}
        and call["function"]["name"] == "get_weather"
        and "city" in json.loads(call["function"]["arguments"])
        and stopped["finish_reason"] == "stop"
        and " 9" not in stopped["text"]
        and len(regex) == 8
    )


def check_seeds(dtype: str, deterministic: bool) -> bool:
    """With `--deterministic` all are the same beside other streams. Without it, other sizes round elsewhere."""
    asked = {"temperature": 0.8, "seed": 7, "max_tokens": 64}
    alone = [complete("cuda", prompt, **asked)["text"] for prompt in PROMPTS]
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        noise = [pool.submit(complete, "cuda", p * 3, max_tokens=200, ignore_eos=True) for p in PROMPTS * 3]
        crowded = list(pool.map(lambda prompt: complete("cuda", prompt, **asked)["text"], PROMPTS))
        for each in noise:
            each.result()
    same = sum(a == b for a, b in zip(alone, crowded, strict=True))
    say(f"  {same} of {len(PROMPTS)} seeded answers are the same beside {len(noise)} other streams")
    return same == len(PROMPTS) or not deterministic


CHECKS: list[Callable[[str, bool], bool]] = [check_scores, check_greedy, check_clients, check_seeds]


def start(device: str, model: str, dtype: str, folder: Path, deterministic: bool = False) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, "-m", "syringa", "serve", "--model", model, "--port", str(PORTS[device])),
        *("--device", device, "--dtype", dtype, "--requests-per-minute", "0", "--log-level", "warning"),
        *("--database", str(folder / f"{device}.db")),
        *(["--deterministic"] if deterministic else []),
    ]
    return subprocess.Popen(command, stdout=(folder / f"{device}.log").open("wb"), stderr=subprocess.STDOUT)


def ready(device: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"the server on {device} ended with status {server.returncode}:\n{log.read_text()}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORTS[device]}/ready", timeout=2)
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"the server on {device} was not ready in time")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtypes", default="bf16", help="on the GPU, one after another: bf16,fp8")
    parser.add_argument("--deterministic", action="store_true")
    given = parser.parse_args()
    right = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(os.environ.get("OUT") or name)
        reference = start("cpu", given.model, "fp32", folder)
        try:
            for dtype in given.dtypes.split(","):
                began = time.perf_counter()
                server = start("cuda", given.model, dtype, folder, given.deterministic)
                try:
                    ready("cuda", server, folder / "cuda.log")
                    say(f"{given.model}, {dtype}: ready after {time.perf_counter() - began:.1f} s")
                    ready("cpu", reference, folder / "cpu.log")
                    for check in CHECKS:
                        passed = check(dtype, given.deterministic)
                        say(f"{'ok   ' if passed else 'WRONG'} {check.__name__}")
                        right = right and passed
                finally:
                    server.terminate()
                    server.wait(60)
        finally:
            reference.terminate()
            reference.wait(60)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
