"""Malformed configs of the native decoder: each is refused in one line, before its tensors are looked at."""

from __future__ import annotations

from typing import Any

import pytest

from syringa.engine.models.config import read_config, rope_parameters
from syringa.errors import ModelError
from tests.engine.models.native_models import DENSE, GEMMA, GLM4_MOE, GPT_OSS, MOE
from tests.engine.models.tiny_models import SIZES

CONFIGS = {name: {"model_type": kind, **SIZES, **fields} for name, (kind, fields) in (DENSE | GEMMA | MOE).items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_of_tiny_models_are_read(name: str) -> None:
    config = read_config(CONFIGS[name])
    assert len(config.windows) == len(config.sparse) == config.layers


@pytest.mark.parametrize(
    ("name", "field", "values"),
    [
        ("gemma2", "query_pre_attn_scalar", (0, -4, float("inf"), float("nan"), "4", True, 1e-320, None)),
        ("gemma2", "attn_logit_softcapping", (0, -1.0, float("nan"), "x", [3.0])),
        ("gemma3", "final_logit_softcapping", (-1.0, float("inf"), "x", True)),
        ("gemma3", "layer_types", (["foo"] * 7, "abcdefg", [None] * 7, [[1]] * 7)),
        ("gemma3", "sliding_window_pattern", (0, -3, 2.5, True, "6")),
        ("gemma3", "rope_parameters", ({"full_attention": 3}, [1], "default")),
        ("gpt_oss", "swiglu_alpha", ("x", None, [1], float("nan"), -1)),
        ("gpt_oss", "swiglu_limit", (0, "7")),
        ("gpt_oss", "num_local_experts", (2**31 - 1, 4097, True, 0)),
        ("qwen3_moe", "decoder_sparse_step", (0, -1, 1.5, "1")),
        ("glm4_moe", "routed_scaling_factor", (0, -1, float("nan"), "x")),
        ("glm4_moe", "first_k_dense_replace", (1.5, True, "1")),
    ],
)
def test_value_that_cannot_be_used_is_refused_in_one_line(name: str, field: str, values: tuple[Any, ...]) -> None:
    for value in values:
        config = CONFIGS[name] | {field: value}
        if field == "sliding_window_pattern":  # without the types, which say the same
            config["layer_types"] = None
        with pytest.raises(ModelError) as refused:
            read_config(config)
        assert "\n" not in str(refused.value), value


def test_older_names_of_longrope_in_configs_of_phi3() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    for kind in ("su", "yarn", "longrope"):
        for layout in ("rope_scaling", "rope_parameters"):
            config = CONFIGS["phi3"] | {layout: {"type": kind, **factors}}
            assert rope_parameters(config)["rope_type"] == "longrope"
    yarn = {"rope_scaling": {"type": "yarn", "factor": 2.0}}
    assert rope_parameters(CONFIGS["llama"] | yarn)["rope_type"] == "yarn"


def test_fields_of_other_families_are_not_read() -> None:
    gemma2 = CONFIGS["gemma2"] | {"layer_types": None, "sliding_window_pattern": 3}
    assert read_config(gemma2).windows == (12, 0, 12, 0)
    assert read_config({"model_type": "glm4_moe", **SIZES, **GLM4_MOE}).sigmoid_scale == 1.5
    assert read_config({"model_type": "gpt_oss", **SIZES, **GPT_OSS}).swiglu == (1.702, 0.5)
