from __future__ import annotations

import re

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from syringa.modelfiles import load_tokenizer, locate
from syringa.prompt.tokens import words as module
from syringa.prompt.tokens.words import Words

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "It's a long way, isn't it? The quick brown fox jumps over the lazy dog 12345 times.",
    "def f(x):\n    return x ** 2  # squares\n\n\nclass A:\n\tpass\r\n",
    "HELLO World, DON'T PANIC... (42) [1, 2, 3] {a: b} <tag> https://example.org/?a=b&c=d",
] * 20


def trained(*cuts: str, digits: bool = False, regex: bool = False) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    steps = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in cuts]
    first = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, *steps, last])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|end|>x", special=True)])
    tokenizer.add_tokens([AddedToken("<odd>", lstrip=True), AddedToken("<plain>")])
    return tokenizer


KINDS = {
    "smollm2": lambda: load_tokenizer(locate("default")),
    "gpt2": lambda: trained(regex=True),
    "digits": lambda: trained(digits=True, regex=True),
    "numbers first": lambda: trained(r"\p{N}", GPT2),
    "llama3": lambda: trained(LLAMA3),
    "qwen2": lambda: trained(QWEN2),
    "o200k": lambda: trained(O200K),
    "numbers in threes": lambda: trained(r"\p{N}{1,3}", r"[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
}
TOKENIZERS: dict[str, tokenizers.Tokenizer] = {}

SPACES = [" ", "  ", "\n", "\r\n", "\t", "\x0b", "\x1c", "\x1f", "\x7f", "\0"]
MARKS = ["<|end|>", "<|end|>x", "<plain>", "<|im_start|>", "<|"]
SOME = ["'s", "'S", "'ll", "a", "Zz", "1", "2345", "_", ".", "...", " the", "don't", "/", "-"]
PARTS = st.sampled_from([*SPACES, *MARKS, *SOME])
TEXT = st.one_of(
    st.lists(PARTS, max_size=20).map("".join), st.text(st.characters(max_codepoint=127), max_size=60), st.text()
)


def kind(name: str) -> tokenizers.Tokenizer:
    if name not in TOKENIZERS:
        TOKENIZERS[name] = KINDS[name]()
    return TOKENIZERS[name]


@pytest.mark.parametrize("name", KINDS)
@given(texts=st.lists(TEXT, min_size=1, max_size=4))
@example(texts=["It's 2024:  a   probe\n\n x"] * 2)
@settings(deadline=None, max_examples=150)
def test_words_make_the_tokens_that_the_library_makes(name: str, texts: list[str]) -> None:
    tokenizer = kind(name)
    words = Words.of(tokenizer)
    assert words is not None
    for text in texts:
        found = words.encode(text)
        if found is None:
            assert not text.isascii()
        else:
            assert found == tokenizer.encode(text, add_special_tokens=False).ids


def test_what_could_be_read_as_a_mark_is_left_alone() -> None:
    tokenizer = kind("gpt2")
    words = Words.of(tokenizer)
    assert words is not None
    assert words.encode("a <odd> b") is None  # it takes the space before it along
    assert words.encode("a <|end|> b", marks=False) is None
    assert words.encode("a <|end b", marks=False) == tokenizer.encode("a <|end b").ids
    assert words.encode("") == []


def test_only_so_many_words_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_KNOWN", 10)
    tokenizer = kind("gpt2")
    words = Words.of(tokenizer)
    assert words is not None
    for each in range(50):
        text = f"word{each} " * 3 + "x" * 100
        assert words.encode(text) == tokenizer.encode(text).ids
        assert len(words._known) <= 20
    assert max(map(len, words._known)) <= module.LONGEST_KNOWN
    assert words.encode("x" * (module.MOST_CHARACTERS + 1)) is None


def with_normalizer(normalizer: normalizers.Normalizer) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_str(kind("gpt2").to_str())
    tokenizer.normalizer = normalizer
    return tokenizer


@pytest.mark.parametrize(
    ("normalizer", "taken"),
    [(normalizers.NFC(), True), (normalizers.Lowercase(), False), (normalizers.Prepend("_"), False)],
)
def test_only_what_leaves_ascii_alone_may_come_before(normalizer: normalizers.Normalizer, taken: bool) -> None:
    assert (Words.of(with_normalizer(normalizer)) is not None) is taken


def cutting(expression: str, behavior: str = "isolated") -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(expression), behavior), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


@pytest.mark.parametrize(
    "before",
    [
        pre_tokenizers.Metaspace(),
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Whitespace(),
        cutting(r"\s+", "removed"),
        cutting(r"[a-z&&[^b]]+|."),
        cutting(r"(a)|b"),
        cutting(r"a*"),
    ],
)
def test_tokenizers_that_cut_in_another_way(before: pre_tokenizers.PreTokenizer) -> None:
    tokenizer = tokenizers.Tokenizer.from_str(kind("gpt2").to_str())
    tokenizer.pre_tokenizer = before
    assert Words.of(tokenizer) is None


def test_properties_are_written_out() -> None:
    written = module._for_ascii(r"\p{N}+|[^\s\p{L}]\]")
    assert re.fullmatch(written, "123")
    assert not re.match(written, "a")
    assert re.fullmatch(written, "+]")
