from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from syringa.engine.sampling.sampler import Sampler
from syringa.engine.sampling.sampler_input import SamplerState, SamplingRow
from syringa.engine.structured_output import compiler as compiler_module
from syringa.engine.structured_output.compiler import GrammarCompiler, GrammarState
from syringa.errors import InvalidRequest
from syringa.prompt.grammar.validation import validate_grammar
from syringa.types import Grammar, GrammarKind, SamplingParams

END, TURN = 0, 1
VOCAB = 333  # more than the tokenizer has, as in real models, and not a multiple of 32
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>", "<turn>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    built.train_from_iterator(['{"name":"Ann","age":12} hello yes no maybe 12 123 aaaa'] * 4, trainer)
    return built


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer.to_str(), VOCAB, [END, TURN])
    yield compiler
    compiler.close()


def test_compiler_returns_the_memory_that_building_a_tokenizer_took(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(compiler_module, "trim_heap", lambda: calls.append(1))
    compiler = GrammarCompiler(tokenizer.to_str(), VOCAB, [END, TURN])
    for value in ("yes", "no"):
        compiled(compiler, "regex", value)
    compiler.close()
    assert calls == [1]


def compiled(compiler: GrammarCompiler, kind: GrammarKind, value: str) -> GrammarState:
    return compiler.compile(Grammar(kind, value)).result(10)


def allowed(compiler: GrammarCompiler, state: GrammarState) -> set[int]:
    mask = compiler.fill_masks([state])[0].tolist()
    return {i for i in range(VOCAB) if mask[i // 32] >> (i % 32) & 1}


def feed(state: GrammarState, tokenizer: Tokenizer, text: str) -> None:
    for token in tokenizer.encode(text).ids:
        assert state.accept(token)


def generate(compiler: GrammarCompiler, tokenizer: Tokenizer, state: GrammarState, seed: int) -> str:
    sampler = Sampler(VOCAB)
    row = SamplingRow(SamplerState(SamplingParams(seed=seed)))
    tokens: list[int] = []
    noise = torch.Generator().manual_seed(seed)
    while not state.finished:
        masks = compiler.fill_masks([state])
        assert state.error is None
        row.position = len(tokens)
        tokens += sampler.sample(torch.randn(1, VOCAB, generator=noise), [row], masks).tokens
        assert state.accept(tokens[-1])
        assert len(tokens) < 500
    return str(tokenizer.decode([token for token in tokens if token not in (END, TURN)]))


@pytest.mark.parametrize("seed", range(5))
def test_sampled_text_matches_grammar(compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int) -> None:
    schema = json.dumps(PERSON)
    person = json.loads(generate(compiler, tokenizer, compiled(compiler, "json_schema", schema), seed))
    assert person.keys() == {"name", "age"}
    assert isinstance(person["age"], int)
    assert len(person["name"]) <= 5
    assert generate(compiler, tokenizer, compiled(compiler, "regex", "(yes|no)"), seed) in ("yes", "no")
    lark = 'start: "a" b "c"\nb: "x" | "y" b'
    assert set(generate(compiler, tokenizer, compiled(compiler, "lark", lark), seed)[1:-1]) <= {"x", "y"}
    nested = json.dumps({"grammars": [{"lark_grammar": 'start: "n" | "m"'}]})
    assert generate(compiler, tokenizer, compiled(compiler, "llguidance", nested), seed) in ("n", "m")


def test_forced_end_finishes_and_optional_end_allows_end_tokens(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    state = compiled(compiler, "regex", "yes")
    assert not state.finished
    assert not allowed(compiler, state) & {END, TURN}
    feed(state, tokenizer, "yes")
    assert state.finished
    assert state.accept(END)  # the engine may sample it or not
    state = compiled(compiler, "regex", "[0-9]+")
    feed(state, tokenizer, "1")
    assert state.accepting
    assert not state.finished
    assert {END, TURN} <= allowed(compiler, state)
    other = state.fork()
    assert other.accept(TURN)
    assert other.finished
    assert not state.finished
    assert state.error is None


def test_json_grammar_allows_no_extra_whitespace(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiled(compiler, "json_schema", json.dumps(PERSON))
    feed(state, tokenizer, '{"name":')
    assert not any(tokenizer.decode([token])[:1].isspace() for token in allowed(compiler, state))


def test_masks_of_batch_equal_masks_alone(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    states: list[GrammarState | None] = [None]
    for value in ("[0-9]+", "(yes|no)", "a*", "[a-z ]{3,20}"):
        state = compiled(compiler, "regex", value)
        states.append(state)
        later = state.fork()
        token = min(allowed(compiler, later) - {END, TURN})
        later.accept(token)
        states.append(later)
    masks = compiler.fill_masks(states)
    assert masks.dtype == torch.int32
    assert masks.shape == (len(states), (VOCAB + 31) // 32)
    assert (masks[0] == -1).all()
    for i, state in enumerate(states):
        if state is not None:
            assert torch.equal(compiler.fill_masks([state])[0], masks[i])


def test_masks_never_allow_padding_ids(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiled(compiler, "regex", "(.|\n)*")
    assert max(allowed(compiler, state)) < tokenizer.get_vocab_size()


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("json_schema", '{"const": "a<turn>b"}', '"a<turn>b"'),
        ("json_schema", '{"enum": ["<end>"]}', '"<end>"'),
        ("json_schema", '{"type":"object","properties":{"<turn>":{"const":1}},"required":["<turn>"]}', '{"<turn>":1'),
        ("regex", "ab<turn>cd", "ab<turn>cd"),
        ("lark", 'start: "x" y\ny: "<turn><end>"', "x<turn><end>"),
        ("llguidance", '{"grammars": [{"lark_grammar": "start: \\"<turn>\\""}]}', "<turn>"),
    ],
)
def test_text_that_looks_like_special_token_is_text(
    compiler: GrammarCompiler, tokenizer: Tokenizer, kind: GrammarKind, value: str, text: str
) -> None:
    assert generate(compiler, tokenizer, compiled(compiler, kind, value), 1).startswith(text)


@pytest.mark.parametrize("value", ["start: <turn>", "start: <[1]>", 'start: "a"? <turn> | <[1-1]>'])
def test_lark_refers_to_special_tokens_by_name_and_id(compiler: GrammarCompiler, value: str) -> None:
    assert TURN in allowed(compiler, compiled(compiler, "lark", value))
    inside = json.dumps({"grammars": [{"lark_grammar": "start: @inner"}, {"name": "inner", "lark_grammar": value}]})
    assert TURN in allowed(compiler, compiled(compiler, "llguidance", inside))


def test_rejected_token_fails_only_its_state(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    good, bad = compiled(compiler, "regex", "(yes|no)"), compiled(compiler, "regex", "(yes|no)")
    wrong = tokenizer.token_to_id("z")
    assert not bad.accept(wrong)
    assert bad.error is not None
    assert "grammar" in bad.error
    assert not bad.finished
    first = tokenizer.encode("yes").ids[0]
    assert good.accept(first)
    compiler.fill_masks([good, bad])
    assert good.error is None


def test_grammar_that_grows_too_large_fails_while_generating(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiled(compiler, "regex", "a{1000000}")
    assert state.next_mask is not None, "computing it takes long and is part of compiling"
    assert allowed(compiler, state) - {END, TURN}
    for _ in range(3):
        if not state.accept(tokenizer.token_to_id("a")):
            break
        compiler.fill_masks([state])
    assert state.error is not None
    assert "too many" in state.error
    assert not allowed(compiler, state), "an end token would look like a regular end"


def test_grammar_state_fail_sets_error(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state, other = compiled(compiler, "regex", "a"), compiled(compiler, "regex", "a")
    state.fail("No more.")
    assert state.error == "No more."
    assert not state.accept(tokenizer.token_to_id("a"))
    assert not state.finished
    assert other.accept(tokenizer.token_to_id("a"))
    assert other.finished


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("json_schema", "{", "JSON schema"),
        ("json_schema", "[1]", "JSON schema"),
        ("json_schema", '{"type": "objec"}', "objec"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("lark", "start: nowhere", "nowhere"),
        ("llguidance", "start: x", "JSON object"),
        ("llguidance", '{"x": 1}', "grammars"),
        ("json_schema", '{"items":' * 300 + "{}" + "}" * 300, "recursion"),
    ],
)
def test_invalid_grammars_are_rejected_by_validation_and_compiler(
    compiler: GrammarCompiler, kind: GrammarKind, value: str, message: str
) -> None:
    grammar = Grammar(kind, value)
    for check in (validate_grammar, lambda g: compiler.compile(g).result(10)):
        with pytest.raises(InvalidRequest) as caught:
            check(grammar)
        assert message in caught.value.message
        assert caught.value.param == "grammar"


@pytest.mark.parametrize("value", ["{}", "true", json.dumps(PERSON)])
def test_valid_schemas_pass_validation(value: str) -> None:
    validate_grammar(Grammar("json_schema", value))


def test_unknown_special_token_fails_compilation(compiler: GrammarCompiler) -> None:
    grammar = Grammar("lark", "start: <nope>")
    validate_grammar(grammar)
    with pytest.raises(InvalidRequest, match="nope"):
        compiler.compile(grammar).result(10)
    assert allowed(compiler, compiled(compiler, "lark", "start: <turn>")) == {TURN}


def test_compiler_cache_is_not_shared_between_cache_keys(tokenizer: Tokenizer) -> None:
    """A tenant could otherwise find out by the time of compilation which schemas others use."""
    compiler = GrammarCompiler(tokenizer.to_str(), VOCAB, [END], threads=2)
    try:
        for key in (b"a", b"b", b"a", b""):
            compiler.compile(Grammar("regex", "x{3}"), key.decode(), key).result(10)
        assert [key for key, _ in compiler._cache] == [b"b", b"a", b""]
    finally:
        compiler.close()


def test_compile_replays_an_output(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = Grammar("json_schema", json.dumps(PERSON))
    state = compiler.compile(grammar).result(10)
    tokens = tokenizer.encode('{"name":"Ann","age":12').ids
    for cut in range(len(tokens) + 1):
        resumed = compiler.compile(grammar, output=tokens[:cut]).result(10)
        assert resumed.next_mask is not None, "the step loop should not wait for a mask that may take long"
        assert allowed(compiler, resumed) == allowed(compiler, state)
        assert resumed.accepting == state.accepting
        if cut < len(tokens):
            assert resumed.accept(tokens[cut])
            assert state.accept(tokens[cut])
            assert allowed(compiler, resumed) == allowed(compiler, state)


def test_compile_reports_an_output_that_the_grammar_does_not_allow(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    state = compiler.compile(Grammar("regex", "yes|no"), output=tokenizer.encode("yexx").ids).result(10)
    assert state.error is not None
    assert allowed(compiler, state) == set()


def test_compiler_cache_is_shared(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer.to_str(), VOCAB, [END], threads=2)
    try:
        pending = [compiler.compile(Grammar("regex", "x{3}")) for _ in range(8)]
        states = [future.result(10) for future in pending]
        assert len(compiler._cache) == 1
        states[0].accept(tokenizer.token_to_id("x"))
        assert allowed(compiler, states[1]) == allowed(compiler, states[7])
    finally:
        compiler.close()


def test_compiler_cache_is_bounded_by_measured_memory(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer.to_str(), VOCAB, [END], cache_bytes=10 << 20)

    def cached(value: str, memory: int) -> list[str]:
        compiler.compile(Grammar("regex", value, memory)).result(10)
        return [grammar.value for _, grammar in compiler._cache]

    try:
        for index in range(20):
            cached(f"small{index}", 100 << 10)
        assert len(cached("small20", 100 << 10)) == 21
        assert len(cached("medium", 9 << 20)) < 12
        assert cached("medium", 8 << 20)[-1] == "medium"  # the measure of a grammar may vary
        assert cached("large", 20 << 20) == ["large"]  # more than the limit: alone
        assert cached("small", 1 << 10) == ["small"]
        assert compiler._cached_bytes < 1 << 20
    finally:
        compiler.close()
