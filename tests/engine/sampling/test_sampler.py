from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syringa.engine.sampling import draw
from syringa.engine.sampling.logprobs import prompt_logprobs
from syringa.engine.sampling.sampler import Sampler
from syringa.engine.sampling.sampler_input import NO_TOKEN, SamplerState, SamplingRow
from syringa.types import SamplingParams
from tests.tiers import examples

VOCAB = 300  # more than one block of the search, and not a multiple of it


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    return torch.device(request.param)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread: for many small batches, waking a second one costs more than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def row(
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    *,
    seed: int = 0,
    choice: int = 0,
    position: int = 0,
    logprobs: int | None = None,
    banned: tuple[int, ...] = (),
    **rules: Any,
) -> SamplingRow:
    state = SamplerState(SamplingParams(seed=seed, **rules), prompt or [], output or [])
    return SamplingRow(state, choice, position, logprobs, banned)


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def bits(allowed: list[list[int] | None], vocab: int = VOCAB) -> torch.Tensor:
    masks = np.full((len(allowed), (vocab + 31) // 32), -1, dtype=np.int32)
    for i, ids in enumerate(allowed):
        if ids is not None:
            flags = np.zeros(masks.shape[1] * 32, dtype=np.uint8)
            flags[ids] = 1
            masks[i] = np.packbits(flags, bitorder="little").view(np.int32)
    return torch.from_numpy(masks)


# --- steps 1 to 5: edits of single logits


def expected_edits(x: np.ndarray, s: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    x = x.astype(np.float64)
    for token, bias in s.logit_bias.items():
        x[token] += bias
    for token in set(prompt) | set(output):
        x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
    for token in set(output):
        x[token] -= s.frequency_penalty * output.count(token) + s.presence_penalty
    return x


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=30)


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 1000),
    prompt=tokens,
    output=tokens,
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=5),
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
    frequency=st.sampled_from([0.0, 0.5, -1.0]),
    presence=st.sampled_from([0.0, 0.7, -2.0]),
)
def test_edit_logits_equals_reference(
    device: torch.device,
    seed: int,
    prompt: list[int],
    output: list[int],
    bias: dict[int, float],
    repetition: float,
    frequency: float,
    presence: float,
) -> None:
    s = SamplingParams(
        seed=0,
        logit_bias=bias,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
    )
    state = SamplerState(s, prompt, output[:3])
    for token in output[3:]:
        state.observe(token)
    logits = random_logits(3, seed).to(device)
    before = logits.clone()
    rows = [row(), SamplingRow(state), row()]
    edited = Sampler(VOCAB, device).edit_logits(logits, rows, None)
    assert torch.equal(logits, before)
    assert torch.equal(edited[[0, 2]], logits[[0, 2]])
    expected = expected_edits(logits[1].cpu().numpy(), s, prompt, output)
    np.testing.assert_allclose(edited[1].cpu().numpy(), expected, 1e-5, 1e-5)


def test_sampler_state_fork_is_independent(device: torch.device) -> None:
    state = SamplerState(SamplingParams(seed=0, frequency_penalty=1.0, dry_multiplier=1.0), [1, 2], [3])
    other = state.fork()
    other.observe(4)
    logits = torch.zeros(2, VOCAB, device=device)
    edited = Sampler(VOCAB, device).edit_logits(logits, [SamplingRow(state), SamplingRow(other)], None)
    assert edited.nonzero().tolist() == [[0, 3], [1, 3], [1, 4]]


def test_edit_logits_applies_dry(device: torch.device) -> None:
    repeated = [5, 6, 7, 8, 5, 6, 7]
    edited = Sampler(VOCAB, device).edit_logits(
        torch.zeros(1, VOCAB, device=device), [row(repeated, dry_multiplier=1.0, dry_base=2.0)], None
    )
    assert edited.nonzero().tolist() == [[0, 8]]
    assert edited[0, 8] == -2.0


def test_ids_beyond_vocabulary_do_not_change_other_rows(device: torch.device) -> None:
    rows = [row([VOCAB + 2, 1], repetition_penalty=2.0, banned=(VOCAB + 3,)), row()]
    logits = random_logits(2).to(device)
    assert torch.equal(Sampler(VOCAB, device).edit_logits(logits, rows, None)[1], logits[1])


