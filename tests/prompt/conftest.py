"""What tests of templates share."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers


@pytest.fixture(scope="module")
def theirs() -> Any:
    """A tokenizer of transformers, whose rendering ours has to equal."""
    transformers = pytest.importorskip("transformers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "<s>": 1, "</s>": 2}, []))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
