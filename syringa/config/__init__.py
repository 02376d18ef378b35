"""The settings of a server, read in one place and frozen after that.

Flags win over `SYRINGA_*` variables, those over one `syringa.toml`, that over the defaults. A setting has the same name
everywhere: `max_model_len` in the file is `--max-model-len` and `SYRINGA_MAX_MODEL_LEN`. Models beyond the first are
described in the file alone, in tables `[[models]]`.
"""

from syringa.config.models import ReadDefaults, filled_spec, model_specs, read_model, sole_spec
from syringa.config.settings import FIELDS, PREFIX, Config, bare_type, describe, variable
from syringa.config.sources import FILE_NAME, is_loopback, load
from syringa.config.specs import ModelSpec, Prices

__all__ = [
    "FIELDS",
    "FILE_NAME",
    "PREFIX",
    "Config",
    "ModelSpec",
    "Prices",
    "ReadDefaults",
    "bare_type",
    "describe",
    "filled_spec",
    "is_loopback",
    "load",
    "model_specs",
    "read_model",
    "sole_spec",
    "variable",
]
