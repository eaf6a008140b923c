"""The HTTP/2 sessions without I/O: any frames, any chunks, and the budget with a clock of its own."""

from __future__ import annotations

import struct
from importlib import import_module
from typing import Any

import pytest
from hpack import Decoder, Encoder
from hypothesis import given, settings
from hypothesis import strategies as st

from neptrio.transport.grpc.message_stream import GrpcStream
from neptrio.transport.http2.limits import BUDGET, FloodBudget, PingPolicy
from neptrio.transport.http2.session import CHOICES
from tests.support.raw_http2 import PREFACE, frame, message
from tests.transport.conftest import SESSIONS

SECOND = 10**9
GOAWAY = 7
FRAME_SIZE_ERROR = 6
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
        self.session = import_module(CHOICES[name]).Session(self.open, FloodBudget(PingPolicy(0, 0)))

    def open(self, session: Any, stream_id: int, path: bytes, headers: Any) -> Echo:
        stream = Echo(session, stream_id, path, headers)
        self.streams.append(stream)
        return stream

    def pump(self) -> bytes:
        sent = b""
        while self.session.wants_output:
            sent += b"".join(bytes(memoryview(part)) for part in self.session.data_to_send())
        return sent


@pytest.mark.parametrize("name", SESSIONS)
@pytest.mark.parametrize("code", [0, 8, 2**31 - 1, 2**31, 2**32 - 1])
def test_a_reset_ends_the_call_whatever_its_code_is(name: str, code: int) -> None:
    peer = Peer(name)
    peer.session.receive(PREFACE + frame(4, 0, 0) + frame(1, 4, 1, Encoder().encode(HEADERS)), SECOND)
    peer.session.receive(frame(0, 0, 1, message(b"x" * 100)[:50]), SECOND)
    assert peer.session.account.in_bytes
    peer.session.receive(frame(3, 0, 1, struct.pack(">I", code)), SECOND)
    assert peer.streams[0].ended and peer.streams[0].events == ["reset"]
    assert not peer.session.account.in_bytes and not peer.session.dead


@pytest.mark.parametrize("name", SESSIONS)
@pytest.mark.parametrize(
    "size", [2, 3, 7, 8, 9, 10, 1000]
)  # libnghttp2 takes no CONTINUATION head in nine parts
def test_what_has_come_of_a_frame_is_known(name: str, size: int) -> None:
    """Connections end those that do not come (transport/rest/http2_connection, rule 3)."""
    block = Encoder().encode(HEADERS)
    frames = [PREFACE, frame(4, 0, 0), frame(1, 0, 1, block[:5]), frame(9, 4, 1, block[5:])]
    frames += [frame(0, 0, 1, message(b"x")), frame(0, 1, 1)]
    whole = [True, True, False, True, True, True]  # behind each of these
    peer, data, ends = Peer(name), b"".join(frames), []
    for each in frames:
        ends.append((ends[-1] if ends else 0) + len(each))
    at_ends = dict(zip(ends, whole, strict=True))
    for at in range(0, len(data), size):
        peer.session.receive(data[at : at + size], SECOND)
        come = min(at + size, len(data))
        assert peer.session.partial is not at_ends.get(come, False), come
        assert peer.session.begun == sum(end + 9 <= come for end in ends[:-1]), come
    assert peer.streams[0].events == [b"x", "end"] and not peer.session.dead


@pytest.mark.parametrize("name", SESSIONS)
@pytest.mark.parametrize("step", [1, 4, 9, 100])
def test_a_frame_that_is_too_large_is_refused_by_its_head(name: str, step: int) -> None:
    """Behind what came before it, and not only when 16 MB have come."""
    peer, head = Peer(name), b"\xff" * 9
    whole = [
        PREFACE,
        frame(4, 0, 0),
        frame(1, 4, 1, Encoder().encode(HEADERS)),
        frame(0, 0, 1, message(b"x")),
    ]
    data = b"".join(whole) + head
    for at in range(0, len(data), step):
        assert not peer.session.dead
        peer.session.receive(data[at : at + step], SECOND)
    sent, codes = peer.pump(), []
    assert peer.session.finished and peer.streams[0].events == [b"x"]
    while sent:
        size = int.from_bytes(sent[:3], "big")
        codes += [int.from_bytes(sent[13:17], "big")] if sent[3] == GOAWAY else []
        sent = sent[9 + size :]
    assert codes == [FRAME_SIZE_ERROR]


