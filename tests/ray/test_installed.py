"""Without Ray, or with one that was not tested, commands end with one line."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from syringa.cli import main
from syringa.engine.processes.managed_process import EXIT_CANNOT_START
from syringa.errors import StartupError
from syringa.fleet.bridge_protocol import BridgeOptions
from syringa.ray import bridge, installed

COMMANDS = [["start"], ["join", "host", "--token", "x"], ["status"]]


def set_version(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def find(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr("importlib.metadata.version", find)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, "syringa: a cluster needs Ray: pip install 'syringa[ray]'\n"),
        ("2.59.1", "syringa: a cluster needs Ray 2.60.*, and 2.59.1 is installed: pip install 'syringa[ray]'\n"),
    ],
    ids=["missing", "other version"],
)
def test_cluster_commands_say_that_ray_is_needed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    version: str | None,
    message: str,
) -> None:
    set_version(monkeypatch, version)
    with pytest.raises(SystemExit) as exit_:
        main(["cluster", *command])
    assert exit_.value.code == 1
    assert capsys.readouterr().err == message


def test_bridge_cannot_start_without_ray(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    set_version(monkeypatch, None)
    options = BridgeOptions(socket="x", cluster_dir=str(tmp_path))
    monkeypatch.setattr("syringa.engine.processes.managed_process.attach_to_parent", lambda _: options)
    monkeypatch.setattr("syringa.logs.configure", lambda *_: None)
    with pytest.raises(SystemExit) as exit_:
        bridge.main()
    assert exit_.value.code == EXIT_CANNOT_START
    assert capsys.readouterr().err == "syringa: a cluster needs Ray: pip install 'syringa[ray]'\n"


def test_the_installed_ray_is_tested() -> None:
    installed.check_installed()


@pytest.mark.parametrize(("version", "accepted"), [("2.60.0", True), ("2.60.3", True), ("2.6.0", False), ("3", False)])
def test_only_tested_versions_are_accepted(monkeypatch: pytest.MonkeyPatch, version: str, accepted: bool) -> None:
    set_version(monkeypatch, version)
    if accepted:
        installed.check_installed()
    else:
        with pytest.raises(StartupError, match=version):
            installed.check_installed()


def test_the_extra_has_the_tested_range() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (requirement,) = project["optional-dependencies"]["ray"]
    assert requirement == "ray>=2.60,<2.61"
    assert requirement in project["optional-dependencies"]["dev"]
    assert installed.VERSIONS == ("2.60",)
