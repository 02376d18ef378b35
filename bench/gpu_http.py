"""Measure the server on a GPU over HTTP, relative to the engine alone: `python -m bench.gpu_http --model qwen3-8b`.

Creates a model folder with real shapes, random weights and a tokenizer of that vocabulary, starts `syringa serve` on it
and times it to the first token. Then sends the requests of `bench.gpu`'s workload `nano256` as 256 concurrent streams,
twice. Prints tokens per second over HTTP, the share of the engine alone (`--offline`), and the API processes' CPU time
per token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from bench.gpu_models import MODELS
from bench.gpu_workloads import log, workload

PORT = 18765
API = b"syringa.http.server.process"
STARTUP_SECONDS = 300


def make_folder(name: str, folder: Path) -> None:
    """Write a Hugging Face folder of the real size. The weights are created on the GPU."""
    import torch
    from safetensors.torch import save_file

    from bench.gpu_models import RandomWeights
    from syringa.engine.models.config import read_config

    settings = MODELS[name]
    folder.mkdir(parents=True, exist_ok=True)
    architecture = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}[settings["model_type"]]
    (folder / "config.json").write_text(json.dumps(settings | {"architectures": [architecture]}))
    (folder / "tokenizer.json").write_text(tokenizer(int(settings["vocab_size"])))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    config = read_config(settings)
    weights = RandomWeights(config, torch.device("cuda"))
    index: dict[str, str] = {}
    for number, names in enumerate(shards(config)):
        file = f"model-{number:05}.safetensors"
        save_file({each: weights(each).to(torch.bfloat16).cpu() for each in names}, folder / file)
        index |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    del weights
    torch.cuda.empty_cache()


def shards(config: Any) -> list[list[str]]:
    """Return the tensor names by file, a few layers each."""
    ends = ["model.embed_tokens.weight", "model.norm.weight"] + ([] if config.tied else ["lm_head.weight"])
    found = [ends]
    for first in range(0, config.layers, 6):
        names = []
        for layer in range(first, min(first + 6, config.layers)):
            prefix = f"model.layers.{layer}."
            names += [f"{prefix}self_attn.{each}_proj.weight" for each in ("q", "k", "v", "o")]
            names += [f"{prefix}self_attn.{each}_norm.weight" for each in ("q", "k")]
            if config.sparse[layer]:
                experts = [f"mlp.experts.{number}." for number in range(config.experts)]
                names.append(f"{prefix}mlp.gate.weight")
            else:
                experts = ["mlp."]
            names += [f"{prefix}{mlp}{each}_proj.weight" for mlp in experts for each in ("gate", "up", "down")]
            names += [f"{prefix}{each}_layernorm.weight" for each in ("input", "post_attention")]
        found.append(names)
    return found


def tokenizer(size: int) -> str:
    """Return a tokenizer of all bytes, and of invented words up to the size of the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"Ġw{number}" for number in range(size - len(letters) - 1))]
    made = Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    return str(made.to_str())


def start_server(folder: Path, workers: int, log_file: Path, dtype: str) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, "-m", "syringa", "serve", "--model", str(folder), "--served-model-name", "bench"),
        *("--port", str(PORT), "--device", "cuda", "--dtype", dtype, "--no-prefix-caching", "--workers", str(workers)),
        *("--max-model-len", "4096", "--step-tokens", "8192", "--max-running", "256", "--log-level", "warning"),
        *("--database", str(folder.parent / "syringa.db")),
    ]
    return subprocess.Popen(command, stdout=log_file.open("wb"), stderr=subprocess.STDOUT)