@pytest.mark.parametrize("name", SESSIONS)
@pytest.mark.parametrize(
    "sizes",  # in the SETTINGS before each call
    [
        ((0,), (65537, 65537), ()),
        ((), (0, 0), (4096,)),
        ((0,), (4096, 4096, 4096), (0,)),
        ((4096,), (0, 4096), ()),
    ],
)
def test_tables_of_headers_stay_alike(name: str, sizes: tuple[tuple[int, ...], ...]) -> None:
    """SETTINGS that change the table's size, and say the same again before there are headers to announce it in."""
    peer, encoder, decoder = Peer(name), Encoder(), Decoder()
    decoder.max_allowed_table_size = 1 << 20
    peer.session.receive(PREFACE + frame(4, 0, 0), SECOND)
    answered = []
    for stream, changes in zip((1, 3, 5, 7), (*sizes, ()), strict=True):
        for size in changes:
            peer.session.receive(frame(4, 0, 0, struct.pack(">HI", 1, size)), SECOND)
        block = encoder.encode(HEADERS)
        peer.session.receive(frame(1, 4, stream, block) + frame(0, 1, stream, message(b"x")), SECOND)
        sent = peer.pump()
        while sent:
            size, kind = int.from_bytes(sent[:3], "big"), sent[3]
            if kind == 1:
                answered.append(decoder.decode(sent[9 : 9 + size]))
            sent = sent[9 + size :]
    assert [headers for headers in answered if ("grpc-status", "0") in headers] == [answered[1]] * 4
    assert len(answered) == 8


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


@pytest.mark.slow
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


@pytest.mark.slow
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
    budget = FloodBudget()
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
    budget = FloodBudget(PingPolicy(min_interval_ns=10 * SECOND, max_strikes=2))
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
    budget = FloodBudget(PingPolicy(min_interval_ns=10 * SECOND, max_strikes=0))
    budget.refill(SECOND, 0)
    assert all(budget.pinged(0) for _ in range(1000))
    assert not all(budget.pinged(0) for _ in range(1000))  # it costs, all the same


def parse(sent: bytes) -> list[tuple[int, int, int]]:
    """(type, flags, stream) of each frame."""
    found = []
    while sent:
        length = int.from_bytes(sent[:3], "big")
        found.append((sent[3], sent[4], int.from_bytes(sent[5:9], "big")))
        sent = sent[9 + length :]
    return found


def calling(peer: Peer, *stream_ids: int, body: bytes = b"") -> bytes:
    """Opens the session and whole calls; what the server says to that."""
    calls = b"".join(
        frame(1, 4, i, Encoder().encode(HEADERS)) + frame(0, 1, i, message(body)) for i in stream_ids
    )
    peer.session.receive(memoryview(bytearray(PREFACE + frame(4, 0, 0) + calls)), SECOND)
    return peer.pump()


@pytest.mark.parametrize("name", SESSIONS)
def test_a_lost_connection_gets_no_more_of_its_answers(name: str) -> None:
    """Neither the rest of one nor an end that would make half of it look whole; whoever asks later gets nothing."""
    peer = Peer(name)
    large = bytes(200_000)
    first = calling(peer, 1, 3, body=b"")
    assert (1, 5, 1) in parse(first)  # both are answered
    for i, stream_id in enumerate((5, 7)):
        peer.session.receive(memoryview(bytearray(frame(1, 4, stream_id, Encoder().encode(HEADERS)))), SECOND)
        peer.streams[2 + i].send_segments([message(large)])
        peer.streams[2 + i].finish([(b"grpc-status", b"0")])
    assert (0, 0, 5) in parse(peer.pump())  # as far as the window goes
    peer.session.receive(memoryview(bytearray(frame(8, 0, 0, b"\0\x10\0\0"))), SECOND)
    peer.session.connection_lost()
    del peer.streams[:]
    assert not {kind for kind, _, _ in parse(peer.pump())} & {0, 1}
    assert peer.session.finished and not peer.session.streams
    assert peer.session.account.out_bytes == 0


@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_after_its_connection_was_lost(name: str) -> None:
    """Timers and tasks may still have it: everything they may ask is answered, and says nothing."""
    peer = Peer(name)
    calling(peer, 1)
    peer.session.receive(memoryview(bytearray(frame(1, 4, 3, Encoder().encode(HEADERS)))), SECOND)
    stream = peer.streams[1]
    session = peer.session
    session.connection_lost()
    session.connection_lost()
    session.receive(memoryview(b"more"), SECOND)
    session.output_ready(stream)
    session.reset(stream)
    stream.withheld = 5
    session.resume_input(stream)
    session.hold()
    session.release()
    session.ping()
    session.start_drain()
    session.finish_drain()
    session.terminate(2)
    assert {kind for kind, _, _ in parse(peer.pump())} <= {7}
    assert session.finished


