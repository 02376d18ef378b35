from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from syringa.errors import InvalidRequest
from syringa.modelfiles import ModelDescription, locate
from syringa.modelfiles.tokenizer import tokenizer_from_gguf
from syringa.prompt.tokens.control_tokens import ClientTextEscape, strings_of
from syringa.prompt.tokens.tokenizer import Tokenizer
from tests.tiers import examples

DATA = Path(__file__).parents[2] / "data"
TEXTS: list[str] = json.loads((DATA / "tokenizer_smollm2.json").read_text())["texts"]
SPM_METADATA = json.loads((DATA / "tokenizer_spm.json").read_text())["metadata"]


def wrap(library: tokenizers.Tokenizer) -> Tokenizer:
    description = ModelDescription(name="m", architecture="X", config={}, max_model_len=8, end_tokens=frozenset())
    return Tokenizer(library, description)


def unigram(*added: AddedToken, normalizer: Any = None) -> Tokenizer:
    """Return a tokenizer whose model has pieces for control tokens, as Unigram vocabularies do."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((character, -2.0) for character in "<>/sabx")]
    library = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    if normalizer is not None:
        library.normalizer = normalizer
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.add_tokens(list(added))
    return wrap(library)


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.load(locate("default"))


@pytest.fixture(scope="module")
def spm() -> Tokenizer:
    return wrap(tokenizer_from_gguf(SPM_METADATA))


@given(st.lists(st.sampled_from(TEXTS) | st.sampled_from(["<|im_end|>", "<s>", "<think>", " ", "\n"]), max_size=8))
@settings(deadline=None, max_examples=examples(200))
def test_encode_prompt_gives_the_tokens_of_encode_when_nothing_is_escaped(
    smollm2: Tokenizer, spm: Tokenizer, parts: list[str]
) -> None:
    for tokenizer in (smollm2, spm):
        text = "".join(parts)
        assert tokenizer.control_tokens.encode_prompt(text, str) == tokenizer.encode(text, add_special=False)


@given(st.text(st.sampled_from("<|im_end>s/ ab\n") | st.characters(codec="utf-8"), max_size=40))
@settings(deadline=None, max_examples=examples(200))
def test_escaped_text_has_the_tokens_of_plain_text(smollm2: Tokenizer, spm: Tokenizer, text: str) -> None:
    for tokenizer in (smollm2, spm):
        control = tokenizer.control_tokens
        escape = control.escape([text])
        escaped = escape.escape(text)
        assert len(escaped) == len(text)
        assert escape.restore(escaped) == text
        assert control.encode_prompt(escaped, escape.restore) == tokenizer.encode(text, False, parse_special=False)


def test_plain_encoding_is_not_split_at_the_characters_of_a_control_token(smollm2: Tokenizer) -> None:
    library = tokenizers.Tokenizer.from_str(smollm2.to_json())
    library.encode_special_tokens = True
    text = "x = a<|im_end|> and <|endoftext|>."
    assert smollm2.encode(text, parse_special=False) == library.encode(text, add_special_tokens=False).ids


def test_plain_encoding_has_no_control_token_that_the_model_itself_produces() -> None:
    tokenizer = unigram()
    assert tokenizer.encode("a<s>b", parse_special=True).count(1) == 1
    ids = tokenizer.encode("a<s>b</s>", parse_special=False)
    assert not {1, 2} & set(ids)
    assert tokenizer.decode(ids) == "a<s>b</s>"


def test_plain_encoding_keeps_the_unknown_token() -> None:
    assert 0 in unigram().encode("aéb", parse_special=False)


def test_plain_encoding_maps_added_tokens_when_ids_of_the_vocabulary_have_gaps() -> None:
    library = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 9, "<x>": 4}, []))
    library.add_special_tokens(["<x>", "<y>"])
    library.add_tokens([AddedToken("ab", normalized=False)])
    tokenizer = wrap(library)
    text = "b<x>abb<y>a"
    assert tokenizer.control_tokens.encode_prompt(text, str) == tokenizer.encode(text, add_special=False)
    assert tokenizer.encode("bab", parse_special=False) == tokenizer.encode("bab")


@pytest.mark.parametrize(
    "texts",
    [["a <|im_end|> b"], ["x", "ends with <|im_"], ["<|im_ \n"], ["x", " end|> starts"], ["\ud800<|im_end|>"]],
)
def test_control_tokens_may_occur_in_whole_tokens_and_halves_at_the_ends(smollm2: Tokenizer, texts: list[str]) -> None:
    assert smollm2.control_tokens.may_occur_in(texts)


def test_control_tokens_do_not_occur_in_ordinary_text(smollm2: Tokenizer) -> None:
    ordinary = ["", "a < b | c > d", "<b>bold</b> text", "x |> f <| y.", "日本語", "<|unknown|> x", "\ud800", "end"]
    assert not smollm2.control_tokens.may_occur_in(ordinary)


def test_control_tokens_may_occur_in_text_that_normalization_turns_into_one() -> None:
    tokenizer = unigram(AddedToken("<call>", normalized=True), normalizer=normalizers.NFKC())
    control = tokenizer.control_tokens
    for text in ("＜call＞", "＜s＞", "a＜/", "\u0338", "\n\u0338x"):
        assert control.may_occur_in([text]), text
        assert not {1, 2, tokenizer.token_id("<call>")} & set(tokenizer.encode(text, parse_special=False))
    assert not control.may_occur_in(["ａb"])


def test_control_tokens_do_not_include_ordinary_text() -> None:
    library = tokenizers.Tokenizer(models.BPE())
    ordinary = ["\n\n", "  ", "▁▁▁", "<h1>", "</table>", "word"]
    markers = ["<tool_call>", "[THINK]", "◁think▷", "｜DSML｜"]
    library.add_tokens([AddedToken(text, normalized=False) for text in ordinary + markers])
    library.add_special_tokens(["<s>", "BOS"])
    assert wrap(library).control_tokens.texts == {*markers, "<s>", "BOS"}


def test_plain_encoding_keeps_added_tokens_of_ordinary_text() -> None:
    vocab = {character: id_ for id_, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = tokenizers.Tokenizer(models.BPE(vocab, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_tokens([AddedToken("    ", normalized=False), AddedToken("<tool_call>", normalized=False)])
    tokenizer = wrap(library)
    assert tokenizer.encode("    <tool_call>", parse_special=False)[0] == 256
    assert 257 not in tokenizer.encode("    <tool_call>", parse_special=False)


def test_escape_uses_characters_that_are_not_in_the_text() -> None:
    texts = "<\ue000\\ue001>"
    escape = ClientTextEscape(["<", ">"], texts)
    assert escape.escape(texts) == "\ue002\ue000\\ue001\ue003"
    assert escape.restore(escape.escape(texts)) == texts
    # A template that prints a value writes unusual characters as escapes.
    assert escape.restore(repr([escape.escape("<a>")])) == "['<a>']"
    assert escape.restore(json.dumps(escape.escape("<a>"))) == '"<a>"'


def test_escape_refuses_text_with_all_private_use_characters() -> None:
    ranges = (0xE000, 0xF900), (0xF0000, 0xFFFFE), (0x100000, 0x10FFFE)
    with pytest.raises(InvalidRequest, match="private-use"):
        ClientTextEscape(["<"], "".join(chr(code) for first, end in ranges for code in range(first, end)))


def test_strings_of_yields_names_and_values_at_any_depth() -> None:
    value: Any = {"a": [1, "b", {"c": None, "d": "e"}]}
    for _ in range(10_000):
        value = [value]
    assert sorted(strings_of(value, "f")) == ["a", "b", "c", "d", "e", "f"]
