from __future__ import annotations

from pathlib import Path

import pytest

from syringa import config
from syringa.config import Config, load
from syringa.errors import ConfigError


def read(flags: dict | None = None, environ: dict | None = None, folder: Path = Path("/nonexistent")) -> Config:
    return load(flags, environ=environ or {}, folder=folder)


def test_defaults() -> None:
    assert read() == Config()


def test_precedence_of_flags_variables_and_file(tmp_path: Path) -> None:
    (tmp_path / "syringa.toml").write_text('port = 1\nthreads = 1\nmax-queue = 1\nserved_model_name = ["a", "b"]\n')
    got = read({"port": 3, "model": None}, {"SYRINGA_PORT": "2", "SYRINGA_THREADS": "2"}, tmp_path)
    assert (got.port, got.threads, got.max_queue, got.served_model_name) == (3, 2, 1, ("a", "b"))


def test_lists_and_booleans_in_variables() -> None:
    got = read(environ={"SYRINGA_API_KEY": "a, b", "SYRINGA_PREFIX_CACHING": "false", "SYRINGA_KV_CACHE_GB": "1.5"})
    assert (got.api_key, got.prefix_caching, got.kv_cache_gb) == (("a", "b"), False, 1.5)


def test_settings_file_by_path(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text("port = 7")
    assert load(environ={"SYRINGA_CONFIG": str(path)}).port == 7
    assert load(environ={}, file=path).port == 7
    with pytest.raises(ConfigError, match="no such file"):
        load(environ={}, file=tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("flags", "environ", "text", "message"),
    [
        ({"port": 70000}, {}, "", "--port 70000: expected a whole number, at most 65535"),
        ({}, {"SYRINGA_PORT": "abc"}, "", "SYRINGA_PORT 'abc': expected a whole number"),
        ({}, {"SYRINGA_MAX_RUNNING": "0"}, "", "SYRINGA_MAX_RUNNING '0': expected a whole number, at least 1"),
        ({}, {"SYRINGA_DTYPE": "int4"}, "", "SYRINGA_DTYPE 'int4': expected one of auto, int8, bf16, fp32"),
        ({"tool_format": "xml"}, {}, "", "--tool-format 'xml': expected one of auto, plain, hermes"),
        (
            {},
            {"SYRINGA_REASONING_FORMAT": "on"},
            "",
            "SYRINGA_REASONING_FORMAT 'on': expected one of auto, none, think",
        ),
        ({}, {"SYRINGA_IMAGE_HOSTS_PRIVATE": "some"}, "", "SYRINGA_IMAGE_HOSTS_PRIVATE 'some': expected true or false"),
        ({}, {}, "image_max_bytes = 0", "syringa.toml: image_max_bytes 0: expected a whole number, at least 1"),
        ({}, {}, '\n\nport = "80"', 'syringa.toml: port "80": expected a whole number'),
        ({}, {}, "port = 1\nhost = [1]", "syringa.toml: host [1]: expected text"),
        ({}, {}, "prot = 80", "syringa.toml: unknown setting 'prot'; did you mean 'port'?"),
        ({}, {}, "\n[server]\nport = 80", "syringa.toml: unknown setting 'server'"),
        ({}, {}, "\nport = \n", "syringa.toml, line 2: invalid TOML: Invalid value"),
        ({}, {}, "load_timeout = inf", "syringa.toml: load_timeout Infinity: expected a finite number"),
        ({}, {}, "cors_origins = 5", "cors_origins 5: expected a list of texts"),
        ({"api_key": ["a b", "ü"]}, {}, "", "ASCII"),
        ({"allowed_hosts": ["https://a.example"]}, {}, "", "allowed_hosts 'https://a.example': expected a host name"),
        ({"root_path": "llm"}, {}, "", "root_path 'llm': expected a path such as /llm"),
        ({"root_path": "/llm/"}, {}, "", "root_path '/llm/': expected a path such as /llm"),
        ({}, {}, 'root_path = "/a b"', "root_path '/a b': expected a path such as /llm"),
        ({}, {}, 'allowed_hosts = ["a.example", "a.example:80"]', "allowed_hosts 'a.example:80': expected a host name"),
    ],
)
def test_invalid_value_names_its_source(flags: dict, environ: dict, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "syringa.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(flags, environ, tmp_path)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def test_invalid_api_key_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read({"api_key": [5]})
    assert "5" not in caught.value.message.split(":")[0]
    (tmp_path / "syringa.toml").write_text('port = 1\napi_key = ["secret", 77]')
    with pytest.raises(ConfigError) as caught:
        read(folder=tmp_path)
    assert caught.value.message == "syringa.toml: api_key: expected a list of texts"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.3.2.1"])
def test_loopback_hosts(host: str) -> None:
    assert config.is_loopback(read({"host": host}).host)


def test_root_path_is_a_path_of_any_depth() -> None:
    assert read({"root_path": "/llm"}).root_path == "/llm"
    assert read({"root_path": "/team-a/llm.v1"}).root_path == "/team-a/llm.v1"


def test_allowed_hosts_are_names_and_addresses() -> None:
    hosts = ["gpu-1.example.org", "10.0.0.5", "::1", "[2001:db8::1]", "*"]
    assert read({"allowed_hosts": hosts}).allowed_hosts == tuple(hosts)


@pytest.mark.parametrize("host", ["0.0.0.0", "example.org", "::"])
def test_public_hosts(host: str) -> None:
    assert not config.is_loopback(read({"host": host}).host)


def test_models_have_no_flag_or_variable() -> None:
    assert "models" not in config.FIELDS
    with pytest.raises(ConfigError, match="SYRINGA_MODELS: unknown environment variable"):
        load(environ={"SYRINGA_MODELS": "x"})


def test_every_setting_has_a_description() -> None:
    assert all(config.describe(name) for name in config.FIELDS)


def test_unknown_variable_suggests_known_one() -> None:
    with pytest.raises(ConfigError, match="SYRINGA_PROT: unknown environment variable; did you mean SYRINGA_PORT"):
        load(environ={"SYRINGA_PROT": "3", "SYRINGA_HOME": "/x", "PATH": "/bin"})
    load(environ={"SYRINGA_HOME": "/x", "SYRINGA_JOIN_TOKEN": "an option of `cluster join`"})


@pytest.mark.parametrize("name", ["kv_cache_gb", "image_timeout", "request_timeout"])
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_non_finite_numbers_are_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name.replace("_", "[_-]")):
        load({name: value}, environ={})


def test_formats_of_model_output() -> None:
    got = read({"tool_format": "glm"}, {"SYRINGA_REASONING_FORMAT": "none", "SYRINGA_CHAT_TEMPLATE": "a.jinja"})
    assert (got.tool_format, got.reasoning_format, got.chat_template) == ("glm", "none", "a.jinja")
