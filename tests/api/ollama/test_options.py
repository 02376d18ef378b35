from __future__ import annotations

from typing import Any

import pytest

from syringa.api.ollama.options import (
    DEFAULTS,
    OllamaOptions,
    defaults_to_parameters,
    max_tokens,
    parameters_to_defaults,
    read_options,
    request_fields_of,
    with_context,
)
from syringa.errors import InvalidRequest
from tests.fake_engine import fake_model

# Every option of Ollama's documentation, with a value that asks for something.
ALL = {
    "num_keep": 5, "seed": 42, "num_predict": 100, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.7,
    "repeat_last_n": 33, "temperature": 0.8, "repeat_penalty": 1.2, "presence_penalty": 1.5, "frequency_penalty": 1.0,
    "mirostat": 1, "mirostat_tau": 0.8, "mirostat_eta": 0.6, "penalize_newline": False, "stop": ["\n", "user:"],
    "numa": True, "num_ctx": 1024, "num_batch": 2, "num_gpu": 1, "main_gpu": 0, "low_vram": True, "vocab_only": True,
    "use_mmap": True, "use_mlock": True, "num_thread": 8, "tfs_z": 0.5, "f16_kv": True, "logits_all": True,
    "embedding_only": True, "num_gqa": 1, "draft_num_predict": 4, "rope_frequency_base": 1.0,
    "rope_frequency_scale": 1.0,
}  # fmt: skip
HONORED = {
    *("seed", "num_predict", "top_k", "top_p", "min_p", "temperature", "repeat_penalty", "presence_penalty"),
    *("frequency_penalty", "stop", "num_ctx"),
}


def test_every_option_is_honored_or_named() -> None:
    assert set(ALL) == set(OllamaOptions.__struct_fields__)
    ignored: list[str] = []
    read_options(ALL | {"frobnicate": 1}, ignored)
    assert sorted(ignored) == sorted(f"options.{name}" for name in {*ALL, "frobnicate"} - HONORED)


def test_neutral_options_are_not_named() -> None:
    ignored: list[str] = []
    neutral = {"mirostat": 0, "typical_p": 1.0, "tfs_z": 1, "num_gpu": -1, "low_vram": False, "num_thread": 0}
    read_options(neutral | {"repeat_last_n": 64, "num_keep": None}, ignored)
    assert ignored == []


def test_options_become_sampling_fields() -> None:
    options = read_options({"repeat_penalty": 1.2, "seed": 7.0, "stop": "x", "top_p": 0, "min_p": 0.1}, [])
    fields = request_fields_of(options, fake_model())
    assert fields.pop("top_p") == pytest.approx(0, abs=1e-6)
    assert fields == {
        "temperature": 0.8,
        "top_k": 40,
        "repetition_penalty": 1.2,
        "seed": 7,
        "stop": "x",
        "min_p": 0.1,
    }


def test_repeat_last_n_of_zero_turns_penalties_off() -> None:
    ignored: list[str] = []
    options = read_options({"repeat_penalty": 1.5, "presence_penalty": 1, "repeat_last_n": 0}, ignored)
    fields = request_fields_of(options, fake_model())
    assert (fields["repetition_penalty"], fields["presence_penalty"], fields["frequency_penalty"]) == (1.0, 0.0, 0.0)
    assert ignored == []


def test_ollamas_defaults_yield_to_those_of_the_model() -> None:
    model = fake_model(defaults={"temperature": 0.1, "max_tokens": 9})
    fields = request_fields_of(OllamaOptions(), model)
    assert fields == {"top_k": DEFAULTS["top_k"], "top_p": DEFAULTS["top_p"]}
    assert max_tokens(OllamaOptions(), model) == 9
    assert max_tokens(OllamaOptions(num_predict=3), model) == 3
    for unlimited in (0, -1, -2):
        assert max_tokens(OllamaOptions(num_predict=unlimited), model) is None


def test_num_ctx_limits_the_context_and_is_named_if_it_cannot() -> None:
    model = fake_model(defaults={"max_tokens": 9, "top_k": 3})
    ignored: list[str] = []
    small = with_context(model, OllamaOptions(num_ctx=100), ignored)
    assert (small.max_model_len, small.defaults, ignored) == (100, {"top_k": 3}, [])
    large = with_context(model, OllamaOptions(num_ctx=10**6), ignored)
    assert (large.max_model_len, ignored) == (4096, ["options.num_ctx"])
    assert with_context(model, OllamaOptions(num_ctx=0), []).max_model_len == 4096
    assert model.max_model_len == 4096


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1}, "options.temperature"),
        ({"temperature": "hot"}, "options.temperature"),
        ({"top_k": 1.5}, "options.top_k"),
        ({"num_predict": -3}, "options.num_predict"),
        ({"num_ctx": -1}, "options.num_ctx"),
        ({"repeat_penalty": 0}, "options.repeat_penalty"),
        ({"mirostat": "on"}, "options.mirostat"),
        ({"temperature": 10**400}, "options.temperature"),
        ({"typical_p": 10**400}, "options.typical_p"),
        ({"top_k": 10**400}, "options.top_k"),
        ({"num_predict": 2**31}, "options.num_predict"),
        ({"num_ctx": 2**63}, "options.num_ctx"),
        ({"seed": 2**63}, "options.seed"),
        ({"top_p": float("inf")}, "options.top_p"),
        ({"min_p": float("nan")}, "options.min_p"),
        ({"num_batch": 1.5}, "options.num_batch"),
        ({"use_mmap": 1}, "options.use_mmap"),
    ],
)
def test_invalid_option_is_refused_by_name(options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        read_options(options, [])
    assert raised.value.param == param
    assert param in raised.value.message


def test_parameters_become_defaults_and_back() -> None:
    parameters = {"temperature": 0.3, "stop": ["a", "b"], "repeat_penalty": 1.1, "num_predict": 7, "num_ctx": 512}
    ignored: list[str] = []
    defaults, limit = parameters_to_defaults(parameters | {"mirostat": 2}, {}, ignored)
    assert defaults == {"temperature": 0.3, "stop": ["a", "b"], "repetition_penalty": 1.1, "max_tokens": 7}
    assert (limit, ignored) == (512, ["parameters.mirostat"])
    assert defaults_to_parameters(defaults | {"dry_multiplier": 1.0}, limit) == parameters


def test_parameters_replace_those_of_the_base() -> None:
    base = {"temperature": 0.3, "top_k": 3, "max_tokens": 7}
    assert parameters_to_defaults({"temperature": 0.5}, base, [])[0] == base | {"temperature": 0.5}
    assert parameters_to_defaults({"num_predict": 9}, base, [])[0] == base | {"max_tokens": 9}
    assert parameters_to_defaults({"num_predict": -1}, base, [])[0] == {"temperature": 0.3, "top_k": 3}
    assert base["max_tokens"] == 7
