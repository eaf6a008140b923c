"""What a request to a compiled backend costs beside tritonserver with the same library: one client, one element, in turns.

    NEPTRIO_TRITONSERVER=FOLDER python -m benchmarks.compiled [--requests N] [--rounds N]

The library is that of the tests (tests/backends/compiled), built by the C compiler: it copies its input. Printed is the median time
of a request over HTTP, which is not the backend's alone: the difference is that of all that surrounds it, too. The target is at
most 50 us more than tritonserver.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import struct
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks import peers, tritonserver

TARGET_US = 50
SOURCES = peers.ROOT / "tests" / "backends" / "compiled"
CONFIG = (
    'backend: "probe" max_batch_size: 8 input { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] } '
    'output { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] } instance_group { kind: KIND_CPU }'
)


def request(elements: int) -> bytes:
    """A whole HTTP request with a binary tensor."""
    data = struct.pack(f"<{elements}i", *range(elements))
    tensor = {
        "name": "IN",
        "datatype": "INT32",
        "shape": [1, elements],
        "parameters": {"binary_data_size": len(data)},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return (
        b"POST /v2/models/probe/infer HTTP/1.1\r\nHost: localhost\r\n"
        b"Inference-Header-Content-Length: %d\r\nContent-Length: %d\r\n\r\n"
        % (len(head), len(head) + len(data))
        + head
        + data
    )


def received(sock: socket.socket) -> None:
    """Reads one answer. Raises RuntimeError where it is an error."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += sock.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n")[0]:
        raise RuntimeError((head + body).decode(errors="replace"))
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    left = int(fields[b"content-length"]) - len(body)
    while left > 0:
        left -= len(sock.recv(65536))


def microseconds(port: int, message: bytes, count: int) -> float:
    """The median of `count` requests, one after the other."""
    found = []
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            began = time.perf_counter_ns()
            sock.sendall(message)
            received(sock)
            found.append(time.perf_counter_ns() - began)
    return statistics.median(found) / 1000


def main() -> None:
    """Measures and prints Markdown."""
    options = argparse.ArgumentParser(description="what a request to a compiled backend costs")
    options.add_argument("--requests", type=int, default=2000)
    options.add_argument("--rounds", type=int, default=5)
    asked = options.parse_args()
    if tritonserver.home() is None:
        raise SystemExit(
            "tritonserver is not installed: `make bench-peers` does it, or NEPTRIO_TRITONSERVER names it"
        )
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "models" / "probe" / "1").mkdir(parents=True)
        (folder / "models" / "probe" / "config.pbtxt").write_text(CONFIG)
        library = folder / "backends" / "probe" / "libtriton_probe.so"
        library.parent.mkdir(parents=True)
        compiler = (os.environ.get("CC") or "cc").split()
        flags = [
            "-shared",
            "-fPIC",
            "-O2",
            "-o",
            str(library),
            *map(str, sorted(SOURCES.glob("*.c"))),
            "-lpthread",
        ]
        subprocess.run([*compiler, *flags], check=True)
        repository, backends = folder / "models", folder / "backends"
        servers = [
            peers.tritonserver(repository, None, folder / "theirs.log", backends=backends),
            peers.neptrio(repository, None, folder / "ours.log", flags=(f"--backend-directory={backends}",)),
        ]
        try:
            print("| elements | tritonserver us | neptrio us | difference us |\n|---|---|---|---|")
            for elements in (1, 250_000):
                message = request(elements)
                found: dict[str, list[float]] = {server.name: [] for server in servers}
                for server in servers * (asked.rounds + 1):
                    count = asked.requests if elements == 1 else asked.requests // 10
                    found[server.name].append(microseconds(server.http_port, message, count))
                a, b = (
                    statistics.median(found[server.name][1:]) for server in servers
                )  # the first is to warm up
                print(f"| {elements:,} | {a:.0f} | {b:.0f} | {b - a:+.0f} |")
            print(f"\nThe target for one element is at most +{TARGET_US}.")
        finally:
            for server in servers:
                server.stop()


if __name__ == "__main__":
    main()
