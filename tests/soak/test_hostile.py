"""Wrong requests by the thousand, over HTTP, gRPC and HTTP/2 frames: no death, no fault of the server's, no memory kept.

`make test-all` runs the short form; `make soak` (NEPTRIO_SOAK_REQUESTS=1000000) the long one. Each of the three ways has a
third of the requests, which several clients send at once. A client's requests are the same in every run of the same
length; what fails names the client's seed. NEPTRIO_SOAK_SEED=TEXT makes others.

What comes back is read and judged: a 5xx is the server's fault but for 501 and two kinds of 503, which say that the
server was not started for that. So are INTERNAL over gRPC and UNAVAILABLE, which says that a limit is reached.
"""

from __future__ import annotations

import os
import random
import re
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from hpack import Decoder, Encoder

from tests.support.infer_messages import identity_inputs, request
from tests.support.memory import held, resident
from tests.support.raw_http2 import INFER, LIVE, PREFACE, STREAM_INFER, frame, message
from tests.support.repository import identity_config, write_model
from tests.support.sanitizer import SANITIZED
from tests.support.server import ServerProcess
from tests.support.waiting import until
from tests.transport.rest.conftest import in_flight
from tests.transport.rest.test_fuzz import Fuzz, write_models

pytestmark = pytest.mark.slow

COUNT = int(os.environ.get("NEPTRIO_SOAK_REQUESTS", "6000"))  # of all kinds together
SEED = os.environ.get("NEPTRIO_SOAK_SEED", "")
CLIENTS = 12  # at once: the server waits up to a second for what some connections left behind
PIPELINED = 8
STREAMS = 20
FRAMES = 20
PATHS = [INFER, INFER, INFER, STREAM_INFER, LIVE] + [
    "/inference.GRPCInferenceService/" + name
    for name in ("ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex", "ModelReady", "LogSettings")
]  # fmt: skip
# what 503 may say: these servers have no control mode explicit, and Triton's answer to a wrong format is 503
ASKED_503 = (b"needs --model-control-mode=explicit", b"invalid argument for --log_format")
# for which gRPC has no better status than INTERNAL
BROKEN_CALLS = ("the request ended in the middle of a message", "invalid gRPC frame: ")
TENSOR = np.array([[7]], np.int32)
BINARY = (
    b'{"inputs":[{"name":"INPUT0","shape":[1,1],"datatype":"INT32","parameters":{"binary_data_size":4}}]}'
)


def judged(status: int, text: bytes, sent: bytes) -> None:
    asked = status == 501 or b"unknown load parameter" in text
    if status == 503:
        asked = any(part in text for part in ASKED_503)
    assert status < 500 or asked, (status, text[:500], sent[:2000])


def damaged(dice: random.Random, data: bytes) -> bytes:
    """A few bytes changed, left out or doubled."""
    made = bytearray(data)
    for _ in range(dice.randrange(1, 4)):
        at = dice.randrange(len(made) + 1)
        how = dice.randrange(4)
        if how == 0 and at < len(made):
            made[at] = dice.choice([0, 9, 10, 13, 32, 48, 57, 58, 127, 128, 255, dice.randrange(256)])
        elif how == 1:
            del made[at : at + dice.choice([1, 2, 20, 1000])]
        elif how == 2:
            made[at:at] = made[at : at + dice.choice([1, 2, 20, 1000])]
        else:
            made[at:at] = dice.randbytes(dice.choice([1, 2, 8]))
    return bytes(made)


class Exchange:
    """A connection on which everything is sent, the sending side closed, and all answers are read."""

    def __init__(self, address: str, data: bytes) -> None:
        host, port = address.rsplit(":", 1)
        self.answer = b""
        with socket.create_connection((host, int(port)), timeout=60) as sock:
            try:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                while got := sock.recv(1 << 16):
                    self.answer += got
            except ConnectionError:  # the server has refused it and closed before it was all read
                pass


def over_http(server: ServerProcess, dice: random.Random, seen: Counter[str]) -> int:
    """Pipelined requests that are nearly right, or one whose bytes are damaged."""
    fuzz = Fuzz(0)
    fuzz.random = dice
    made = []
    for _ in range(PIPELINED):
        method, path, body = fuzz.request()
        if dice.random() < 0.2:
            method, path, body = "POST", "/v2/models/pair/infer", BINARY + TENSOR.tobytes()
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n".encode()
        if body.startswith(BINARY):
            head += b"Inference-Header-Content-Length: %d\r\n" % len(BINARY)
        made.append(head + b"\r\n" + body)
    count = PIPELINED
    if dice.random() < 0.5:
        made, count = [damaged(dice, made[0])], 1
    data = b"".join(made)
    answer = Exchange(server.http, data).answer
    for found in re.finditer(rb"HTTP/1\.1 (\d{3}) [A-Za-z -]+\r\n(?:.+\r\n)*\r\n", answer):
        status = int(found[1])
        seen[f"http {status}"] += 1
        judged(status, answer[found.end() : found.end() + 1000].partition(b"HTTP/1.1 ")[0], data)
    return count


