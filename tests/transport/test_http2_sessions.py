"""The HTTP/2 sessions without I/O: any frames, any chunks, and the budget with a clock of its own."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from hpack import Encoder
from hypothesis import given, settings
from hypothesis import strategies as st
from neptrio._cext.grpc_stream import GrpcStream

from neptrio.transport.http2_limits import BUDGET, Nuisance, PingPolicy
from neptrio.transport.http2_session import CHOICES
from tests.support.raw_http2 import PREFACE, frame, message
from tests.transport.conftest import SESSIONS

SECOND = 10**9
HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/x"),
    (":authority", "a"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]


class Echo(GrpcStream):
    """Answers each message with itself; remembers what happened."""

    def __init__(self, session: Any, stream_id: int, path: bytes, headers: Any) -> None:
        super().__init__(session, stream_id, headers)
        self.events: list[Any] = []

    def on_message(self, body: bytes, compressed: bool) -> None:
        self.events.append(body)
        self.send_segments([message(body)])

    def on_half_close(self) -> None:
        self.events.append("end")
        self.finish([(b"grpc-status", b"0")])

    def on_reset(self, code: int) -> None:
        assert self.events[-1:] != ["reset"], "on_reset twice"
        self.events.append("reset")


class Peer:
    """A session and the streams it opened."""

    def __init__(self, name: str) -> None:
        self.streams: list[Echo] = []
        self.session = import_module(CHOICES[name]).Session(self.open, Nuisance(PingPolicy(0, 0)))

    def open(self, session: Any, stream_id: int, path: bytes, headers: Any) -> Echo:
        stream = Echo(session, stream_id, path, headers)
        self.streams.append(stream)
        return stream

    def pump(self) -> bytes:
        sent = b""
        while self.session.wants_output:
            sent += b"".join(bytes(memoryview(part)) for part in self.session.data_to_send())
        return sent


FRAMES = st.one_of(
    st.builds(
        frame,
        st.integers(0, 10),
        st.integers(0, 255),
        st.one_of(st.integers(0, 9), st.integers(0, 2**31 - 1)),
        st.binary(max_size=40),
    ),
    st.builds(
        lambda stream_id, flags: frame(1, flags, stream_id, Encoder().encode(HEADERS)),
        st.sampled_from([1, 3, 5, 7]),
        st.sampled_from([0x4, 0x5, 0x0]),
    ),
    st.builds(
        lambda stream_id, body, end: frame(0, end, stream_id, message(body)),
        st.sampled_from([1, 3, 5, 7]),
        st.binary(max_size=30),
        st.integers(0, 1),
    ),
    st.binary(max_size=30),
)


@pytest.mark.parametrize("name", SESSIONS)
@settings(max_examples=200, deadline=None)
@given(frames=st.lists(FRAMES, max_size=15), cuts=st.lists(st.integers(1, 60), max_size=20))
def test_any_frames(name: str, frames: list[bytes], cuts: list[int]) -> None:
    """Whatever comes, in whatever pieces: no exception, one end per stream, nothing held at the end."""
    peer = Peer(name)
    data = PREFACE + frame(4, 0, 0) + b"".join(frames)
    now = SECOND
    while data:
        n = cuts.pop() if cuts else len(data)
        peer.session.receive(memoryview(bytearray(data[:n])), now)
        data = data[n:]
        now += 1000
        peer.pump()
    peer.session.connection_lost()
    assert peer.session.dead and not peer.session.streams
    assert peer.session.account.out_bytes == peer.session.account.in_bytes == 0
    for stream in peer.streams:
        assert stream.ended
        assert stream.events.count("reset") + stream.events.count("end") >= 1


@pytest.mark.parametrize("name", SESSIONS)
@settings(max_examples=60, deadline=None)
@given(
    bodies=st.lists(st.binary(max_size=300), min_size=1, max_size=6),
    frame_size=st.integers(1, 200),
    cut=st.integers(1, 500),
)
def test_any_cut_of_valid_input(name: str, bodies: list[bytes], frame_size: int, cut: int) -> None:
    """DATA frames and reads may end anywhere: the messages are the same."""
    payload = b"".join(message(body) for body in bodies)
    parts = [payload[i : i + frame_size] for i in range(0, len(payload), frame_size)]
    data = PREFACE + frame(4, 0, 0) + frame(1, 4, 1, Encoder().encode(HEADERS))
    data += b"".join(frame(0, 0, 1, part) for part in parts) + frame(0, 1, 1)
    peer = Peer(name)
    sent = b""
    for at in range(0, len(data), cut):
        peer.session.receive(memoryview(bytearray(data[at : at + cut])), SECOND)
        sent += peer.pump()
    assert peer.streams[0].events == [*bodies, "end"]
    assert not peer.session.dead and not peer.session.streams
    assert peer.session.account.out_bytes == peer.session.account.in_bytes == 0
    answer = b""
    while sent:
        length = int.from_bytes(sent[:3], "big")
        if sent[3] == 0:
            answer += sent[9 : 9 + length]
        sent = sent[9 + length :]
    assert answer == payload


@pytest.mark.parametrize("name", SESSIONS)
def test_a_stream_that_raises_is_reset_alone(name: str) -> None:
    peer = Peer(name)

    def broken(body: bytes, compressed: bool) -> None:
        raise RuntimeError("kaputt")

    head = Encoder().encode(HEADERS)
    peer.session.receive(PREFACE + frame(4, 0, 0) + frame(1, 4, 1, head) + frame(1, 4, 3, head), SECOND)
    peer.streams[0].on_message = broken  # type: ignore[method-assign]
    peer.session.receive(frame(0, 1, 1, message(b"a")) + frame(0, 1, 3, message(b"b")), SECOND)
    peer.pump()
    assert peer.streams[0].events == ["reset"] and peer.streams[1].events == [b"b", "end"]
    assert not peer.session.dead


# ---------------------------------------------------------------- the budget


def test_the_budget_is_refilled_by_time_and_work() -> None:
    budget = Nuisance()
    budget.refill(SECOND, 0)
    assert budget.spend(int(BUDGET)) and not budget.spend(1)
    budget.refill(2 * SECOND, 0)
    assert budget.spend(99) and not budget.spend(1)
    budget.refill(2 * SECOND, 50)
    assert budget.spend(49) and not budget.spend(1)
    budget.refill(10**6 * SECOND, 10**9)
    assert budget.budget == BUDGET
    budget.refill(SECOND, 0)  # a clock that goes back takes nothing
    assert budget.budget == BUDGET


def test_ping_strikes() -> None:
    budget = Nuisance(PingPolicy(min_interval_ns=10 * SECOND, max_strikes=2))
    budget.refill(SECOND, 0)
    assert budget.pinged(0)
    budget.refill(2 * SECOND, 0)
    assert budget.pinged(0) and budget.pinged(0) and budget.strikes == 2
    budget.refill(13 * SECOND, 0)
    assert budget.pinged(0)  # late enough
    assert budget.pinged(1)  # a call is open
    budget.strikes = 0  # headers were sent
    assert budget.pinged(0) and budget.pinged(0) and not budget.pinged(0)


def test_no_strikes() -> None:
    budget = Nuisance(PingPolicy(min_interval_ns=10 * SECOND, max_strikes=0))
    budget.refill(SECOND, 0)
    assert all(budget.pinged(0) for _ in range(1000))
    assert not all(budget.pinged(0) for _ in range(1000))  # it costs, all the same
