"""`syringa serve` before it starts its processes: the download of the default model, and the plan of its memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from syringa.cli import models
from syringa.cli.database_records import DatabaseRecords
from syringa.cli.serve import download_default_models
from syringa.cluster.folder import ClusterFolder
from syringa.config import Config, ModelSpec
from syringa.errors import ModelError
from syringa.fleet.cluster_records import ClusterRecords
from tests.cli.conftest import Result
from tests.embedding_models import write_embedding_folder

# Not by attribute: the package has a function of the same name.
locate = importlib.import_module("syringa.modelfiles.locate")


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Models that were downloaded; the folder of models is empty, and stays so."""
    names: list[str] = []
    monkeypatch.setenv("SYRINGA_HOME", str(tmp_path / "empty"))
    monkeypatch.setattr(locate, "default_path", lambda: None)
    monkeypatch.setattr(locate, "embedding_path", lambda: None)
    monkeypatch.setattr(models, "download", names.append)
    return names


def test_serve_downloads_the_default_model_when_it_is_missing(downloads: list[str]) -> None:
    download_default_models(Config())
    assert downloads == ["default"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Config(embedding_model="embedding"), ["default", "embedding"]),
        (Config(model="embedding"), ["embedding"]),
        (Config(model="x.gguf", embedding_model="all-MiniLM-L6-v2"), ["all-MiniLM-L6-v2"]),
        (Config(model="x.gguf", embedding_model="org/other"), []),
    ],
)
def test_serve_downloads_the_embedding_model_when_it_is_missing(
    downloads: list[str], config: Config, expected: list[str]
) -> None:
    download_default_models(config)
    assert downloads == expected


def test_serve_downloads_no_model_that_is_present(
    downloads: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(locate, "default_path", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(locate, "embedding_path", lambda: tmp_path / "model")
    download_default_models(Config(embedding_model="embedding"))
    assert downloads == []


def test_serve_downloads_no_other_model(downloads: list[str], syringa: Callable[..., Result]) -> None:
    result = syringa("serve", "--model", "org/name", "--port", "0")
    assert result.status != 0
    assert "syringa pull org/name" in result.err
    assert downloads == []


def test_serve_reports_a_failed_download(
    downloads: list[str], monkeypatch: pytest.MonkeyPatch, syringa: Callable[..., Result]
) -> None:
    def fail(model: str) -> None:
        raise ModelError("the default model could not be fetched: no network")

    monkeypatch.setattr(models, "download", fail)
    result = syringa("serve", "--port", "0")
    assert result.status != 0
    assert "no network" in result.err


def test_serve_checks_settings_before_it_downloads(downloads: list[str], syringa: Callable[..., Result]) -> None:
    result = syringa("serve", "--host", "0.0.0.0", "--port", "0")
    assert result.status != 0
    assert "there is no API key yet" in result.err
    assert downloads == []


@pytest.mark.parametrize("cluster", [False, True])
def test_serve_plans_the_memory_of_this_machine_unless_the_model_runs_on_a_cluster(
    cluster: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, syringa: Callable[..., Result]
) -> None:
    def refuse(*_: object) -> None:
        raise ModelError("there is too little memory")

    started: list[ClusterRecords | None] = []

    def run(*_: object, records: ClusterRecords | None, **__: object) -> int:
        started.append(records)
        return 0

    ClusterFolder(tmp_path / "cluster").create("test", ["127.0.0.1"])
    spec = ModelSpec(id="m", path="m", preload=True)
    monkeypatch.setattr("syringa.api.models.specs.serving_specs", lambda config: (spec,))
    monkeypatch.setattr("syringa.cli.serve.check_files", lambda specs: None)
    monkeypatch.setattr("syringa.engine.processes.startup_plan.plan_model", refuse)
    monkeypatch.setattr("syringa.engine.processes.supervisor.run", run)
    options = ["--cluster", "--cluster-dir", str(tmp_path / "cluster")] if cluster else []
    result = syringa("serve", "--model", "m", "--port", "0", *options)
    assert (result.status == 0) == cluster
    assert ("too little memory" in result.err) == (not cluster)
    assert [isinstance(records, DatabaseRecords) for records in started] == ([True] if cluster else [])


@pytest.mark.parametrize("command", ["run", "complete"])
def test_commands_for_text_refuse_an_embedding_model(
    command: str, tmp_path: Path, syringa: Callable[..., Result]
) -> None:
    folder = write_embedding_folder(tmp_path / "tiny")
    arguments = [folder, "hi"] if command == "run" else ["hi", "--model", folder]
    result = syringa(command, *arguments)
    assert result.status != 0
    assert f"tiny generates no text: serve it with `syringa serve --embedding-model {folder}`" in result.err