def read_frames(answer: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """(kind, flags, stream, payload)."""
    at = 0
    while at + 9 <= len(answer):
        size = int.from_bytes(answer[at : at + 3], "big")
        stream = int.from_bytes(answer[at + 5 : at + 9], "big") & 0x7FFFFFFF
        yield answer[at + 3], answer[at + 4], stream, answer[at + 9 : at + 9 + size]
        at += 9 + size


def judge_http2(answer: bytes, sent: bytes, seen: Counter[str]) -> None:
    """Whatever a server says on an HTTP/2 connection."""
    decoder = Decoder()
    decoder.max_allowed_table_size = 1 << 32  # SETTINGS may have allowed it
    for kind, flags, _, payload in read_frames(answer):
        if kind == 1:
            assert flags & 4, "the server's own headers never take two frames here"
            headers = dict(decoder.decode(payload))
            if ":status" in headers:
                judged(int(headers[":status"]), b"", sent)
            if "grpc-status" in headers:
                seen[f"grpc {headers['grpc-status']}"] += 1
                text = headers.get("grpc-message", "")
                faults = ("14", "15") if headers.get(":status", "200") != "200" else ("2", "14", "15")
                assert headers["grpc-status"] not in faults, (headers, sent[:2000])
                assert headers["grpc-status"] != "13" or text.startswith(BROKEN_CALLS), (text, sent[:2000])
        elif kind in (3, 7):
            code = int.from_bytes(payload[-4:] if kind == 3 else payload[4:8], "big")
            seen[f"{'reset' if kind == 3 else 'goaway'} {code}"] += 1
            assert code != 2, ("INTERNAL_ERROR", payload, sent[:2000])


def headers_of(encoder: Encoder, path: str, *extra: tuple[str, str]) -> bytes:
    return encoder.encode(
        [
            (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"), ("te", "trailers"),
            ("content-type", "application/grpc"), *extra,
        ]
    )  # fmt: skip


def over_grpc(server: ServerProcess, dice: random.Random, seen: Counter[str]) -> int:
    """Calls whose frames are right and whose messages are damaged."""
    encoder = Encoder()
    data = PREFACE + frame(4, 0, 0)
    for stream in range(1, 2 * STREAMS, 2):
        right = request(
            dice.choice(["pair", "pair", "named", "cached", "classes", "nobody"]),
            TENSOR,
            request_id="id",
            sequence_id=dice.choice([1, "a"]),
            sequence_start=True,
            sequence_end=True,
        )
        body = message(right if dice.random() < 0.2 else damaged(dice, right))
        if dice.random() < 0.1:
            body = damaged(dice, body)
        extra = [("grpc-timeout", dice.choice(["1S", "0n", "9H"]))] if dice.random() < 0.2 else []
        data += frame(1, 4, stream, headers_of(encoder, dice.choice(PATHS), *extra)) + frame(
            0, 1, stream, body
        )
    judge_http2(Exchange(server.grpc, data).answer, data, seen)
    return STREAMS


def over_frames(server: ServerProcess, dice: random.Random, seen: Counter[str]) -> int:
    """Frames of every kind to either port. Half of the connections break no rule of HTTP/2, so that what their calls make
    of each other is seen; the others are ended by the server sooner or later."""
    encoder = Encoder()
    tame = dice.random() < 0.5
    opened, sending = -1, False  # the newest stream, and whether it may have more DATA
    made: list[bytes] = []
    for _ in range(FRAMES):
        how = dice.choices(["call", "open", "data", "reset", "window", "settings"], [25, 25, 30, 8, 8, 4])[0]
        stream = max(opened, 1)
        if not tame:
            how = "any" if dice.random() < 0.05 else how
            stream = dice.choices([stream, 1, 0, dice.randrange(1 << 31)], [90, 5, 3, 2])[0]
        elif (how == "data" and not sending) or opened < 0:
            how = "call"
        if how in ("call", "open"):
            opened += 2
            flags = 4 if how == "call" else dice.choice([4, 4, 4, 5] if tame else [4, 4, 4, 4, 5, 0])
            made.append(frame(1, flags, opened, headers_of(encoder, dice.choice(PATHS))))
            sending = flags == 4
            if how == "call":  # whole, so that it is answered if the rest lets it
                made.append(frame(0, 1, opened, message(b"")))
                sending = False
        elif how == "data":
            body = dice.choice([b"", message(dice.randbytes(dice.choice([0, 3, 50]))), dice.randbytes(7)])
            sending = dice.random() < 0.5
            made.append(frame(0, 0 if sending else 1, stream, body))
        elif how == "reset":
            made.append(frame(3, 0, max(opened, 1), struct.pack(">I", dice.choice([0, 1, 8, 2**32 - 1]))))
            sending = False
        elif how == "window":
            step = struct.pack(">I", dice.choice([1, 8, 1 << 20] if tame else [1, 8, 1 << 20, 0]))
            made.append(frame(8, 0, dice.choice([0, max(opened, 1)]), step))
        elif how == "settings" and tame:
            key, value = dice.choice([(1, 0), (1, 65536), (2, 0), (3, 5), (4, 0), (4, 1 << 20), (5, 1 << 20)])
            made.append(frame(4, 0, 0, struct.pack(">HI", key, value)))
        elif how == "settings":
            value = dice.choice([0, 1, 16384, 1 << 20, 2**32 - 1])
            kind, flags = dice.choice([4, 4, 4, 6, 2]), dice.choice([0, 0, 0, 1])
            made.append(
                frame(kind, flags, dice.choice([0, 0, stream]), struct.pack(">HI", dice.randrange(8), value))
            )
        else:
            size = dice.choice([0, 4, 5, 8, 40])
            made.append(frame(dice.randrange(11), dice.randrange(256), stream, dice.randbytes(size)))
    data = b"".join(made)
    if not tame and dice.random() < 0.5:
        data = damaged(dice, data)
    data = PREFACE + frame(4, 0, 0) + data
    judge_http2(Exchange(dice.choice([server.grpc, server.grpc, server.http]), data).answer, data, seen)
    return FRAMES


WAYS: dict[str, Callable[[ServerProcess, random.Random, Counter[str]], int]] = {
    "http": over_http,
    "grpc": over_grpc,
    "frames": over_frames,
}


def answers(server: ServerProcess) -> None:
    """A right request is answered rightly."""
    with httpclient.InferenceServerClient(server.http) as client:
        found = client.infer("good", identity_inputs(httpclient)).as_numpy("OUTPUT1")
        assert found.tolist() == [list(range(1, 17))]


@pytest.mark.parametrize("way", WAYS)
def test_wrong_requests_leave_nothing(way: str, tmp_path: Path) -> None:
    write_models(tmp_path)
    write_model(tmp_path, "good", identity_config())
    seeds = [f"{way}{SEED}-{number}" for number in range(CLIENTS)]
    dice = [random.Random(seed) for seed in seeds]
    heard = [Counter[str]() for _ in seeds]
    sizes: list[int] = []
    with (
        ServerProcess(tmp_path, "--cache-config=local,size=1000000") as server,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        pid = server.process.pid

        def send(number: int, count: int) -> None:
            done = 0
            while done < count:
                try:
                    done += WAYS[way](server, dice[number], heard[number])
                    assert server.process.poll() is None, "the server is gone"
                except BaseException as error:
                    error.add_note(f"seed {seeds[number]}")
                    raise

        def run(count: int) -> None:
            list(pool.map(send, range(CLIENTS), [count // CLIENTS] * CLIENTS))
            answers(server)
            until(lambda: in_flight(server) == 0, "every request is over")
            sizes.append(resident(pid))

        run(COUNT // 6)  # what every server takes once: caches, buffers, threads
        answers(server)
        before = held(pid)
        for _ in range(4):
            run(COUNT // 24)
        until(lambda: held(pid).within(before), "nothing is held that was not held before")
    seen = sum(heard, Counter[str]())
    print(
        f"\n{way}: {COUNT // 3} requests with the seeds {', '.join(seeds)}; {sizes[0] >> 10} KiB before, "
        f"{sizes[-1] >> 10} KiB after, {dict(seen)}"
    )
    # it is no test if everything is refused, or nothing is
    answered = {
        "http": ("http 200", "http 400"),
        "grpc": ("grpc 0", "grpc 3"),
        "frames": ("grpc", "reset", "goaway"),
    }
    for kind in answered[way]:
        assert any(key.startswith(kind) for key in seen), seen
    if not SANITIZED:
        assert sizes[-1] <= 1.1 * sizes[0], sizes
