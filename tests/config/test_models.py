from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from syringa.config import Config, ModelSpec, Prices, Replicas, load, model_specs, read_model, single_model_spec
from syringa.errors import ConfigError, InvalidRequest

FILE = """
dtype = "bf16"
threads = 3
[[models]]
id = "small"
path = "default"
aliases = ["s", "tiny"]
prices = {input = 1, cached-input = 0.1, output = 2.5}
[[models]]
id = "org/large"
path = "large.gguf"
dtype = "int8"
preload = true
idle_seconds = 60
[models.defaults]
temperature = 0.7
stop = ["x"]
""".replace("cached-input", "cached_input")


def read(folder: Path, text: str, flags: dict[str, Any] | None = None, defaults: Any = None) -> Config:
    (folder / "syringa.toml").write_text(text)
    return load(flags, environ={}, folder=folder, read_defaults=defaults)


def test_model_tables(tmp_path: Path) -> None:
    small, large = read(tmp_path, FILE).models
    assert small == ModelSpec(
        id="small", path="default", aliases=("s", "tiny"), dtype="bf16", threads=3,
        prices=Prices(input=1, cached_input=0.1, output=2.5),
    )  # fmt: skip
    assert (large.dtype, large.threads, large.preload, large.idle_seconds) == ("int8", 3, True, 60)
    assert large.defaults == {"temperature": 0.7, "stop": ["x"]}


def test_default_model_is_first_unless_named(tmp_path: Path) -> None:
    assert [each.id for each in model_specs(read(tmp_path, FILE))] == ["small", "org/large"]
    for name in ("org/large", "default"):
        ids = [each.id for each in model_specs(read(tmp_path, FILE, {"model": name}))]
        assert ids == (["org/large", "small"] if name != "default" else ["small", "org/large"])
    assert model_specs(read(tmp_path, FILE, {"model": "tiny"}))[0].id == "small"
    with pytest.raises(ConfigError, match=r"expected the id of one of the .*: small, org/large"):
        model_specs(read(tmp_path, FILE, {"model": "other"}))
    with pytest.raises(ConfigError, match="served_model_name"):
        model_specs(read(tmp_path, FILE, {"served_model_name": ["x"]}))


def test_model_specs_have_embedding_model_last_and_preloaded(tmp_path: Path) -> None:
    config = Config(
        embedding_model="embedding",
        device="cpu",
        threads=2,
        dtype="gguf",
        model="x.gguf",
        replicas=Replicas(min=2, max=2),
    )
    first, last = model_specs(config)
    assert (first.path, last.id, last.path) == ("x.gguf", "", "embedding")
    assert (last.preload, last.idle_seconds, last.device, last.threads) == (True, 0.0, "cpu", 2)
    assert (last.dtype, last.replicas) == ("auto", Replicas())  # those settings are about the other model
    specs = model_specs(read(tmp_path, FILE, {"embedding_model": "path/of/folder"}))
    assert [each.path for each in specs][2:] == ["path/of/folder"]


def test_model_specs_preload_embedding_model_that_is_one_of_the_models(tmp_path: Path) -> None:
    specs = model_specs(read(tmp_path, FILE, {"embedding_model": "org/large"}))
    assert [(each.id, each.preload, each.idle_seconds) for each in specs] == [
        ("small", True, 0.0),
        ("org/large", True, 0.0),
    ]


def test_single_model_spec(tmp_path: Path) -> None:
    assert single_model_spec(read(tmp_path, FILE)).id == "small"
    assert single_model_spec(read(tmp_path, FILE, {"model": "org/large"})).path == "large.gguf"
    assert single_model_spec(read(tmp_path, FILE, {"model": "other.gguf"})).path == "other.gguf"


def test_preload_and_idle_defaults(tmp_path: Path) -> None:
    text = FILE + '[[models]]\nid = "third"\npath = "x"\n'
    plans = {each.id: (each.preload, each.idle_seconds) for each in model_specs(read(tmp_path, text))}
    assert plans == {"small": (True, 0), "org/large": (True, 60), "third": (False, 900)}
    cold = text.replace('"small"', '"small"\npreload = false')
    assert model_specs(read(tmp_path, "model_idle = 5\n" + cold))[0].idle_seconds == 5


@pytest.mark.parametrize(
    ("keys", "preload"),
    [
        ('replicas = {min = 1}\npools = ["night", "always"]', True),
        ('replicas = "1:3"\npools = ["always"]', True),
        ('replicas = {min = 1}\npools = ["always"]\npreload = false', False),
        ('replicas = {max = 3}\npools = ["always"]', False),
        ('pools = ["always"]', False),
        ('replicas = {min = 1}\npools = ["night"]', False),
        ("replicas = {min = 1}", False),
    ],
)
def test_minimum_of_replicas_in_a_pool_that_is_always_open_keeps_a_model_loaded(
    tmp_path: Path, keys: str, preload: bool
) -> None:
    pools = '[[pools]]\nname = "always"\n[[pools]]\nname = "night"\nschedule = {mode = "idle"}\n'
    text = f'cluster = true\n{pools}[[models]]\nid = "first"\npath = "x"\n[[models]]\nid = "a"\npath = "y"\n{keys}\n'
    spec = model_specs(read(tmp_path, text))[1]
    assert spec.preload is preload
    assert (spec.idle_seconds == 0.0) is preload
    (alone,) = [each for each in model_specs(read(tmp_path, text.removeprefix("cluster = true\n"))) if each.id == "a"]
    assert alone.preload is False