def test_sampler_applies_masks_and_bans_and_ignores_padding_columns(device: torch.device) -> None:
    logits = random_logits(4, vocab=VOCAB + 20).to(device)
    logits[:, VOCAB:] = 1e4
    rows = [row(temperature=0.0), row(temperature=0.0, banned=(11,)), row(temperature=0.0), row(temperature=0.5)]
    result = Sampler(VOCAB, device).sample(logits, rows, bits([[10, 11], [10, 11], None, [299]]))
    best = logits[0, [10, 11]].argmax().item() + 10
    assert result.tokens == [best, 10, int(logits[2, :VOCAB].argmax()), 299]


def test_sampler_applies_bias_then_penalty_then_mask(device: torch.device) -> None:
    # The bias comes before the repetition penalty, which depends on the sign; the mask comes after all penalties.
    logits = torch.full((1, VOCAB), -50.0, device=device)
    logits[0, 4] = -1.0
    only = row([4], temperature=0.0, logit_bias={4: 3.0}, repetition_penalty=2.0)
    edited = Sampler(VOCAB, device).edit_logits(logits, [only], None)
    assert edited[0, 4] == 1.0
    masked = row([4], temperature=0.0, logit_bias={4: 100.0})
    assert Sampler(VOCAB, device).sample(logits, [masked], bits([[7]])).tokens == [7]


@pytest.mark.parametrize("penalty", [5e-324, 1e-40, 1e40, 1.7e308])
def test_extreme_repetition_penalty_keeps_logits_finite(penalty: float, device: torch.device) -> None:
    logits = torch.zeros((1, VOCAB), device=device)
    logits[0, :4] = torch.tensor([30.0, 20.0, -20.0, -30.0])
    seen = row([0, 1, 2, 3], repetition_penalty=penalty)
    sampler = Sampler(VOCAB, device)
    edited = sampler.edit_logits(logits, [seen], None)[0]
    assert edited.isfinite().all()
    assert edited[:4].tolist() == sorted(edited[:4].tolist(), reverse=True)
    assert edited[0] > edited[4] >= edited[3]
    assert (sampler.sample(logits, [seen]).tokens == [0]) == (penalty < 1)


# --- steps 7 to 9: filters


