from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from syringa.config import Config, Replicas, load, model_specs, read_model
from syringa.errors import ConfigError


def read(folder: Path, text: str) -> Config:
    (folder / "syringa.toml").write_text(text)
    return load(environ={}, folder=folder)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("3", Replicas(min=3, max=3)),
        ('"3"', Replicas(min=3, max=3)),
        ('"1:3"', Replicas(min=1, max=3)),
        ("{min = 2, max = 4}", Replicas(min=2, max=4)),
        ("{max = 4}", Replicas(min=1, max=4)),
        ("{min = 2}", Replicas(min=2, max=2)),
    ],
)
def test_replicas_are_a_number_a_range_or_a_table(tmp_path: Path, value: str, expected: Replicas) -> None:
    config = read(tmp_path, f"replicas = {value}")
    assert config.replicas == model_specs(config)[0].replicas == expected
    assert msgspec.json.decode(msgspec.json.encode(config), type=Config) == config


@pytest.mark.parametrize(
    "value", ["0", "257", "1.5", "true", '"x"', '"1:"', '"3:1"', "{min = 3, max = 1}", "{minimum = 1}", "[1, 3]"]
)
def test_invalid_replicas_are_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"syringa.toml: replicas .*: expected a number from 1 to 256, MIN:MAX"):
        read(tmp_path, f"replicas = {value}")
    with pytest.raises(ConfigError, match=r"syringa.toml: models\[0\].replicas .*: expected a number from 1 to 256"):
        read(tmp_path, f'[[models]]\nid = "m"\npath = "p"\nreplicas = {value}')


def test_replicas_of_a_flag_or_variable() -> None:
    assert load({"replicas": "1:3"}, environ={}, folder=Path("/nonexistent")).replicas == Replicas(min=1, max=3)
    assert load(environ={"SYRINGA_REPLICAS": "2"}, folder=Path("/nonexistent")).replicas == Replicas(min=2, max=2)
    with pytest.raises(ConfigError, match="--replicas '2:1': expected a number from 1 to 256, or MIN:MAX"):
        load({"replicas": "2:1"}, environ={}, folder=Path("/nonexistent"))


def test_model_inherits_the_replicas_of_the_server(tmp_path: Path) -> None:
    tables = '[[models]]\nid = "a"\npath = "p"\n[[models]]\nid = "b"\npath = "q"\nreplicas = 1'
    config = read(tmp_path, f"replicas = 2\n{tables}")
    assert [str(spec.replicas) for spec in config.models] == ["2", "1"]


@pytest.mark.parametrize("value", [{"min": 1, "max": 3}, "1:3"])
def test_model_added_at_run_time_may_have_replicas(value: Any) -> None:
    spec = read_model({"id": "m", "path": "p", "replicas": value}, Config())
    assert str(spec.replicas) == "1:3"
