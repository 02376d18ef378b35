"""What a model's requests have where they do not say: an administrator may set it for each model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from syringa.api.decoding import convert
from syringa.api.fields.sampling import MAX_COUNT, Count, SamplingFields, to_logit_bias, to_stop
from syringa.api.models.served_model import ServedModel
from syringa.errors import InvalidRequest

B = TypeVar("B", bound=SamplingFields)

# They say what is wanted, not how it is drawn: nobody may want it for another.
_OWN = ("n", "grammar", "response_format")
# The names that the endpoints have for the length of an answer. A default has one name for all.
_LENGTHS = ("max_completion_tokens", "max_output_tokens", "max_tokens")


class _Defaults(SamplingFields, kw_only=True):
    max_tokens: Count | None = None


FIELDS = tuple(name for name in _Defaults.__struct_fields__ if name not in _OWN)


def read_defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults by the rules of the fields themselves. Raises `InvalidRequest`, with the field as `param`."""
    for name in fields:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(FIELDS)}"
            said = "every request says this itself" if name in _OWN else f"no such field; {hint}"
            raise InvalidRequest(f"{name}: {said}", param=name)
    read = convert(dict(fields), _Defaults)
    if read.max_tokens == 0:
        raise InvalidRequest("max_tokens: expected at least 1.", param="max_tokens")
    to_stop(read.stop)
    to_logit_bias(read.logit_bias or {}, MAX_COUNT)
    return {name: value for name in fields if (value := getattr(read, name)) is not None}


def with_defaults(body: B, model: ServedModel) -> B:
    """The body with the model's defaults where it says nothing itself."""
    if not model.defaults:
        return body
    length = next((value for name in _LENGTHS if (value := getattr(body, name, None)) is not None), None)
    added = {}
    for name, value in model.defaults.items():
        if name == "max_tokens":
            if length is None:
                added[next(each for each in _LENGTHS if hasattr(body, each))] = value
        elif name == "min_tokens" and length is not None and length < value:
            continue  # whoever asks for less gets less
        elif getattr(body, name) is None:
            added[name] = value
    return msgspec.structs.replace(body, **added)
