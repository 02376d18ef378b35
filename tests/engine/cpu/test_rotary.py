"""Rotary tables compared with `transformers` for each scaling type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from syringa.engine.cpu.layers.rotary import rotary_tables
from syringa.engine.models.config import rope_parameters
from syringa.errors import ModelError

SHORT = [1.0 + i / 20 for i in range(16)]
LONG = [3.0 + i for i in range(16)]
LENGTH = 300
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn with attention": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.7,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.8,
        "mscale_all_dim": 1.2,
        "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 64,
    },
    "longrope with factor": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": SHORT,
        "long_factor": LONG,
        "factor": 6.0,
        "original_max_position_embeddings": 64,
    },
}


def config_of(rope: dict[str, Any], trained: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=128, num_attention_heads=4, max_position_embeddings=trained, rope_parameters=dict(rope)
    )


@pytest.mark.parametrize("trained", [256, 300])
@pytest.mark.parametrize("name", CASES)
def test_rotary_tables_match_transformers(name: str, trained: int) -> None:
    config = config_of(CASES[name], trained)
    kind = CASES[name]["rope_type"]
    if kind == "default":
        plain = LlamaRotaryEmbedding(config)
        frequencies, attention = plain.inv_freq, plain.attention_scaling
    else:
        frequencies, attention = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=LENGTH)
    angles = torch.arange(LENGTH)[:, None].float() * frequencies
    cosine, sine = rotary_tables(rope_parameters(config.to_dict()), 32, LENGTH, trained)
    torch.testing.assert_close(cosine, angles.cos() * attention, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sine, angles.sin() * attention, rtol=1e-5, atol=1e-5)


def test_rotary_tables_use_short_longrope_factors_for_short_contexts() -> None:
    config = config_of(CASES["longrope"], 256)
    frequencies, attention = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=64)
    cosine, _ = rotary_tables(rope_parameters(config.to_dict()), 32, 64, 256)
    angles = torch.arange(64)[:, None].float() * frequencies
    torch.testing.assert_close(cosine, angles.cos() * attention, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "written",
    [
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0}},
        {"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 7.0, "rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0}},
    ],
)
def test_rope_parameters_reads_every_layout(written: dict[str, Any]) -> None:
    found = rope_parameters(written)
    assert (found["rope_type"], found["rope_theta"], found["factor"]) == ("linear", 7.0, 2.0)


def test_rotary_tables_refuse_unknown_scaling() -> None:
    with pytest.raises(ModelError, match="'twisted'"):
        rotary_tables({"rope_type": "twisted", "rope_theta": 10000.0}, 32, 16, 16)
