"""What `run`, `chat` and `pull` do with models of the Hub before they download them, and afterwards."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from syringa.cli.models import ensure_model
from syringa.engine.processes import startup_plan
from syringa.engine.processes.nvml import GpuMemory
from syringa.errors import ModelError
from syringa.modelfiles import locate
from tests.cli.conftest import Result
from tests.cli.tiny_model import write_model
from tests.modelfiles.fake_hub import FakeHub, fake_hub
from tests.modelfiles.gguf_builder import TENSORS, gguf, llama

GB = 10**9
GLM = "org/GLM-GGUF:Q4_K_M"
GLM_REFUSED = "the architecture 'glm4moe' does not run from GGUF; these do: llama, mistral, qwen2, "
LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
OLMO_CONFIG = {
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": 64,
    "max_position_embeddings": 512,
}
MAMBA_CONFIG = {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1}


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A Hub with a model that runs and one that does not, and a machine with 16 GB of free memory and no GPU."""
    monkeypatch.setenv("SYRINGA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(startup_plan, "available_memory", lambda: 16 * GB)
    monkeypatch.setattr(startup_plan, "gpu_memories", list)
    monkeypatch.setattr(startup_plan, "kernel_variant", lambda: "avx2")
    with fake_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.repositories["org/llama-GGUF"] = {"llama-Q4_K_M.gguf": gguf(llama(), TENSORS)}
        server.repositories["org/GLM-GGUF"] = {"GLM-Q4_K_M.gguf": gguf(llama(general__architecture="glm4moe"))}
        yield server


@pytest.fixture
def _no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))


def add_folder(hub: FakeHub, config: dict[str, Any], **files: bytes) -> None:
    hub.repositories["org/folder"] = {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": b"{ }",
        "model.safetensors": bytes(5000),
        **files,
    }


def refusal(model: str = "org/folder", **settings: Any) -> str:
    """Return why a model is not downloaded, for a command that would run it."""
    with pytest.raises(ModelError) as raised:
        ensure_model({"model": model, **settings}, None)
    with pytest.raises(ModelError):
        locate(model)
    return raised.value.message


def test_model_that_runs_is_downloaded(hub: FakeHub, syringa: Callable[..., Result]) -> None:
    result = syringa("pull", "org/llama-GGUF")
    path = locate("org/llama-GGUF").path
    assert result.err.splitlines()[-1] == f"org/llama-GGUF is at {path}"
    assert syringa("pull", "org/llama-GGUF") == (0, "", f"org/llama-GGUF is at {path}\n")
    hub.requests.clear()
    ensure_model({"model": "org/llama-GGUF"}, None)
    assert hub.requests == []


@pytest.mark.parametrize("arguments", [("run", GLM, "hi"), ("chat", GLM)])
def test_gguf_of_an_unsupported_architecture_is_refused_by_its_first_bytes(
    hub: FakeHub, arguments: tuple[str, ...], error_of: Callable[..., str]
) -> None:
    hub.sizes["GLM-Q4_K_M.gguf"] = 70 * GB
    assert error_of(*arguments).startswith(f"syringa: {GLM}: {GLM_REFUSED}")
    assert [range for _, path, range in hub.requests if path.endswith(".gguf")] == ["bytes=0-65535"]


def test_pull_of_an_unsupported_architecture_downloads_and_fails(hub: FakeHub, syringa: Callable[..., Result]) -> None:
    status, out, err = syringa("pull", GLM)
    path = locate(GLM).path
    assert (status, out) == (1, "")
    lines = err.splitlines()
    assert lines[0].startswith(f"syringa: warning: {GLM}: {GLM_REFUSED}")
    assert lines[1].startswith(f"Downloading {GLM}: ")
    assert lines[2] == f"{GLM} is at {path} (see the warning above)"
    assert lines[3].startswith(f"syringa: {path}: {GLM_REFUSED}")
    assert len(lines) == 4


