"""Default values of request fields, which an administrator can set for each model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from syringa.api.decoding import convert
from syringa.api.fields.constraint_fields import ConstraintFields
from syringa.api.fields.sampling import MAX_COUNT, Count, SamplingFields, read_logit_bias, read_stop
from syringa.api.models.served_model import ServedModel
from syringa.errors import InvalidRequest

B = TypeVar("B", bound=SamplingFields)

# Fields that say what to generate, not how to sample; they have no default per model.
_PER_REQUEST = ("n", "priority", *ConstraintFields.__struct_fields__)
# The endpoints' names for the maximum output length. A default always uses `max_tokens`.
_LENGTHS = ("max_completion_tokens", "max_output_tokens", "max_tokens")


class _Defaults(SamplingFields, kw_only=True):
    max_tokens: Count | None = None


FIELDS = tuple(name for name in _Defaults.__struct_fields__ if name not in _PER_REQUEST)


def read_defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Validate defaults like the fields of a request. Raises `InvalidRequest`, with the field as `param`."""
    for name in fields:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known fields: {', '.join(FIELDS)}"
            reason = "cannot have a default" if name in _PER_REQUEST else f"no such field; {hint}"
            raise InvalidRequest(f"{name}: {reason}", param=name)
    read = convert(dict(fields), _Defaults)
    if read.max_tokens == 0:
        raise InvalidRequest("max_tokens: expected at least 1.", param="max_tokens")
    read_stop(read.stop)
    read_logit_bias(read.logit_bias or {}, MAX_COUNT)
    return {name: value for name in fields if (value := getattr(read, name)) is not None}


def apply_defaults(body: B, model: ServedModel) -> B:
    """Return the body with the model's defaults for absent fields."""
    if not model.defaults:
        return body
    length = next((value for name in _LENGTHS if (value := getattr(body, name, None)) is not None), None)
    added = {}
    for name, value in model.defaults.items():
        if name == "max_tokens":
            if length is None:
                added[next(each for each in _LENGTHS if hasattr(body, each))] = value
        elif name == "min_tokens" and length is not None and length < value:
            continue  # the request asks for less than the minimum
        elif getattr(body, name) is None:
            added[name] = value
    return msgspec.structs.replace(body, **added)
