"""The benchmark workload, and seeded English prompts of which no two share a beginning.

Every word and punctuation mark below is one token of SmolLM2's vocabulary, so a text's length in tokens is known
without a tokenizer. There are no digits, which a converted tokenizer may split differently.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import msgspec


def _listed(text: str) -> list[str]:
    return [" ".join(entry.split()) for entry in text.split(",")]


_OPENINGS = _listed("""
    After, Although, Because, Before, If, Later, Once, Perhaps, Since, Soon, Though, Today, Until, Unless,
    When, Where, While, Yet, Suddenly, Again, Often, Sometimes, Usually, Then, Now, Still, Also, Here, There,
    Next, Finally, Maybe, Whenever, Eventually, First, Meanwhile, Recently, Clearly, Certainly, Thus, Instead,
    Only
""")
_SUBJECTS = _listed("""
    teacher, doctor, farmer, student, writer, driver, mother, father, brother, sister, child, king, queen,
    soldier, artist, lawyer, singer, neighbor, scientist, engineer, captain, judge, nurse, priest, merchant,
    baker, traveler, friend, stranger, painter, gardener, hunter, pilot, sailor, worker, leader, manager,
    professor, poet, musician
""")
_VERBS = _listed("""
    found, carried, watched, followed, wanted, remembered, described, opened, painted, visited, needed, built,
    sold, bought, wrote, read, cleaned, covered, discovered, studied, measured, moved, changed, noticed,
    reached, repaired
""")
_ADJECTIVES = _listed("""
    old, small, quiet, bright, heavy, simple, strange, green, dark, warm, cold, long, narrow, broken, empty,
    golden, young, gentle, famous, local, public, distant, modern, ancient, wooden, yellow, brown, silver,
    busy, careful
""")
_OBJECTS = _listed("""
    house, river, letter, garden, bridge, window, table, book, road, boat, machine, picture, door, basket,
    mountain, market, station, field, lamp, chair, map, clock, village, kitchen, wall, church, school, coat,
    song, story, island, engine, tower, ship, stone, tree, horse, wheel
""")
_PLACES = _listed("""
    near the harbor, behind the hill, in the valley, across the street, at the edge of the forest, by the old
    wall, under the trees, on the other side of the lake, in a corner of the room, outside the city, above the
    shop, along the coast
""")
_LINKS = _listed("""
    and then, but never, because nobody else, while another friend, so that every neighbor, although the whole
    town, until a young visitor, before the next morning the family
""")


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent to a server in one round."""

    streams: tuple[int, ...] = (1, 4, 16, 64)
    # Requests in all by number of streams, so that every load runs for some seconds; by default one per stream.
    requests: dict[int, int] = msgspec.field(default_factory=lambda: {1: 4, 4: 8, 16: 32})
    prompt_tokens: int = 100
    prompt_spread: int = 8  # documented as ± 10, with a margin for other tokenizers
    output_tokens: int = 64
    long_tokens: int = 1000
    tail_tokens: int = 20  # after a cached prefix; 0: first tokens with a cached prefix are not measured
    first_token_repeats: int = 2
    warm_up_requests: int = 16  # at most; before the load of each number of streams
    # Of prompts that fill the slots of 16 streams, after which memory is measured again, in the first round only: they
    # take minutes. 0: not measured.
    fill_tokens: int = 0

    def requests_for(self, streams: int) -> int:
        return max(streams, self.requests.get(streams, streams))

    def quick(self) -> Workload:
        """Return the same workload with the minimum number of requests."""
        return msgspec.structs.replace(self, requests={}, first_token_repeats=1)


class PromptGenerator:
    """Generate texts from a seed. One generator never repeats an opening.

    `count` returns the number of tokens of a text; by default words and punctuation marks are counted.
    """

    def __init__(self, seed: int | str, count: Callable[[str], int] | None = None) -> None:
        self._random = random.Random(f"syringa {seed}")
        self._count = count or estimate_tokens
        pairs = list(itertools.product(_OPENINGS, _SUBJECTS))
        self._random.shuffle(pairs)
        # Verb by verb: until the pairs are used up, two texts share at most "After the".
        self._openings = ((*pair, verb) for verb in _VERBS for pair in pairs)

    def text(self, tokens: int) -> str:
        """Return English text of `tokens` tokens with a unique opening."""
        opening, subject, verb = next(self._openings)
        words = f"{opening} the {subject} {verb} a {self._phrase()}, {self._sentence().lower()}".split()
        return self._cut(words, tokens)

    def around(self, tokens: int, spread: int) -> str:
        """Return a text of `tokens` ± `spread` tokens."""
        return self.text(tokens + self._random.randint(-spread, spread))

    def tail(self, tokens: int) -> str:
        """Return a continuation that begins with a space, so that no token spans the boundary."""
        return " " + self._cut(self._sentence().split(), tokens)

    def _cut(self, words: list[str], tokens: int) -> str:
        while self._count(" ".join(words)) < tokens:
            words += self._sentence().split()
        low, high = 1, len(words)
        while low < high:  # bisect for the most words that fit
            middle = (low + high + 1) // 2
            if self._count(" ".join(words[:middle])) <= tokens:
                low = middle
            else:
                high = middle - 1
        return " ".join(words[:low])

    def _sentence(self) -> str:
        pick = self._random.choice
        first = f"The {pick(_ADJECTIVES)} {pick(_SUBJECTS)} {pick(_VERBS)} the {self._phrase()} {pick(_PLACES)}"
        if self._random.random() < 0.6:
            return f"{first}, {pick(_LINKS)} {pick(_VERBS)} the {self._phrase()} {pick(_PLACES)}."
        return f"{first}."

    def _phrase(self) -> str:
        return f"{self._random.choice(_ADJECTIVES)} {self._random.choice(_OBJECTS)}"


def estimate_tokens(text: str) -> int:
    """Return the length of a generated text in tokens."""
    return text.count(" ") + bool(text.strip()) + text.count(",") + text.count(".")
