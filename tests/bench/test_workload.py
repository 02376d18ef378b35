from syringa.bench.workload import PromptGenerator, Workload, estimate_tokens


def texts(seed: int, count: int = 200) -> list[str]:
    prompts = PromptGenerator(seed)
    return [prompts.around(100, 8) for _ in range(count)]


def test_a_seed_gives_its_texts_again_and_another_seed_others() -> None:
    assert texts(1) == texts(1)
    assert not set(texts(1)) & set(texts(2))


def test_no_two_prompts_share_more_than_two_words_of_their_beginning() -> None:
    beginnings = [tuple(text.split()[:3]) for text in texts(0, 1000)]
    assert len(set(beginnings)) == len(beginnings)


def test_prompts_are_as_long_as_promised_and_vary() -> None:
    lengths = [estimate_tokens(text) for text in texts(3)]
    assert min(lengths) >= 90
    assert max(lengths) <= 110
    assert len(set(lengths)) > 5


def test_a_tokenizer_decides_on_the_length_where_there_is_one() -> None:
    prompts = PromptGenerator(0, count=len)
    assert all(90 <= len(prompts.text(100)) <= 100 for _ in range(20))


def test_a_tail_begins_with_a_space_and_has_its_length() -> None:
    prompts = PromptGenerator(0)
    prefix, tail = prompts.text(1000), prompts.tail(20)
    assert tail.startswith(" ")
    # A mark belongs to the word before it, so a cut may fall one short.
    assert 998 <= estimate_tokens(prefix) <= 1000
    assert 18 <= estimate_tokens(prefix + tail) - estimate_tokens(prefix) <= 20
    assert prompts.tail(20) != tail


def test_a_workload_has_at_least_one_request_a_stream() -> None:
    workload = Workload()
    assert all(workload.requests_for(streams) >= streams for streams in (1, 2, 4, 16, 64, 100))
    assert workload.quick().requests_for(16) == 16
