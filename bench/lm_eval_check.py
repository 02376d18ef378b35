"""Compare lm_eval on Syringa with lm_eval on transformers, same weights: `python -m bench.lm_eval_check`.

A small multiple-choice task, over HTTP with lm_eval's `local-completions` against `syringa serve --dtype fp32`, and in
process with its `hf` model. Accuracies must be equal. lm_eval is installed on first use into `.venvs/lm-eval` (a minute
or two, 2 GB).
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from bench.peers import TORCH, make_venv, run_pip, run_step
from syringa.bench.processes import start
from syringa.bench.runner import syringa_server
from syringa.errors import StartupError
from syringa.modelfiles import describe, load_tokenizer, locate
from tests.reference import reference_model

LM_EVAL, TRANSFORMERS = "0.4.13", "5.22.2"
QUESTIONS = Path(__file__).resolve().parents[1] / "tests" / "data" / "questions.jsonl"
STREAMS = 4
TOLERANCE = 5e-3  # of a choice's log-likelihood


def main() -> int:
    python = _install()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print("writing the model as a Hugging Face folder in fp32 …", flush=True)
        _write_model(folder)
        hf = _run(python, folder, "hf", pretrained=str(folder), dtype="float32", device="cpu")
        server = syringa_server()
        environment = {**server.environment, "SYRINGA_DTYPE": "fp32"}
        with start(msgspec.structs.replace(server, environment=environment), STREAMS) as running:
            where = {"base_url": running.url + "/v1/completions", "model": "default", "num_concurrent": STREAMS}
            syringa = _run(python, folder, "local-completions", tokenizer=str(folder), **where)
    return _compare(syringa, hf)


def _compare(syringa: dict[str, Any], hf: dict[str, Any]) -> int:
    for name, found in (("Syringa, local-completions", syringa), ("transformers, hf", hf)):
        print(f"{name}: acc {found['acc']:.4f}, acc_norm {found['acc_norm']:.4f} on {found['questions']} questions")
    flat = [list(itertools.chain.from_iterable(found["scores"])) for found in (syringa, hf)]
    worst = max(abs(a - b) for a, b in zip(*flat, strict=True))
    print(f"log-likelihoods differ by {worst:.1e} at most")
    same = all(syringa[name] == hf[name] for name in ("acc", "acc_norm", "questions")) and worst < TOLERANCE
    print("the same" if same else "NOT the same")
    return 0 if same else 1


def _install() -> Path:
    python = make_venv("lm-eval")
    # torch first: as a dependency of lm_eval it might be resolved to the CUDA build, several GB.
    run_step("lm-eval", f"torch {TORCH}", lambda: run_pip(python, "install", "--quiet", f"torch=={TORCH}"))
    pins = [f"lm_eval[api,hf]=={LM_EVAL}", f"transformers=={TRANSFORMERS}", f"torch=={TORCH}"]
    run_step("lm-eval", f"lm_eval {LM_EVAL}", lambda: run_pip(python, "install", "--quiet", *pins))
    return python


def _write_model(folder: Path) -> None:
    """Write the weights for transformers, and the tokenizer that the server uses."""
    reference_model().save_pretrained(folder)
    files = locate("default")
    load_tokenizer(files).save(str(folder / "tokenizer.json"))
    special = {key: value for key, value in describe(files).special_tokens.items() if isinstance(value, str)}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False, **special})
    )


def _run(python: Path, folder: Path, kind: str, **arguments: Any) -> dict[str, Any]:
    print(f"lm_eval with its model {kind} …", flush=True)
    result = folder / f"{kind}.json"
    script = str(Path(__file__).with_name("lm_eval_run.py"))
    # -P: modules of this folder must not shadow installed packages.
    given = [f"{name}={value}" for name, value in arguments.items()]
    command = [str(python), "-P", script, str(QUESTIONS), str(result), kind, *given]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "datasets")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StartupError(f"lm_eval failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    try:
        sys.exit(main())
    except StartupError as error:
        sys.exit(f"error: {error.message}")
