"""Sizes of downloads."""

from __future__ import annotations

from syringa.api.models.downloads import measure
from syringa.modelfiles import catalog
from syringa.modelfiles.catalog import Wheels


def test_size_of_a_model_in_wheels_is_what_is_downloaded() -> None:
    model = catalog.find("qwen2.5-coder-1.5b")
    assert model is not None
    assert isinstance(model.source, Wheels)
    assert measure("qwen2.5-coder-1.5b") == model.source.bytes < model.bytes
