"""`syringa serve` downloads the default model at its first start."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from syringa.cli import models
from syringa.cli.serve import download_default_model
from syringa.config import ModelSpec
from syringa.errors import ModelError
from tests.cli.conftest import Result

# Not by attribute: the package has a function of the same name.
locate = importlib.import_module("syringa.modelfiles.locate")


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Models that were downloaded; the folder of models is empty, and stays so."""
    names: list[str] = []
    monkeypatch.setenv("SYRINGA_HOME", str(tmp_path / "empty"))
    monkeypatch.setattr(locate, "default_path", lambda: None)
    monkeypatch.setattr(models, "download", names.append)
    return names


def test_serve_downloads_the_default_model_when_it_is_missing(downloads: list[str]) -> None:
    download_default_model(ModelSpec(id="", path="default"))
    assert downloads == ["default"]


def test_serve_downloads_no_model_that_is_present(
    downloads: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(locate, "default_path", lambda: tmp_path / "model.gguf")
    download_default_model(ModelSpec(id="", path="default"))
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