def kept(p: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Filter with plain loops, best first; ties with the last kept token are kept."""
    order = sorted(range(len(p)), key=lambda i: -p[i])
    left = order
    if 0 < top_k < len(p):
        left = [i for i in order if p[i] >= p[order[top_k - 1]]]
    if top_p < 1:
        whole, mass, nucleus = float(sum(float(p[i]) for i in left)), 0.0, []
        for i in left:
            nucleus.append(i)
            mass += float(p[i])
            if mass >= top_p * whole - 1e-7:
                break
        left = [i for i in left if p[i] >= p[nucleus[-1]]]
    return {i for i in left if p[i] >= min_p * max(p)}


@settings(max_examples=examples(80), deadline=None)
@given(
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.01, 1.0, 4.0, 30.0]),
    ties=st.booleans(),
    top_k=st.sampled_from([0, 1, 2, 3, 40, 299, 300, 1000]),
    top_p=st.sampled_from([1e-6, 0.31, 0.77, 0.95, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.41, 1.0]),
)
def test_cutoffs_equal_reference(
    device: torch.device, seed: int, scale: float, ties: bool, top_k: int, top_p: float, min_p: float
) -> None:
    logits = random_logits(2, seed, scale=scale).to(device)
    if ties:
        logits = (logits / scale).round() * scale
    p = logits.softmax(-1)
    columns = [torch.full((2,), float(value), dtype=torch.float64, device=device) for value in (top_k, top_p, min_p)]
    by_sort = draw.cutoffs_by_sort(p, *columns).cpu().numpy()
    p = p.cpu()
    by_row = draw.cutoffs_by_row(p.numpy(), *[column.tolist() for column in columns])
    for i in range(2):
        q = p[i].numpy()
        expected = kept(q, top_k, top_p, min_p)
        for cutoff in (by_row[i], by_sort[i]):
            actual = set(np.flatnonzero(q >= cutoff).tolist())
            # If the mass equals `top_p` up to rounding, either result is right.
            if actual != expected:
                whole = float(q[q >= np.sort(q)[-min(top_k, VOCAB)]].sum()) if top_k else 1.0
                assert sum(float(q[j]) for j in actual & expected) == pytest.approx(top_p * whole, abs=1e-5)


def test_nucleus_wider_than_first_candidates() -> None:
    logits = random_logits(3, 5, vocab=40_000, scale=0.5)
    p = logits.softmax(-1)
    p[1] = 1 / 40_000
    wide = draw.cutoffs_by_row(p.numpy(), [0] * 3, [0.9, 0.5, 0.99999999], [0] * 3)
    for i, top_p in ((0, 0.9), (1, 1.0), (2, 1.0)):
        mass = p[i].double()[p[i] >= wide[i]].sum().item()
        assert mass == pytest.approx(top_p, abs=2e-5)
    ordered = p[:1].sort(descending=True).values.double().cumsum(-1)
    assert (p[0] >= wide[0]).sum().item() == (ordered[0] < 0.9).sum().item() + 1


# --- step 10: the draw


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    n = counts.sum()
    big = p * n >= 8
    observed, expected = [*counts[big], counts[~big].sum()], [*p[big] * n, p[~big].sum() * n]
    if expected[-1] < 8:
        observed, expected = observed[:-1], expected[:-1]
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    degrees = max(len(expected) - 1, 1)
    # Wilson-Hilferty: the cube root of a chi-square variable is nearly normal.
    return ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "rules",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 12},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.3, "min_p": 0.05},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_sampled_frequencies_match_probabilities(device: torch.device, rules: dict[str, Any]) -> None:
    logits = random_logits(1, 3, scale=2.0).to(device)
    n = 12_000
    state = SamplerState(SamplingParams(seed=1234, **rules))
    counts = np.zeros(VOCAB)
    for start in range(0, n, 1000):
        rows = [SamplingRow(state, choice=i % 3, position=i) for i in range(start, start + 1000)]
        for token in Sampler(VOCAB, device).sample(logits.expand(1000, -1), rows).tokens:
            counts[token] += 1
    p = (logits[0].double() / rules["temperature"]).softmax(-1).cpu().numpy()
    inside = kept(p, rules.get("top_k", 0), rules.get("top_p", 1.0), rules.get("min_p", 0.0))
    p = np.array([q if i in inside else 0.0 for i, q in enumerate(p)])
    assert counts[p == 0].sum() == 0
    assert chi_square(counts, p / p.sum()) < 3.5


def test_uniforms_are_uniform_and_keyed_by_seed_choice_and_position() -> None:
    n = 20_000
    u = draw.uniforms([7] * n, [0] * n, range(n))
    assert u.min() >= 0
    assert u.max() < 1
    counts = np.histogram(u, 100, (0, 1))[0].astype(float)
    assert chi_square(counts, np.full(100, 0.01)) < 3.5
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03
    some = draw.uniforms([1, 2, 1, 1, -1, 2**64 + 1], [0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0])
    assert len(set(some[:5])) == 5
    assert some[5] == some[0]


@pytest.mark.parametrize("u", [0.0, 0.3, 1 - 2.0**-53])
def test_draw_never_picks_token_of_zero_weight(device: torch.device, u: float) -> None:
    logits = torch.full((1, 1000), float("-inf"), device=device)
    logits[0, 130], logits[0, 517] = 0.0, 1.0
    uniform = torch.tensor([u], dtype=torch.float64, device=device)
    token = draw.draw_plain(logits, torch.ones(1, device=device), uniform)
    assert token.item() == (517 if u > 0.27 else 130)


def test_greedy_takes_lowest_id_of_ties(device: torch.device) -> None:
    logits = torch.zeros(2, 1000, device=device)
    logits[0, [140, 139, 900]] = 3.0
    result = Sampler(1000, device).sample(logits, [row(temperature=0.0), row(temperature=0.0)])
    assert result.tokens == [139, 0]


def test_tiny_temperature_is_greedy(device: torch.device) -> None:
    logits = random_logits(2).to(device)
    best = logits.argmax(-1).tolist()
    assert Sampler(VOCAB, device).sample(logits, [row(temperature=1e-30), row(temperature=1e-4)]).tokens == best


# --- batch invariance


def mixed_rows(count: int, seed: int, vocab: int) -> list[SamplingRow]:
    rng = np.random.default_rng(seed)

    def some(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    rows = []
    for _ in range(count):
        rows.append(
            row(
                rng.integers(0, vocab, 40).tolist(),
                rng.integers(0, 9, 20).tolist(),
                seed=int(rng.integers(1 << 40)),
                choice=int(rng.integers(4)),
                position=int(rng.integers(100)),
                logprobs=some(None, 0, 5, 20, 40),
                banned=some((), (3, 4)),
                temperature=some(0.0, 0.7, 1.0, 1.0, 2.0),
                top_k=some(0, 0, 5, 200),
                top_p=some(1.0, 1.0, 0.9),
                min_p=some(0.0, 0.0, 0.05),
                repetition_penalty=some(1.0, 1.0, 1.2),
                presence_penalty=some(0.0, 0.0, 0.4),
                dry_multiplier=some(0.0, 0.0, 0.8),
                logit_bias=some({}, {}, {17: 2.5}),
            )
        )
    return rows


@pytest.mark.parametrize(("vocab", "count"), [(VOCAB, 37), (8192, 21), (8195, 18)])
def test_row_alone_equals_row_in_any_batch(device: torch.device, vocab: int, count: int) -> None:
    rows = mixed_rows(count, vocab, vocab)
    logits = random_logits(count, 9, vocab).to(device)
    allowed: list[list[int] | None] = [list(range(i, vocab, 3)) if i % 4 == 0 else None for i in range(count)]
    masks = bits(allowed, vocab)
    sampler = Sampler(vocab, device)
    together = sampler.sample(logits, rows, masks)
    for i in range(count):
        alone = sampler.sample(logits[i : i + 1], rows[i : i + 1], masks[i : i + 1])
        assert (alone.tokens[0], alone.logprobs[0]) == (together.tokens[i], together.logprobs[i])
    order = np.random.default_rng(1).permutation(count)[: count - 3].tolist()
    shuffled = sampler.sample(logits[order], [rows[i] for i in order], masks[order])
    assert shuffled.tokens == [together.tokens[i] for i in order]
    assert shuffled.logprobs == [together.logprobs[i] for i in order]


def test_weights_and_logprobs_are_bit_equal_in_any_batch(device: torch.device) -> None:
    # Tokens rarely depend on the last bit, so the weights they are drawn from are compared.
    for vocab in (49_152, 5_003):
        logits = random_logits(17, 2, vocab).to(device)
        temperatures = torch.linspace(0.5, 1.5, 17, device=device)
        whole = draw._weights(logits, temperatures)
        sums = draw._blocks(whole, 0.0).sum(-1)
        scores = logits.log_softmax(-1)
        for i in (0, 5, 16):
            alone = draw._weights(logits[i : i + 1], temperatures[i : i + 1])
            assert torch.equal(alone[0], whole[i])
            assert torch.equal(draw._blocks(alone, 0.0).sum(-1)[0], sums[i])
            assert torch.equal(logits[i : i + 1].log_softmax(-1)[0], scores[i])


def test_degenerate_rows_do_not_affect_other_rows(device: torch.device) -> None:
    logits = random_logits(8, 4).to(device)
    clean = logits.clone()
    logits[1, 50] = float("nan")
    logits[3, :] = float("-inf")
    logits[5, 9] = float("inf")
    for rules in ({"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.1}, {"repetition_penalty": 1.1}):
        rows = [row([1], seed=i, logprobs=3, **rules) for i in range(8)]
        masks = bits([None] * 7 + [[]])
        result = Sampler(VOCAB, device).sample(logits, rows, masks)
        expected = Sampler(VOCAB, device).sample(clean, rows)
        for i in range(8):
            if i in (1, 3, 5, 7):
                assert (result.tokens[i], result.logprobs[i]) == (NO_TOKEN, None)
            else:
                assert (result.tokens[i], result.logprobs[i]) == (expected.tokens[i], expected.logprobs[i])


def test_sampler_accepts_empty_batch(device: torch.device) -> None:
    assert Sampler(VOCAB, device).sample(torch.empty(0, VOCAB, device=device), []).tokens == []


def test_sampler_plain_function_can_be_replaced(device: torch.device) -> None:
    sampler = Sampler(VOCAB, device)
    sampler.plain = lambda logits, temperatures, uniform: torch.full((len(logits),), 42, device=device)
    result = sampler.sample(random_logits(3).to(device), [row(), row(top_k=1), row()])
    assert result.tokens[::2] == [42, 42]
    assert result.tokens[1] != 42


# --- log-probabilities


def test_logprobs_are_unaffected_by_sampling_rules(device: torch.device) -> None:
    logits = random_logits(3, 8).to(device)
    scores = logits.double().log_softmax(-1)
    rows = [row(logprobs=k, temperature=0.0, logit_bias={5: 100.0}) for k in (None, 0, 4)]
    result = Sampler(VOCAB, device).sample(logits, rows)
    assert result.logprobs[0] is None
    for i in (1, 2):
        entry = result.logprobs[i]
        assert entry is not None
        assert entry.token == 5
        assert entry.logprob == pytest.approx(scores[i, 5].item(), abs=1e-5)
    best = scores[2].topk(4)
    assert [token for token, _ in entry.top] == best.indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logprobs_order_ties_by_id_and_floor_infinity(device: torch.device) -> None:
    logits = torch.full((1, VOCAB), float("-inf"), device=device)
    logits[0, [200, 7, 90]] = 1.0
    entry = Sampler(VOCAB, device).sample(logits, [row(logprobs=5, temperature=0.0)]).logprobs[0]
    assert entry is not None
    assert [token for token, _ in entry.top[:3]] == [7, 90, 200]
    assert [value for _, value in entry.top[3:]] == [-9999.0, -9999.0]
    assert len({token for token, _ in entry.top}) == 5


def test_logprob_ties_do_not_depend_on_other_rows(device: torch.device) -> None:
    logits = torch.zeros(2, 20_000, device=device)
    rows = [row(logprobs=3), row(logprobs=50)]
    assert (
        Sampler(20_000, device).sample(logits, rows).logprobs[0]
        == Sampler(20_000, device).sample(logits[:1], rows[:1]).logprobs[0]
    )


def test_prompt_logprobs(device: torch.device) -> None:
    count, vocab = 150, 6000
    logits = random_logits(count, 6, vocab).to(device)
    following = np.random.default_rng(0).integers(0, vocab, count).tolist()
    scored = prompt_logprobs(logits, following, 3)
    scores = logits.double().log_softmax(-1)
    assert [entry.token for entry in scored] == following
    for i in range(count):
        assert scored[i].logprob == pytest.approx(scores[i, following[i]].item(), abs=2e-5)
        assert [token for token, _ in scored[i].top] == scores[i].topk(3).indices.tolist()
    assert prompt_logprobs(logits[:1], following[:1], 0)[0].top == []
    assert prompt_logprobs(logits[70:71], following[70:71], 3) == scored[70:71]


# --- preferred tokens


def test_preferred_token_is_taken_if_it_is_most_likely(device: torch.device) -> None:
    logits = torch.zeros(64, VOCAB, device=device)
    logits[:, 7] = 1.0  # the most likely, but rarely sampled
    rows = [row(seed=seed) for seed in range(64)]
    drawn = Sampler(VOCAB, device).sample(logits, rows).tokens
    assert drawn.count(7) < 16
    for each in rows[::2]:
        each.preferred = 7
    for each in rows[1::2]:
        each.preferred = 8  # not the most likely: the sample stands
    preferred = Sampler(VOCAB, device).sample(logits, rows).tokens
    assert preferred[::2] == [7] * 32
    assert preferred[1::2] == drawn[1::2]


def test_mask_applies_before_preferred_token(device: torch.device) -> None:
    logits = random_logits(1).to(device)
    best = int(logits.argmax())
    each = row(temperature=1.0)
    each.preferred = best
    others = [token for token in range(VOCAB) if token != best]
    assert Sampler(VOCAB, device).sample(logits, [each], bits([others])).tokens != [best]


@pytest.mark.parametrize("length", [301, 302, 303, 304])
@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_by_row_pads_rows_on_gpu(length: int, function: Any) -> None:
    """Padding does not change the result. That a row's position does not matter is tested on GPUs."""

    class OnGpu(torch.Tensor):
        is_cuda = True

    rows = torch.randn(5, length)
    found = draw.by_row(function, rows.as_subclass(OnGpu)).as_subclass(torch.Tensor)
    assert found.shape == rows.shape
    assert torch.allclose(found, function(rows, -1), atol=1e-6)


# --- allowed tokens and bad words

SMALL = 40  # not a multiple of the bits of a mask's word
few_tokens = st.frozensets(st.integers(0, SMALL - 1), min_size=1, max_size=6)


@settings(max_examples=examples(100), deadline=None)
@given(
    seed=st.integers(0, 1000),
    allowed=few_tokens,
    grammar=st.none() | few_tokens,
    banned=st.none() | few_tokens,
    temperature=st.sampled_from([0.0, 1.0]),
    top_p=st.sampled_from([1.0, 0.5]),
)
def test_sampler_draws_only_allowed_tokens(
    device: torch.device,
    seed: int,
    allowed: frozenset[int],
    grammar: frozenset[int] | None,
    banned: frozenset[int] | None,
    temperature: float,
    top_p: float,
) -> None:
    rest = next(iter(set(range(SMALL)) - allowed))
    restricted = row(
        seed=seed,
        allowed_tokens=allowed,
        bad_words=tuple((token,) for token in banned or ()),
        logit_bias={rest: 100.0},
        temperature=temperature,
        top_p=top_p,
    )
    rows = [row(seed=seed), restricted, row(seed=seed, allowed_tokens=frozenset(range(SMALL)))]
    masks = None if grammar is None else bits([None, sorted(grammar), None], SMALL)
    sampler, logits = Sampler(SMALL, device), random_logits(3, seed, SMALL).to(device)
    before = None if masks is None else masks.clone()
    sampled = sampler.sample(logits, rows, masks).tokens
    left = allowed & (allowed if grammar is None else grammar) - (banned or frozenset())
    assert sampled[1] in left if left else sampled[1] == NO_TOKEN
    assert masks is None or torch.equal(masks, before)
    alone = sampler.sample(logits[[0, 2]], [row(seed=seed), row(seed=seed)]).tokens
    assert [sampled[0], sampled[2]] == alone


def contains(output: list[int], word: tuple[int, ...]) -> bool:
    return any(tuple(output[at : at + len(word)]) == word for at in range(len(output)))


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 1000),
    words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4),
)
def test_sampler_never_completes_a_bad_word(device: torch.device, seed: int, words: list[tuple[int, ...]]) -> None:
    state = SamplerState(SamplingParams(seed=seed, bad_words=tuple(words)))
    sampler, output = Sampler(5, device), []
    for position in range(30):
        (token,) = sampler.sample(
            random_logits(1, seed + position, 5).to(device), [SamplingRow(state, 0, position)]
        ).tokens
        output.append(token)
        state.observe(token)
        if position == 15:
            state = state.fork()
    assert not any(contains(output, word) for word in words)


