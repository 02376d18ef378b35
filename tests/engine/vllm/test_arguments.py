"""Settings of a model as engine arguments of vLLM."""

from __future__ import annotations

import os
from typing import Any

import pytest

from syringa.engine.vllm.arguments import check_device, engine_arguments, set_environment
from syringa.engine.vllm.memory import CPU_CACHE_BYTES
from syringa.engine.worker.options import WorkerOptions
from syringa.errors import ConfigError
from syringa.modelfiles import ModelFiles

KNOWN = ("model", "tensor_parallel_size", "gpu_memory_utilization", "dtype", "_api_process_count")
FOLDER = ModelFiles("m", "/models/m", "folder")


def arguments(device: str = "cuda", **settings: Any) -> dict[str, Any]:
    return engine_arguments(WorkerOptions(socket="", model="m", **settings), FOLDER, KNOWN, device=device)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"dtype": "bf16"}, {"dtype": "bfloat16"}),
        ({"dtype": "fp8"}, {"dtype": "auto", "quantization": "fp8"}),
        ({"max_model_len": 4096}, {"max_model_len": 4096}),
        ({"kv_cache_gb": 1.5}, {"kv_cache_memory_bytes": 1536 << 20}),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8"}),
        ({"gpu_memory_fraction": 0.5}, {"gpu_memory_utilization": 0.5}),
        ({"max_running": 8, "step_tokens": 1024}, {"max_num_seqs": 8, "max_num_batched_tokens": 1024}),
        ({"prefix_caching": False}, {"enable_prefix_caching": False}),
        ({"engine_args": {"dtype": "float16", "tensor_parallel_size": 2}}, {"dtype": "float16"}),
    ],
)
def test_settings_become_engine_arguments(settings: dict[str, Any], expected: dict[str, Any]) -> None:
    found = arguments(**settings)
    assert {name: found[name] for name in expected} == expected
    assert found["model"] == "/models/m"
    assert found["structured_outputs_config"] == {"backend": "guidance"}


def test_what_is_not_set_is_left_to_vllm() -> None:
    unset = {"max_model_len", "kv_cache_memory_bytes", "gpu_memory_utilization", "max_num_batched_tokens"}
    assert not unset & arguments().keys()


def test_cache_on_a_cpu_does_not_take_all_memory() -> None:
    assert arguments("cpu")["kv_cache_memory_bytes"] == CPU_CACHE_BYTES
    assert "kv_cache_memory_bytes" not in arguments("cpu", engine_args={"gpu_memory_utilization": 0.4})


@pytest.mark.parametrize("name", ["tensor_paralel_size", "_api_process_count"])
def test_unknown_engine_argument_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine_args\.{name}: this version of vLLM has no such engine argument"):
        arguments(engine_args={name: 2})


def test_gguf_file_is_refused() -> None:
    options = WorkerOptions(socket="", model="m")
    with pytest.raises(ConfigError, match="GGUF"):
        engine_arguments(options, ModelFiles("m", "/m.gguf", "gguf"), KNOWN, device="cpu")


def test_device_other_than_that_of_vllm_is_refused() -> None:
    check_device("auto", "cpu")
    check_device("cuda", "cuda")
    with pytest.raises(ConfigError, match="built for 'cpu'"):
        check_device("cuda", "cpu")


def test_environment_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_NO_USAGE_STATS", "VLLM_LOGGING_LEVEL", "HF_HUB_OFFLINE", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    set_environment(WorkerOptions(socket="", model="m", threads=2))
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
    assert (os.environ["OMP_NUM_THREADS"], os.environ["VLLM_CPU_OMP_THREADS_BIND"]) == ("7", "nobind")
