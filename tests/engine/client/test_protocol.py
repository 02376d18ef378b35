from __future__ import annotations

import itertools
from collections import defaultdict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syringa.engine.client import protocol
from syringa.engine.client.protocol import MOST_NUMBERS, Abort, Deltas, Refused, client_frames, frame, frame_step
from syringa.types import EngineDelta, TokenLogprobs

NUMBERS = st.integers(0, 3) | st.integers(0, MOST_NUMBERS - 1)
PLAIN = st.builds(lambda number, token: EngineDelta(str(number), 0, [token]), NUMBERS, st.integers(0, 1 << 20))
OTHERS = st.one_of(
    st.builds(lambda number: EngineDelta(str(number), 0, [1], finish="stop"), NUMBERS),
    st.builds(lambda number, choice: EngineDelta(str(number), choice, [2]), NUMBERS, st.integers(1, 2)),
    st.builds(lambda number: EngineDelta(str(number), 0, [3], [TokenLogprobs(3, -1.0, [])]), NUMBERS),
    st.builds(lambda number: EngineDelta(str(number), 0, [4], cached_tokens=16), NUMBERS),
    st.builds(lambda number: EngineDelta(str(number), 0, [5], queued_ms=3), NUMBERS),
    st.builds(lambda number, tokens: EngineDelta(str(number), 0, tokens), NUMBERS, st.sampled_from([[], [6, 7]])),
)


def told(messages: list[object]) -> list[EngineDelta]:
    """All deltas, in the order in which a client takes them."""
    found: list[EngineDelta] = []
    for message in messages:
        if isinstance(message, Deltas):
            found += message.deltas
        else:
            assert isinstance(message, protocol.array)
            pairs = list(message)
            found += [EngineDelta(str(pairs[at]), 0, [pairs[at + 1]]) for at in range(0, len(pairs), 2)]
    return found


@given(st.lists(st.one_of(PLAIN, OTHERS)), st.lists(st.integers(0, 400)))
def test_a_step_arrives_as_it_was_whatever_pieces_it_comes_in(deltas: list[EngineDelta], cuts: list[int]) -> None:
    data = frame_step(deltas)
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    frames = client_frames()
    messages: list[object] = []
    for start, end in itertools.pairwise(places):
        messages += frames.feed(data[start:end])
    by_request: dict[str, list[EngineDelta]] = defaultdict(list)
    for delta in told(messages):
        by_request[delta.request].append(delta)
    expected: dict[str, list[EngineDelta]] = defaultdict(list)
    for delta in deltas:
        expected[delta.request].append(delta)
    assert by_request == expected


def test_most_steps_are_eight_bytes_a_token() -> None:
    deltas = [EngineDelta(str(number), 0, [49_000 + number]) for number in range(16)]
    assert len(frame_step(deltas)) == 4 + 16 * 8
    assert frame_step([]) == b""


def test_messages_of_all_kinds_may_come_together() -> None:
    refused = Refused("7", "full", overloaded=True)
    data = frame(refused) + frame_step([EngineDelta("1", 0, [5]), EngineDelta("2", 0, [6], finish="stop")])
    one, two, three = client_frames().feed(data)
    assert one == refused
    assert list(two) == [1, 5]  # type: ignore[call-overload]
    assert three == Deltas([EngineDelta("2", 0, [6], finish="stop")])


def test_a_worker_takes_no_tokens() -> None:
    frames = protocol.worker_frames()
    assert list(frames.feed(frame(Abort("1")))) == [Abort("1")]
    with pytest.raises(msgspec.DecodeError, match="from workers only"):
        list(frames.feed(frame_step([EngineDelta("1", 0, [5])])))


def test_tokens_that_are_cut_short_are_no_message() -> None:
    with pytest.raises(msgspec.DecodeError, match="tokens"):
        list(client_frames().feed(b"\x03\x00\x00\x80abc"))


def test_a_message_has_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_TOKENS", 8)
    with pytest.raises(ValueError, match="too long"):
        frame(Refused("7", "a longer message"))