def test_pull_with_settings_that_cannot_be_read_warns_and_downloads(
    hub: FakeHub, syringa: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYRINGA_CONFIG", "/nowhere/syringa.toml")
    result = syringa("pull", "org/llama-GGUF:Q4_K_M")
    assert result.status == 0, result.err
    assert "syringa: warning: " in result.err
    assert "/nowhere/syringa.toml" in result.err
    assert locate("org/llama-GGUF:Q4_K_M").kind == "gguf"


def test_gguf_that_does_not_fit_in_memory_is_refused(hub: FakeHub) -> None:
    hub.repositories["org/llama-GGUF"] = {
        f"llama-Q4_K_M-0000{part}-of-00002.gguf": gguf(llama(), TENSORS) + bytes(part) for part in (1, 2)
    }
    hub.sizes = dict.fromkeys(hub.repositories["org/llama-GGUF"], 21 * GB)
    reason = (
        "org/llama-GGUF:Q4_K_M needs 42.4 GB of memory (42.0 GB for its weights in gguf) and 16.0 GB are free: "
        "gpt-oss-20b of `syringa models --available` fits (12.9 GB)"
    )
    assert refusal("org/llama-GGUF:Q4_K_M") == reason
    assert "for its weights in bf16" in refusal("org/llama-GGUF:Q4_K_M", dtype="bf16")


def test_gguf_that_does_not_fit_on_the_gpu_is_refused(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_plan, "gpu_memories", lambda: [GpuMemory(24 * GB, 25 * GB, "0")])
    hub.sizes["llama-Q4_K_M.gguf"] = 21 * GB
    assert "org/llama-GGUF:Q4_K_M needs 68.3 GB of GPU memory" in refusal("org/llama-GGUF:Q4_K_M")
    assert "--dtype fp8 would fit" not in refusal("org/llama-GGUF:Q4_K_M")


def test_model_for_a_gpu_is_not_refused_for_its_size(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_plan, "gpu_memories", lambda: [GpuMemory(70 * GB, 80 * GB, "0")])
    monkeypatch.setattr(startup_plan, "available_memory", lambda: 0)
    ensure_model({"model": "org/llama-GGUF"}, None)
    assert locate("org/llama-GGUF")


@pytest.mark.parametrize(
    ("architecture", "gpu"),
    [("olmo2", False), ("olmo2", True), ("qwen2moe", False)],
)
@pytest.mark.usefixtures("_no_transformers")
def test_gguf_that_needs_the_extra_is_refused_without_it(
    hub: FakeHub, architecture: str, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gpu:
        monkeypatch.setattr(startup_plan, "gpu_memories", lambda: [GpuMemory(70 * GB, 80 * GB, "0")])
    hub.repositories["org/llama-GGUF"] = {"llama-Q4_K_M.gguf": gguf({"general.architecture": architecture})}
    assert "pip install 'syringa[models]'" in refusal("org/llama-GGUF")


def test_beginning_that_does_not_name_an_architecture_is_no_reason(hub: FakeHub) -> None:
    hub.repositories["org/llama-GGUF"] = {
        "llama-Q4_K_M.gguf": gguf({"general.description": "x" * 70_000, **llama()}, TENSORS)
    }
    ensure_model({"model": "org/llama-GGUF"}, None)
    assert locate("org/llama-GGUF")


def test_server_without_ranges_is_asked_for_the_beginning_only(hub: FakeHub) -> None:
    hub.ignores_ranges = True
    hub.repositories["org/GLM-GGUF"]["GLM-Q4_K_M.gguf"] += bytes(1 << 20)
    assert GLM_REFUSED in refusal(GLM)


def test_folder_that_does_not_fit_in_memory_is_refused_by_its_config(hub: FakeHub) -> None:
    add_folder(hub, LLAMA_CONFIG)
    assert refusal(dtype="bf16") == (
        "org/folder needs 16.9 GB of memory (16.1 GB for its weights in bf16) and 16.0 GB are free: "
        "--dtype int8 would fit (9.38 GB)"
    )
    assert hub.fetched() == {"config.json"}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "weights quantized with 'bitsandbytes' cannot be"),
        ({"hidden_size": None}, "config.json has no 'hidden_size'"),
        ({"architectures": None}, "org/folder/config.json does not name an architecture"),
    ],
)
def test_folder_whose_config_cannot_be_used_is_refused(hub: FakeHub, config: dict[str, Any], reason: str) -> None:
    add_folder(hub, LLAMA_CONFIG | config)
    assert refusal().startswith(reason)
    assert hub.fetched() == {"config.json"}


def test_folder_that_transformers_definition_does_not_run_is_refused(hub: FakeHub) -> None:
    add_folder(hub, MAMBA_CONFIG)
    assert refusal() == (
        "org/folder: MambaForCausalLM cannot be run: it has linear_attention layers, "
        "and only plain attention is supported"
    )
    assert hub.fetched() == {"config.json"}


def test_folder_that_transformers_definition_runs_is_downloaded(hub: FakeHub) -> None:
    add_folder(hub, OLMO_CONFIG)
    ensure_model({"model": "org/folder"}, None)
    assert locate("org/folder")


@pytest.mark.usefixtures("_no_transformers")
def test_folder_that_needs_the_extra_is_refused_without_it(hub: FakeHub) -> None:
    add_folder(hub, OLMO_CONFIG)
    assert "pip install 'syringa[models]'" in refusal()