def test_bad_words_start_in_the_output() -> None:
    state = SamplerState(SamplingParams(seed=0, bad_words=((1, 2), (3,))), prompt=[1], output=[])
    assert state.bad_words is not None
    assert state.bad_words.banned() == {3}
    state.observe(1)
    assert state.bad_words.banned() == {2, 3}
    assert SamplerState(state.sampling, output=[0, 1]).bad_words.banned() == {2, 3}  # type: ignore[union-attr]


def test_sampler_reports_logprobs_of_chosen_tokens(device: torch.device) -> None:
    logits = random_logits(3).to(device)
    rows = [SamplingRow(row().state, logprobs=0, logprob_tokens=(7, 3)), row(logprobs=2), row(logprobs=0)]
    found = Sampler(VOCAB, device).sample(logits, rows).logprobs
    expected = logits.log_softmax(-1)
    first, second, third = found
    assert first is not None
    assert sorted(first.top) == [(id_, pytest.approx(float(expected[0, id_]), abs=1e-5)) for id_ in (3, 7)]
    assert first.logprob == pytest.approx(float(expected[0, first.token]), abs=1e-5)
    assert second is not None
    assert [id_ for id_, _ in second.top] == expected[1].topk(2).indices.tolist()
    assert third is not None
    assert third.top == []


def test_prompt_logprobs_have_ranks(device: torch.device) -> None:
    logits = random_logits(2).to(device)
    order = logits.argsort(-1, descending=True)
    tokens = [int(order[0, 0]), int(order[1, 41])]
    assert [each.rank for each in prompt_logprobs(logits, tokens, 1)] == [1, 42]
