from syringa.bench.workload import PromptGenerator, Workload, estimate_tokens


def texts(seed: int, count: int = 200) -> list[str]:
    prompts = PromptGenerator(seed)
    return [prompts.around(100, 8) for _ in range(count)]


def test_prompts_are_determined_by_seed() -> None:
    assert texts(1) == texts(1)
    assert not set(texts(1)) & set(texts(2))


def test_prompts_share_at_most_two_opening_words() -> None:
    beginnings = [tuple(text.split()[:3]) for text in texts(0, 1000)]
    assert len(set(beginnings)) == len(beginnings)


def test_prompts_vary_within_requested_length() -> None:
    lengths = [estimate_tokens(text) for text in texts(3)]
    assert min(lengths) >= 90
    assert max(lengths) <= 110
    assert len(set(lengths)) > 5


def test_prompt_length_is_counted_by_given_tokenizer() -> None:
    prompts = PromptGenerator(0, count=len)
    assert all(90 <= len(prompts.text(100)) <= 100 for _ in range(20))


def test_tail_begins_with_space_and_has_requested_length() -> None:
    prompts = PromptGenerator(0)
    prefix, tail = prompts.text(1000), prompts.tail(20)
    assert tail.startswith(" ")
    # A punctuation mark belongs to its word, so a cut may be one token short.
    assert 998 <= estimate_tokens(prefix) <= 1000
    assert 18 <= estimate_tokens(prefix + tail) - estimate_tokens(prefix) <= 20
    assert prompts.tail(20) != tail


def test_workload_has_at_least_one_request_per_stream() -> None:
    workload = Workload()
    assert all(workload.requests_for(streams) >= streams for streams in (1, 2, 4, 16, 64, 100))
    assert workload.quick().requests_for(16) == 16
