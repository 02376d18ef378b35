"""The engine of a model in `[[models]]`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from syringa.config import Config, ModelSpec, load, read_model
from syringa.config.engines import parallel_gpus
from syringa.engine.worker.options import WorkerOptions
from syringa.errors import ConfigError


def read(folder: Path, lines: str, top: str = "") -> ModelSpec:
    (folder / "syringa.toml").write_text(f'{top}\n[[models]]\nid = "m"\npath = "p"\n{lines}')
    return load(environ={}, folder=folder).models[0]


def test_engine_of_a_model_reaches_its_worker(tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    lines = (
        f'engine = "vllm"\npython = "{python}"\nengine_args = {{tensor_parallel_size = 2, pipeline_parallel_size = 3}}'
    )
    options = WorkerOptions.from_config(read(tmp_path, lines), Config())
    assert (options.engine, options.python) == ("vllm", str(python))  # not what the link points to
    assert options.engine_args == {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    assert options.gpus == 6
    assert WorkerOptions.from_config(read(tmp_path, ""), Config()).gpus == 1
    assert parallel_gpus({"tensor_parallel_size": 2, "prefill_context_parallel_size": 2}) == 4
    assert parallel_gpus({"tensor_parallel_size": 4, "decode_context_parallel_size": 2}) == 4


def test_relative_interpreter_is_that_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    assert read(tmp_path, 'engine = "vllm"\npython = "python"').python == str(tmp_path / "python")


def test_interpreter_in_a_cluster_is_that_of_the_nodes(tmp_path: Path) -> None:
    assert read(tmp_path, 'engine = "vllm"\npython = "/no/such/file"', "cluster = true").python == "/no/such/file"


@pytest.mark.parametrize(
    ("lines", "top", "message"),
    [
        ('engine = "sglang"', "", 'engine "sglang": expected one of syringa, vllm'),
        ('python = "/usr/bin/python"', "", 'python "/usr/bin/python": only for models with engine = "vllm"'),
        ("engine_args = {a = 1}", "", 'engine_args {"a": 1}: only for models with engine = "vllm"'),
        ('engine = "vllm"\npython = "/no/such/file"', "", 'python "/no/such/file": no such executable file'),
        ('engine = "vllm"\npython = "/etc"', "", 'python "/etc": no such executable file'),
        ('engine = "vllm"\nengine_args = 3', "", "engine_args 3: expected a table"),
        ('engine = "vllm"\nengine_args = {model = "x"}', "", 'engine_args.model "x": not allowed here: set path'),
        (
            'engine = "vllm"\nengine_args = {tensor_parallel_size = 0}',
            "",
            "engine_args.tensor_parallel_size 0: expected a whole number, at least 1",
        ),
        (
            'engine = "vllm"\nengine_args = {prefill_context_parallel_size = "2"}',
            "",
            'engine_args.prefill_context_parallel_size "2": expected a whole number, at least 1',
        ),
        (
            'engine = "vllm"\nengine_args = {data_parallel_size_local = 2}',
            "",
            "engine_args.data_parallel_size_local 2: not allowed here: set replicas instead",
        ),
        (
            'engine = "vllm"\nengine_args = {nnodes = 2}',
            "",
            "engine_args.nnodes 2: not allowed here: a replica runs on one node",
        ),
        ('engine = "vllm"\ndtype = "int8"', "", 'dtype "int8": the model runs on vLLM, which has no equivalent'),
        ('engine = "vllm"', 'dtype = "gguf"', 'dtype "gguf": the model runs on vLLM, which has no equivalent'),
        ('engine = "vllm"\ndeterministic = true', "", "deterministic true: the model runs on vLLM"),
        ('engine = "vllm"\nkv_cache_tokens = 9', "", "set kv_cache_gb instead"),
    ],
)
def test_invalid_engine_settings(tmp_path: Path, lines: str, top: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, lines, top)
    assert f"models[0].{message}" in caught.value.message or message in caught.value.message


@pytest.mark.parametrize("fields", [{"engine": "vllm"}, {"python": "/bin/sh"}, {"engine_args": {"a": 1}}])
def test_model_that_is_added_at_run_time_names_no_program(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="can only be set in the configuration file") as caught:
        read_model({"id": "m", "path": "p", **fields}, Config())
    assert caught.value.param == next(iter(fields))
    assert read_model({"id": "m", "path": "p", "engine": "syringa"}, Config()).engine == "syringa"