def test_top_level_settings_describe_one_model() -> None:
    (spec,) = model_specs(Config(model="x.gguf", served_model_name=("a", "b"), max_model_len=7, tool_format="glm"))
    assert spec == ModelSpec(
        id="a", aliases=("b",), path="x.gguf", max_model_len=7, tool_format="glm", preload=True, idle_seconds=0
    )
    assert model_specs(Config())[0].id == ""


GOOD = '[[models]]\nid = "a"\npath = "p"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            GOOD + '[[models]]\nid = "b"\npath = "q"\n\ndtype = "int9"',
            'models[1].dtype "int9": expected one of auto, int8, bf16, fp32',
        ),
        (GOOD + "dtpye = 1", "models[0]: unknown key 'dtpye'; did you mean 'dtype'?"),
        (GOOD + "color = 1", "models[0]: unknown key 'color'; expected one of id, path, aliases"),
        (GOOD + "prices = {inptu = 1}", "models[0].prices: unknown key 'inptu'; did you mean 'input'?"),
        (GOOD + "[models.prices]\n\noutput = -1", "models[0].prices.output -1: expected a number, at least 0"),
        (GOOD + "prices = 3", "models[0].prices 3: expected a table with input, cached_input and output"),
        (GOOD + "prices = {input = nan}", "models[0].prices.input NaN: expected a finite number"),
        (GOOD + "idle_seconds = inf", "models[0].idle_seconds Infinity: expected a finite number"),
        (GOOD + "defaults = {temperature = inf}", "expected a finite number"),
        (GOOD + 'preload = "yes"', 'models[0].preload "yes": expected true or false'),
        (GOOD + "max_model_len = -1", "models[0].max_model_len -1: expected a whole number, at least 0"),
        (GOOD + "defaults = 3", "models[0].defaults 3: expected a table"),
        (GOOD + 'aliases = "x"', 'models[0].aliases "x": expected a list of texts'),
        ('\n[[models]]\nid = "a"', "models[0].path is missing"),
        ('[[models]]\npath = "a"', "models[0].id is missing"),
        ('[[models]]\nid = ""\npath = "p"', "models[0].id cannot be empty"),
        ('[[models]]\nid = "a"\npath = ""', "models[0].path cannot be empty"),
        ('[[models]]\nid = "a b"\npath = "p"', 'models[0].id "a b": a name has no spaces'),
        ('[[models]]\nid = "a-*"\npath = "p"', 'models[0].id "a-*": only an alias is a pattern'),
        (
            '[[models]]\nid = "a"\npath = "p"\naliases = ["b*c"]',
            'models[0].aliases[0] "b*c": only an alias is a pattern',
        ),
        ('[[models]]\nid = "a\\u0007"\npath = "p"', "models[0].id"),
        ('[[models]]\nid = "default"\npath = "p"', "reserved for the default model"),
        (f'[[models]]\nid = "{"x" * 201}"\npath = "p"', "at most 200 characters"),
        (GOOD + 'aliases = [\n"x",\n""]', 'models[0].aliases[1] "": a name cannot be empty'),
        (GOOD + GOOD, 'models[1].id "a": models[0] has this name already'),
        (
            GOOD + '[[models]]\nid = "b"\npath = "p"\naliases = ["c", "a"]',
            'models[1].aliases[1] "a": models[0] has this name already',
        ),
        (GOOD + 'aliases = ["x", "x"]', 'models[0].aliases[1] "x": the model has this name already'),
        (GOOD + 'aliases = ["a"]', 'models[0].aliases[0] "a": the model has this name already'),
        ("[models]\nid = 1", "models: expected tables, each under a heading [[models]]"),
        ("models = 3", "models: expected tables, each under a heading [[models]]"),
    ],
)
def test_invalid_model_tables_name_the_key(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert message in caught.value.message
    assert caught.value.message.startswith("syringa.toml: models")
    assert "\n" not in caught.value.message


def test_error_names_the_given_file(tmp_path: Path) -> None:
    file = tmp_path / "other.toml"
    file.write_text(GOOD + "threads = -1")
    with pytest.raises(ConfigError) as caught:
        load(environ={}, file=file)
    assert caught.value.message.startswith(f"{file}: models[0].threads -1: ")


def read_defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
    if "temperature" in fields:
        raise InvalidRequest("temperature: expected less.", param="temperature")
    if fields:
        raise InvalidRequest("These are too many.")
    return {"top_k": 1}


def test_defaults_are_validated_by_callback(tmp_path: Path) -> None:
    text = GOOD + "[models.defaults]\n\ntemperature = 9"
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, defaults=read_defaults)
    assert caught.value.message == "syringa.toml: models[0].defaults.temperature 9: expected less"
    with pytest.raises(ConfigError, match=r"models.0..defaults: These are too many"):
        read(tmp_path, GOOD + "defaults = {x = 1}", defaults=read_defaults)
    assert read(tmp_path, GOOD, defaults=read_defaults).models[0].defaults == {"top_k": 1}


def test_read_model_at_run_time() -> None:
    spec = read_model({"id": "a", "path": "p", "dtype": "fp32"}, Config(dtype="bf16", threads=2))
    assert (spec.dtype, spec.threads) == ("fp32", 2)
    for fields, message, param in (
        ({"id": "a"}, "path is missing", "path"),
        ({"id": "a", "path": "p", "prices": {"input": "1"}}, 'prices.input "1": expected a number', "prices.input"),
        ({"id": "a", "path": "p", "typo": 1}, "unknown key 'typo'", "typo"),
        ({"id": 5, "path": "p"}, "id 5: expected text", "id"),
    ):
        with pytest.raises(ConfigError) as caught:
            read_model(fields, Config())
        assert caught.value.message.startswith(message)
        assert caught.value.param == param