def test_size_of_a_folder_of_transformers_is_that_of_its_files(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_plan, "unsupported_reason", lambda folder: None)
    add_folder(hub, OLMO_CONFIG | {"dtype": "bfloat16"})
    hub.sizes["model.safetensors"] = 40 * GB
    # 20 billion weights, which are read in bf16 before they become int8.
    assert "needs 40.4 GB of memory (20.0 GB for its weights in int8)" in refusal()


def test_embedding_model_is_checked_by_its_modules(hub: FakeHub) -> None:
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}, {"type": "x.LSTM", "path": "1_LSTM"}]
    add_folder(hub, LLAMA_CONFIG, **{"modules.json": json.dumps(modules).encode()})
    assert "LSTM" in refusal()
    assert hub.fetched() == {"config.json", "modules.json"}


def test_missing_repository_is_one_line(error_of: Callable[..., str]) -> None:
    for command in (("pull", "org/missing"), ("run", "org/missing", "hi")):
        assert error_of(*command).startswith("syringa: org/missing is not on the Hugging Face Hub")


@pytest.mark.parametrize("name", ["hf.co/org/llama-GGUF:Q4_K_M", "https://huggingface.co/org/llama-GGUF"])
@pytest.mark.usefixtures("hub")
def test_pull_takes_addresses(name: str, syringa: Callable[..., Result]) -> None:
    result = syringa("pull", name)
    assert result.status == 0
    assert "org/llama-GGUF" in result.err
    assert locate("org/llama-GGUF").path in result.err


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3:0.6b"])
def test_model_of_the_catalog_is_pulled_by_its_name(name: str, hub: FakeHub, syringa: Callable[..., Result]) -> None:
    content = gguf(llama(), TENSORS)
    hub.repositories["unsloth/Qwen3-0.6B-GGUF"] = {
        "Qwen3-0.6B-Q4_K_M.gguf": content,
        "Qwen3-0.6B-Q8_0.gguf": content + bytes(64),
        "imatrix_unsloth.gguf": content + bytes(32),
    }
    result = syringa("pull", name)
    path = locate("qwen3-0.6b").path
    assert (result.status, result.err.splitlines()[-1]) == (0, f"qwen3-0.6b is at {path}")
    assert Path(path).name == "Qwen3-0.6B-Q4_K_M.gguf"
    assert hub.fetched() == {"Qwen3-0.6B-Q4_K_M.gguf"}


def test_run_downloads_a_model_and_answers(hub: FakeHub, syringa: Callable[..., Result], tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf")
    hub.repositories["org/tiny-GGUF"] = {"tiny-F32.gguf": (tmp_path / "tiny.gguf").read_bytes()}
    options = ("--dtype", "fp32", "--threads", "1", "--max-tokens", "4", "--allowed-token-ids", "2")
    result = syringa("run", "hf.co/org/tiny-GGUF", "ab", *options)
    assert (result.status, result.out) == (0, "aaaa\n")
    assert f"org/tiny-GGUF is at {locate('org/tiny-GGUF').path}" in result.err


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        (("run", "org/llama-GGUF", "hi"), "org/llama-GGUF"),
        (("chat", "qwen3-0.6b"), "unsloth/Qwen3-0.6B-GGUF:Q4_K_M"),
        (("serve", "--port", "0"), "default"),
    ],
)
def test_offline_keeps_commands_from_downloads(
    arguments: tuple[str, ...], model: str, hub: FakeHub, error_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # restored at the end
    # Not by attribute: the package has a function of the same name.
    monkeypatch.setattr(importlib.import_module("syringa.modelfiles.locate"), "_package_folders", lambda name: [])
    assert error_of(*arguments, "--offline") == (
        f"syringa: {model} is not on this machine, and --offline or HF_HUB_OFFLINE is set\n"
    )
    assert hub.requests == []


def test_remove_deletes_the_files_of_a_model(syringa: Callable[..., Result], tmp_path: Path) -> None:
    syringa("pull", "org/llama-GGUF")
    path = locate("org/llama-GGUF").path
    assert syringa("remove", "hf.co/org/llama-GGUF") == (0, "", f"Deleted {path}\n")
    assert not Path(path).exists()
    assert not list((tmp_path / "hub").rglob("*.gguf"))
    assert syringa("remove", "org/llama-GGUF").status == 1


def test_remove_leaves_files_of_the_user(error_of: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "mine.gguf").write_bytes(gguf(llama(), TENSORS))
    assert error_of("remove", "mine.gguf") == "syringa: the files of mine were not pulled, and are not deleted\n"
    assert (tmp_path / "mine.gguf").exists()


def test_vllm_decides_itself_what_runs(hub: FakeHub) -> None:
    add_folder(hub, MAMBA_CONFIG)
    Path("syringa.toml").write_text('[[models]]\nid = "mamba"\npath = "org/folder"\nengine = "vllm"\n')
    ensure_model({"model": "mamba"}, None)
    assert locate("org/folder")
