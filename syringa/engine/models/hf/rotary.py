"""Rotary scaling inside `transformers`' models, made independent of the batch."""

from __future__ import annotations

from typing import Any

from torch import nn


def fix_rotary(model: nn.Module, length: int) -> None:
    """Settles rotary scaling that would follow the longest sequence of a batch, as if that were `length`.

    A sequence's cached keys must not depend on its neighbours, nor on how long it has become since.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        if not isinstance(kinds, (str, dict)):
            continue
        each: dict[str | None, str] = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer_type, kind in each.items():
            if "dynamic" not in kind and kind != "longrope":
                continue
            prefix = f"{layer_type}_" if layer_type else ""
            old = getattr(module, f"{prefix}inv_freq")
            arguments = {"layer_type": layer_type} if layer_type else {}
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, old.device, seq_len=length, **arguments)
            setattr(module, f"{prefix}inv_freq", frequencies)
            setattr(module, f"{prefix}attention_scaling", scaling)
            each[layer_type] = "default"
        if isinstance(kinds, str):
            module.rope_type = each[None]  # type: ignore[assignment]
