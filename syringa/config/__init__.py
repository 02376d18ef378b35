"""The settings of a server, read in one place and frozen afterwards.

Flags take precedence over `SYRINGA_*` variables, these over `syringa.toml`, and that over the defaults. A setting has
the same name everywhere: `max_model_len` in the file is `--max-model-len` and `SYRINGA_MAX_MODEL_LEN`. Several models
are described by tables `[[models]]` of the file.
"""

from syringa.config.models import (
    ReadDefaults,
    complete_spec,
    model_specs,
    read_model,
    single_model_spec,
    top_level_spec,
)
from syringa.config.settings import FIELDS, PREFIX, Config, describe, setting_type, variable
from syringa.config.sources import FILE_NAME, is_address, is_loopback, load
from syringa.config.specs import ModelSpec, Prices, ReasoningFields, Replicas, RequestChatTemplates

__all__ = [
    "FIELDS",
    "FILE_NAME",
    "PREFIX",
    "Config",
    "ModelSpec",
    "Prices",
    "ReadDefaults",
    "ReasoningFields",
    "Replicas",
    "RequestChatTemplates",
    "complete_spec",
    "describe",
    "is_address",
    "is_loopback",
    "load",
    "model_specs",
    "read_model",
    "setting_type",
    "single_model_spec",
    "top_level_spec",
    "variable",
]
