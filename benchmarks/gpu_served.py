"""Kernel models measured through a served port: a real server, and clients in processes of their own.

    python -m benchmarks.gpu_served [--kind CPU] [--seconds S]

prints Markdown; benchmarks.gpu has it as its last section. Each client is a thread with one connection, which sends
the same HTTP request with binary tensors as soon as it has the answer to the last one, and checks every answer. It
needs nothing but Python and this package, since a machine with a GPU may have no more.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.requests import Workload, http_binary

PROCESSES = 8  # so many clients' processes at most; the connections are spread over them
WARMUP = 0.3  # seconds whose answers do not count


def message(work: Workload) -> tuple[bytes, bytes]:
    """An inference request, and the bytes with which its answer must end."""
    body, length, expected = http_binary(work)
    head = (
        f"POST /v2/models/{work.model}/infer HTTP/1.1\r\nHost: here\r\n"
        f"Inference-Header-Content-Length: {length}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body, expected


def answer(connection: socket.socket, buffer: bytearray) -> tuple[int, int]:
    """Receives one answer into the buffer. Returns (length of its head, length of all); raises when it is no 200."""
    view, have, head, total = memoryview(buffer), 0, 0, 1
    while have < total:
        got = connection.recv_into(view[have:])
        if not got:
            raise RuntimeError("the server has closed the connection")
        have += got
        if not head:
            end = buffer.find(b"\r\n\r\n", 0, have)
            total = have + 1
            if end >= 0:
                head = end + 4
                lines = bytes(view[:end]).decode().split("\r\n")
                if " 200 " not in f"{lines[0]} ":
                    raise RuntimeError(lines[0])
                fields = dict(line.lower().split(": ", 1) for line in lines[1:])
                total = head + int(fields["content-length"])
                if total > len(buffer):
                    raise RuntimeError(f"an answer of {total} bytes")
    return head, have


def client(port: int, request: bytes, expected: bytes, seconds: float, taken: list[int]) -> None:
    """One connection's requests; appends the nanoseconds of each."""
    buffer = bytearray(len(expected) + 65536)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begin = time.monotonic() + WARMUP
        while (now := time.monotonic()) < begin + seconds or not taken:
            start = time.perf_counter_ns()
            connection.sendall(request)
            _, end = answer(connection, buffer)
            took = time.perf_counter_ns() - start
            if not buffer.endswith(expected, 0, end):
                raise RuntimeError("a wrong answer")
            if now >= begin:
                taken.append(took)


def clients(port: int, request: Path, expected: Path, threads: int, seconds: float) -> list[int]:
    """The nanoseconds of all requests of several connections in this process. Raises what one of them raised."""
    body, wanted = request.read_bytes(), expected.read_bytes()
    found: list[list[int]] = [[] for _ in range(threads)]
    failures: list[BaseException] = []

    def run(taken: list[int]) -> None:
        try:
            client(port, body, wanted, seconds, taken)
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=run, args=(taken,)) for taken in found]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if failures:
        raise failures[0]
    return [took for taken in found for took in taken]


def measure(address: str, work: Workload, connections: int, seconds: float) -> tuple[float, float, float]:
    """(requests per second, median and 99th percentile in microseconds)."""
    request, expected = message(work)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / "request", Path(folder) / "expected"]
        for file, data in zip(files, (request, expected), strict=True):
            file.write_bytes(data)
        count = min(connections, PROCESSES)
        shares = [connections // count + (i < connections % count) for i in range(count)]
        command = [sys.executable, "-m", "benchmarks.gpu_served", "--client", address.rsplit(":", 1)[1]]
        command += [*map(str, files), "--seconds", str(seconds), "--threads"]
        running = [subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, text=True) for n in shares]
        taken: list[int] = []
        for process in running:
            said, _ = process.communicate()
            if process.returncode:
                raise RuntimeError("a client has failed")
            taken += json.loads(said)
    p50, p99 = np.percentile(taken, [50, 99]) / 1000
    return len(taken) / seconds, float(p50), float(p99)


def served(kind: str, seconds: float, sizes: tuple[int, ...] = (1, 8, 64), large: int = 1 << 20) -> list[str]:
    """The table: the example model at some batch sizes, and y = 2 x of `large` floats, with 1, 8 and 64 connections."""
    from benchmarks.gpu import simple_case, stream_case
    from tests.support.server import ServerProcess

    lines = [
        "| request | connections | requests/s | p50 (us) | p99 (us) | tensors in + out (GB/s) |",
        "|---|---|---|---|---|---|",
    ]
    rng = np.random.default_rng(7)
    works: list[tuple[str, Workload]] = []
    for n in sizes:
        a, b = (rng.integers(-1000, 1000, (n, 16)).astype(np.int32) for _ in range(2))
        works.append((f"simple, batch {n}", Workload("simple", (("INPUT0", a), ("INPUT1", b)), a - b)))
    x = rng.standard_normal((1, large)).astype(np.float32)
    works.append((f"y = 2 x, {x.nbytes >> 10} KiB", Workload("scale", (("X", x),), x * 2, "FP32")))
    with tempfile.TemporaryDirectory() as folder:
        for case in (simple_case(), stream_case()):
            case.write(Path(folder), f" instance_group {{ kind: KIND_{kind} count: 1 }}")
        with ServerProcess(Path(folder)) as server:
            for title, work in works:
                nbytes = sum(a.nbytes for _, a in work.inputs) * 2
                for connections in (1, 8, 64):
                    rate, p50, p99 = measure(server.http, work, connections, seconds)
                    lines.append(
                        f"| {title} | {connections} | {rate:.0f} | {p50:.0f} | {p99:.0f} | {nbytes * rate / 1e9:.3f} |"
                    )
    return lines


def main() -> int:
    """Prints the table; with --client, the times of some connections as JSON."""
    p = argparse.ArgumentParser()
    p.add_argument("--kind", choices=("GPU", "CPU"), default="GPU")
    p.add_argument("--seconds", type=float, default=2.0)
    p.add_argument("--client", nargs=3, metavar=("PORT", "REQUEST", "EXPECTED"), help=argparse.SUPPRESS)
    p.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    options: Any = p.parse_args()
    if options.client:
        port, request, expected = options.client
        found = clients(int(port), Path(request), Path(expected), options.threads, options.seconds)
        print(json.dumps(found))
        return 0
    print("\n".join(served(options.kind, options.seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
