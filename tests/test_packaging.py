"""The Dockerfiles, the compose file and the build agree with the code. scripts/container-test builds and runs them."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shlex
import subprocess
import tomllib
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from syringa.cli.app import app
from syringa.config import load
from syringa.engine.cpu.native import FOLDER, REQUIRED_FLAGS
from syringa.http.endpoints import ENDPOINTS
from syringa.http.routing import Access

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCKERFILES = ["Dockerfile", "Dockerfile.cuda"]


def instructions(dockerfile: str, name: str) -> list[str]:
    """Return the arguments of each instruction of that name, with continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / dockerfile).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith(name + " ")]


def environment(dockerfile: str) -> dict[str, str]:
    """Return the environment of the last stage."""
    return dict(word.split("=", 1) for word in shlex.split(instructions(dockerfile, "ENV")[-1]))


def compilers() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("compilers", ROOT / "build_tools" / "compilers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_dockerfile_sets_only_known_settings(dockerfile: str, tmp_path: Path) -> None:
    config = load(environ=environment(dockerfile), folder=tmp_path)  # raises for an unknown SYRINGA_ variable
    assert config.host == "0.0.0.0"
    assert config.database == "/data/syringa.db"
    assert not config.api_key  # a key in an image would be the same for everyone


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_dockerfile_runs_an_existing_command_as_its_own_user(dockerfile: str) -> None:
    assert json.loads(instructions(dockerfile, "ENTRYPOINT")[-1]) == ["syringa"]
    assert "syringa" in PYPROJECT["project"]["scripts"]
    [command] = json.loads(instructions(dockerfile, "CMD")[-1])
    assert command in {each.name or each.callback.__name__ for each in app.registered_commands if each.callback}
    user = instructions(dockerfile, "USER")[-1]
    assert any(line.endswith(f" {user}") for line in instructions(dockerfile, "RUN") if line.startswith("useradd"))


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_dockerfile_exposes_and_checks_the_port_that_it_listens_on(dockerfile: str) -> None:
    assert instructions(dockerfile, "EXPOSE") == [environment(dockerfile)["SYRINGA_PORT"]]
    [check] = instructions(dockerfile, "HEALTHCHECK")
    [path] = re.findall(r"'(/\w+)'", check)
    assert "SYRINGA_PORT" in check
    assert [each.access for each in ENDPOINTS if each.path == path] == [Access.PUBLIC]


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_dockerfile_keeps_all_data_in_its_volume(dockerfile: str) -> None:
    [volume] = instructions(dockerfile, "VOLUME")
    paths = {name: value for name, value in environment(dockerfile).items() if value.startswith("/") and name != "PATH"}
    assert {"SYRINGA_HOME", "SYRINGA_DATABASE", "HF_HOME"} <= paths.keys()
    assert all(Path(path).is_relative_to(volume) for path in paths.values())
    assert instructions(dockerfile, "WORKDIR")[-1] == volume  # syringa.toml is read from there


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_dockerfile_copies_files_that_exist_and_are_not_ignored(dockerfile: str) -> None:
    copies = [line.split()[:-1] for line in instructions(dockerfile, "COPY") if not line.startswith("--from")]
    sources = {source for line in copies for source in line}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sources == allowed
    assert all((ROOT / source).exists() for source in sources)
    assert PYPROJECT["project"]["readme"] in sources
    assert set(PYPROJECT["build-system"]["backend-path"]) <= sources


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_dockerfile_installs_existing_extras(dockerfile: str) -> None:
    extras = dict(line.split("=", 1) for line in instructions(dockerfile, "ARG"))["EXTRAS"]
    assert set(extras.split(",")) <= PYPROJECT["project"]["optional-dependencies"].keys()


def test_compose_file_configures_the_server_through_known_settings(tmp_path: Path) -> None:
    compose: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    server, database = compose["services"]["syringa"], compose["services"]["database"]
    given = {"SYRINGA_API_KEY": "key", "POSTGRES_PASSWORD": "secret"}

    def substitute(value: str) -> str:
        return re.sub(r"\$\{(\w+)[^}]*\}", lambda match: given[match[1]], value)

    config = load(environ={name: substitute(value) for name, value in server["environment"].items()}, folder=tmp_path)
    assert config.api_key == ("key",)
    credentials = {name: substitute(value) for name, value in database["environment"].items()}
    assert config.database == (
        f"postgresql://{credentials['POSTGRES_USER']}:{credentials['POSTGRES_PASSWORD']}@database/{credentials['POSTGRES_DB']}"
    )


def test_compose_file_requires_its_secrets() -> None:
    text = (ROOT / "compose.yaml").read_text()
    for name in ("SYRINGA_API_KEY", "POSTGRES_PASSWORD"):
        uses = re.findall(rf"\$\{{{name}([^}}]*)\}}", text)
        assert uses
        assert all(each.startswith(":?") for each in uses)


def test_compose_file_mounts_named_volumes_and_publishes_the_port() -> None:
    compose: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    mounted = {volume.split(":")[0] for service in compose["services"].values() for volume in service["volumes"]}
    assert mounted == compose["volumes"].keys()
    server = compose["services"]["syringa"]
    assert server["ports"][0].split(":")[-1] == environment("Dockerfile")["SYRINGA_PORT"]
    assert server["volumes"] == [f"data:{instructions('Dockerfile', 'VOLUME')[0]}"]
    assert server["build"]["args"].keys() <= {line.split("=")[0] for line in instructions("Dockerfile", "ARG")}
    drain = load(environ={}, folder=ROOT / "tests").drain_timeout
    assert int(server["stop_grace_period"].removesuffix("s")) > drain + 10


def test_kernel_variants_are_those_that_the_engine_loads() -> None:
    if platform.machine() == "x86_64":
        assert compilers().variants().keys() == REQUIRED_FLAGS.keys()
    assert "base" in compilers().variants()


@pytest.mark.parametrize("portable", ["", "1"])
def test_kernels_are_not_compiled_for_the_building_machine(portable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYRINGA_PORTABLE_BUILD", portable)
    build = compilers()
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: name == "ziglang")
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    compiler = build.find_compiler()
    assert "ziglang" in compiler
    assert (
        "-target" in compiler or "-mcpu=baseline" in compiler
    )  # without one of them, ziglang compiles for this processor
    for flags in build.variants().values():
        for command in build.build_commands(compiler, flags, Path("kernels.cpp"), Path("kernels.so")):
            assert not any("native" in word for word in command)


def test_portable_build_does_not_use_the_system_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++")
    build = compilers()
    monkeypatch.delenv("SYRINGA_PORTABLE_BUILD", raising=False)
    assert not build.needs_ziglang()
    assert build.find_compiler() == ["g++"]
    monkeypatch.setenv("SYRINGA_PORTABLE_BUILD", "1")
    assert build.needs_ziglang()


def test_package_data_covers_every_file_of_the_package() -> None:
    package = ROOT / "syringa"
    covered = {
        path for pattern in PYPROJECT["tool"]["setuptools"]["package-data"]["syringa"] for path in package.glob(pattern)
    }
    built = {".py", ".pyc", ".so"}
    files = {path for path in package.rglob("*") if path.is_file() and path.suffix not in built}
    assert files - covered == set()


def test_wheel_contains_every_kernel_variant() -> None:
    """Check the wheel that the variable WHEEL names, for example one of `make wheel`."""
    if not os.environ.get("WHEEL"):
        pytest.skip("no wheel: WHEEL=dist/… names one")
    wheel = Path(os.environ["WHEEL"])
    assert re.fullmatch(r"syringa-[\d.]+-py3-none-manylinux_2_\d+_\w+\.whl", wheel.name)
    folder = FOLDER.relative_to(ROOT).as_posix()
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {f"{folder}/kernels_{name}.so" for name in compilers().variants()} <= names
    assert not any(name.endswith(".o") for name in names)


def test_quickstart_names_the_packages_that_a_fresh_machine_needs() -> None:
    """`scripts/container-test fresh-machine` installs what this line says."""
    lines = re.findall(r"^apt-get install +([^#\n]*)", (ROOT / "docs" / "quickstart.md").read_text(), re.MULTILINE)
    assert lines
    assert {"make", "python3-venv"} <= set(lines[0].split())


@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), ([], 2), (["no-such-command"], 1)])
def test_container_test_explains_its_use(arguments: list[str], status: int) -> None:
    script = ROOT / "scripts" / "container-test"
    result = subprocess.run(["bash", str(script), *arguments], capture_output=True, text=True)
    assert result.returncode == status
    assert "usage: scripts/container-test COMMAND" in result.stdout + result.stderr