def wait_until_ready(server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with status {server.returncode}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ready", timeout=2)
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server was not ready in time")


class CompletionStream(asyncio.Protocol):
    """One request whose events are counted but not parsed, so that the client is not the bottleneck."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.events = 0
        self.first: float | None = None
        self.status = b""
        self.tail = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        size = f"content-type: application/json\r\ncontent-length: {len(self.body)}\r\n\r\n"
        transport.write((head + size).encode() + self.body)

    def data_received(self, data: bytes) -> None:
        if self.first is None:
            self.first = time.perf_counter()
            self.status = data[:12]
        self.events += (self.tail + data).count(b"data: {")
        self.tail = data[-6:] if not data.endswith(b"data: {") else b""

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def run_streams(bodies: list[bytes]) -> tuple[float, int, list[float]]:
    """Return seconds, tokens, and the time to first token of each stream."""
    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    streams = [CompletionStream(body) for body in bodies]
    await asyncio.gather(*(loop.create_connection(lambda each=each: each, "127.0.0.1", PORT) for each in streams))
    await asyncio.gather(*(each.done for each in streams))
    seconds = time.perf_counter() - began
    wrong = [each.status for each in streams if each.status != b"HTTP/1.1 200"]
    if wrong:
        raise SystemExit(f"{len(wrong)} requests failed, the first with {wrong[0]!r}")
    # The last event of a stream has the finish reason; every other one has a token.
    tokens = sum(each.events - 1 for each in streams)
    return seconds, tokens, [each.first - began for each in streams if each.first is not None]


def cpu_seconds() -> float:
    """Return the CPU time of the API processes."""
    spent = 0.0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if API in (process / "cmdline").read_bytes():
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                spent += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except OSError:
            continue
    return spent


def measure(name: str, folder: Path, workers: int, dtype: str, rounds: int, log_file: Path) -> dict[str, Any]:
    requests = workload("nano256", quick=False)
    bodies = [
        json.dumps(
            {
                "model": "bench",
                "prompt": list(each.prompt),
                "max_tokens": each.stopping.max_tokens,
                "temperature": 0.6,
                "seed": each.sampling.seed,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        for each in requests
    ]
    output_tokens = sum(each.stopping.max_tokens for each in requests)
    began = time.perf_counter()
    server = start_server(folder, workers, log_file, dtype)
    result: dict[str, Any] = {"model": name, "dtype": dtype, "workers": workers, "runs": []}
    try:
        wait_until_ready(server)
        first = json.dumps({"model": "bench", "prompt": [1000] * 16, "max_tokens": 1}).encode()
        asyncio.run(run_streams([first]))
        result["start_to_first_token_s"] = time.perf_counter() - began
        log(f"{name}: first token {result['start_to_first_token_s']:.1f} s after the start")
        for _ in range(rounds):
            before = cpu_seconds()
            seconds, events, firsts = asyncio.run(run_streams(bodies))
            spent = cpu_seconds() - before
            run = {
                "tokens_per_second": output_tokens / seconds,
                "events": events,
                "api_cpu_us_per_token": 1e6 * spent / output_tokens,
                "median_first_token_s": sorted(firsts)[len(firsts) // 2],
            }
            result["runs"].append(run)
            cost = run["api_cpu_us_per_token"]
            log(f"  nano256 over HTTP: {run['tokens_per_second']:,.0f} tok/s, {cost:.1f} µs of API CPU a token")
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--offline", type=float, default=0.0, help="tokens per second of the same workload without HTTP"
    )
    parser.add_argument("--folder", type=Path, default=Path("/tmp/syringa-bench"), help="where the model is written")
    options = parser.parse_args()
    out = Path(os.environ.get("OUT") or "bench/results")
    folder = options.folder / options.model
    if not (folder / "model.safetensors.index.json").exists():
        log(f"creating {options.model}")
        shutil.rmtree(folder, ignore_errors=True)
        # In a separate process, so that nothing is left on the GPU.
        code = f"from bench.gpu_http import *; make_folder({options.model!r}, Path({str(folder)!r}))"
        subprocess.run([sys.executable, "-c", code], check=True)
    result = measure(
        options.model, folder, options.workers, options.dtype, options.rounds, out / f"serve-{options.model}.log"
    )
    best = max(run["tokens_per_second"] for run in result["runs"])
    if options.offline:
        result["share_of_offline"] = best / options.offline
        log(f"{options.model}: {best:,.0f} tok/s over HTTP, {best / options.offline:.0%} of the engine alone")
    (out / f"gpu_http-{options.model}.json").write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