@pytest.mark.parametrize("name", SESSIONS)
def test_the_reason_of_the_end_is_among_the_last_words(name: str) -> None:
    peer = Peer(name)
    calling(peer, 1)
    peer.session.receive(memoryview(bytearray(frame(0, 0, 0, b"x"))), SECOND)
    peer.session.connection_lost()
    assert 7 in {kind for kind, _, _ in parse(peer.pump())}


@pytest.mark.parametrize("name", SESSIONS)
def test_a_stream_that_answers_and_then_fails_to_open(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its answer was lent before anybody else knew of the stream; it is reset, and its neighbours are answered."""
    peer = Peer(name)

    def fail(session: Any, stream_id: int, path: bytes, headers: Any) -> Any:
        stream = Echo(session, stream_id, path, headers)
        if stream_id == 1:
            stream.send_segments([message(bytes(100_000))])
            raise RuntimeError("no")
        return stream

    session = peer.session = import_module(CHOICES[name]).Session(fail, FloodBudget(PingPolicy(0, 0)))
    frames = parse(calling(peer, 1, 3))
    assert (3, 0, 1) in frames and (1, 5, 3) in frames
    assert not session.dead and not session.streams
    assert session.account.out_bytes == 0
    assert "stream 1 failed" in caplog.text


@pytest.mark.parametrize("name", SESSIONS)
def test_a_stream_that_fails_once_it_may_write_on(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is reset; the session lives on."""

    class Failing(Echo):
        def on_half_close(self) -> None:
            self.events.append("end")

        def on_writable(self) -> None:
            raise RuntimeError("no")

    peer = Peer(name)

    def choose(session: Any, stream_id: int, path: bytes, headers: Any) -> Any:
        return (Failing if stream_id == 1 else Echo)(session, stream_id, path, headers)

    session = peer.session = import_module(CHOICES[name]).Session(choose, FloodBudget(PingPolicy(0, 0)))
    frames = parse(calling(peer, 1, 3))
    assert (3, 0, 1) in frames and (1, 5, 3) in frames
    assert not session.dead and not session.streams


def test_a_session_is_entered_once_at_a_time() -> None:
    """The library must not be entered from its own callbacks: it would lose its state."""
    if "nghttp2" not in SESSIONS:
        pytest.skip("libnghttp2 was not there when neptrio was built")
    found: list[BaseException] = []

    class Nested(Echo):
        def on_message(self, body: bytes, compressed: bool) -> None:
            for enter in (session.data_to_send, session.connection_lost, lambda: session.receive(b"x" * 9)):
                try:
                    enter()
                except RuntimeError as error:
                    found.append(error)
            super().on_message(body, compressed)

    peer = Peer("nghttp2")
    session = peer.session = import_module(CHOICES["nghttp2"]).Session(Nested, FloodBudget(PingPolicy(0, 0)))
    assert (1, 5, 1) in parse(calling(peer, 1))
    assert len(found) == 3


@pytest.mark.parametrize("name", SESSIONS)
def test_refusals_that_nobody_reads_do_not_gather(name: str) -> None:
    """A client that has not acknowledged our SETTINGS may open any number of streams; each beyond the limit is refused."""
    peer = Peer(name)
    peer.session.receive(memoryview(bytearray(PREFACE + frame(4, 0, 0))), SECOND)
    peer.pump()
    encoder = Encoder()
    encoder.header_table_size = 0
    block = encoder.encode(HEADERS)
    for first in range(1, 80_000, 2000):
        opened = b"".join(frame(1, 4, i, block) for i in range(first, first + 2000, 2))
        peer.session.receive(memoryview(bytearray(opened)), SECOND)
        if peer.session.dead:
            break
    assert peer.session.dead
    assert GOAWAY in {kind for kind, _, _ in parse(peer.pump())}


@pytest.mark.parametrize("name", SESSIONS)
def test_a_client_that_reads_is_refused_any_number_of_streams(name: str) -> None:
    """One that opened streams before it had our SETTINGS, with libnghttp2; h2 ends the connection."""
    peer = Peer(name)
    peer.session.receive(memoryview(bytearray(PREFACE + frame(4, 0, 0))), SECOND)
    block = Encoder().encode(HEADERS)
    refused = 0
    for first in range(1, 80_000, 2000):
        opened = b"".join(frame(1, 4, i, block) for i in range(first, first + 2000, 2))
        peer.session.receive(memoryview(bytearray(opened)), SECOND)
        refused += sum(kind == 3 for kind, _, _ in parse(peer.pump()))
    assert refused > 30_000 or name == "h2"
    assert peer.session.dead == (name == "h2")
