from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syringa.engine.client import protocol
from syringa.engine.client.protocol import Abort, Deltas, RequestRejected, client_decoder, frame
from syringa.types import EngineDelta, TokenLogprobs

IDS = st.integers(0, 1 << 40).map(str)
DELTAS = st.one_of(
    st.builds(lambda id, token: EngineDelta(id, 0, [token]), IDS, st.integers(0, 1 << 20)),
    st.builds(lambda id: EngineDelta(id, 0, [1], finish="stop"), IDS),
    st.builds(lambda id, choice: EngineDelta(id, choice, [2]), IDS, st.integers(1, 2)),
    st.builds(lambda id: EngineDelta(id, 0, [3], [TokenLogprobs(3, -1.0, [])]), IDS),
    st.builds(lambda id: EngineDelta(id, 0, [4], cached_tokens=16, queued_ms=3), IDS),
    st.builds(lambda id, tokens: EngineDelta(id, 0, tokens), IDS, st.sampled_from([[], [6, 7]])),
)


@given(st.lists(st.lists(DELTAS)), st.lists(st.integers(0, 400)))
def test_decoder_returns_messages_however_the_stream_is_cut(steps: list[list[EngineDelta]], cuts: list[int]) -> None:
    data = b"".join(frame(Deltas(step)) for step in steps)
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    decoder = client_decoder()
    messages: list[object] = []
    for start, end in itertools.pairwise(places):
        messages += decoder.feed(data[start:end])
    assert messages == [Deltas(step) for step in steps]


def test_decoder_splits_messages_of_different_types() -> None:
    rejected, deltas = RequestRejected("7", "full", overloaded=True), Deltas([EngineDelta("2", 0, [6], finish="stop")])
    assert list(client_decoder().feed(frame(rejected) + frame(deltas))) == [rejected, deltas]


def test_worker_decoder_refuses_messages_of_workers() -> None:
    decoder = protocol.worker_decoder()
    assert list(decoder.feed(frame(Abort("1")))) == [Abort("1")]
    with pytest.raises(msgspec.DecodeError):
        list(decoder.feed(frame(Deltas([EngineDelta("1", 0, [5])]))))


def test_frame_refuses_messages_that_are_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_MESSAGE_BYTES", 8)
    with pytest.raises(ValueError, match="longer than 8"):
        frame(RequestRejected("7", "a longer message"))
