"""Fixtures for template tests."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers


@pytest.fixture(scope="module")
def transformers_tokenizer() -> Any:
    """A transformers tokenizer, the reference for template rendering."""
    transformers = pytest.importorskip("transformers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "<s>": 1, "</s>": 2}, []))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
