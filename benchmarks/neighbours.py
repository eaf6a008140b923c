"""Can a neighbour be felt: the latency of tiny requests beside one heavy client of another model.

A probe sends a tiny binary request every PERIOD_S, open loop: latency counts from when it was due. It runs in a
process of its own, on one connection, to a Python model and, on our server, to a built-in model too. Beside it
runs one neighbour, in another process, as fast as it is answered. Both servers are measured in turns.

`make bench-neighbours` prints a table: p50, p90 and p99 of the probe, and the neighbour's own rate.
ARGS='--only json' narrows it to neighbours whose name holds that text, `--seconds` makes it longer.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import peers, run

PERIOD_S = 0.005
NUMBERS_PER_MIB = 54_000  # of random.random(), with their commas
IO = """input {{ name: "INPUT0" data_type: TYPE_{type} dims: [ -1 ] }}
output {{ name: "OUTPUT0" data_type: TYPE_{type} dims: [ -1 ] }}
"""
ECHO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", t)]) for t in tensors]
"""
SUM = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0",
                pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy()[:1])])
            for r in requests
        ]
"""
BUSY = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        end = time.thread_time() + 0.015
        while time.thread_time() < end:
            pass
        tensors = [pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", t)]) for t in tensors]
"""


def repository(folder: Path) -> Path:
    """Models that both servers serve: `probe` echoes, `first_*` answer one element, `echo` all, `busy` works 15 ms."""
    for name, kind, code, count in (
        ("probe", "FP32", ECHO, 1),
        ("first", "FP32", SUM, 1),
        ("first_strings", "STRING", SUM, 1),
        ("echo", "FP32", ECHO, 1),
        ("busy", "FP32", BUSY, 2),
        ("coming_and_going", "FP32", ECHO, 1),
    ):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.py").write_text(code)
        group = f"instance_group [ {{ kind: KIND_CPU count: {count} }} ]\n"
        (folder / name / "config.pbtxt").write_text('backend: "python"\n' + IO.format(type=kind) + group)
    return folder


def builtin(folder: Path) -> None:
    """What only our server has."""
    (folder / "builtin" / "1").mkdir(parents=True)
    (folder / "builtin" / "config.pbtxt").write_text('backend: "identity"\n' + IO.format(type="FP32"))


# ------------------------------------------------------------ the neighbours, each a function that works once


def tensor_json(mib: int, binary_answer: bool = True) -> bytes:
    """A request of about so many MiB of JSON numbers."""
    dice = random.Random(1)
    data = [dice.random() for _ in range(NUMBERS_PER_MIB * mib)]
    return _document("FP32", data, binary_answer)


def _document(datatype: str, data: list[Any], binary_answer: bool = True) -> bytes:
    tensor = {"name": "INPUT0", "shape": [len(data)], "datatype": datatype, "data": data}
    parameters = {"binary_data_output": binary_answer}
    return json.dumps({"inputs": [tensor], "parameters": parameters}, separators=(",", ":")).encode()


class Http:
    """One connection that sends the same request again and again."""

    def __init__(self, port: int, method: str, path: str, body: bytes = b"", **headers: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        self._request = (method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})

    def __call__(self) -> None:
        self._connection.request(*self._request)
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {body[:300]!r}")


def binary_request(values: int) -> tuple[bytes, int]:
    """A binary request of so many FP32 zeros, and the length of its JSON."""
    tensor = {
        "name": "INPUT0",
        "shape": [values],
        "datatype": "FP32",
        "parameters": {"binary_data_size": 4 * values},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return head + bytes(4 * values), len(head)


def _infer(port: int, model: str, body: bytes, **headers: str) -> Http:
    return Http(port, "POST", f"/v2/models/{model}/infer", body, **headers)


def _binary(http_port: int, _grpc_port: int) -> Callable[[], None]:
    body, head = binary_request(4 << 20)
    return _infer(http_port, "first", body, Inference_Header_Content_Length=str(head))


def _grpc(_http_port: int, grpc_port: int) -> Callable[[], None]:
    import numpy as np
    import tritonclient.grpc as grpcclient

    client = grpcclient.InferenceServerClient(f"127.0.0.1:{grpc_port}")
    tensor = grpcclient.InferInput("INPUT0", [4 << 20], "FP32")
    tensor.set_data_from_numpy(np.zeros(4 << 20, np.float32))
    return lambda: client.infer("first", [tensor])


def _reload(http_port: int, _grpc_port: int) -> Callable[[], None]:
    unload = Http(http_port, "POST", "/v2/repository/models/coming_and_going/unload", b"{}")
    load = Http(http_port, "POST", "/v2/repository/models/coming_and_going/load", b"{}")

    def once() -> None:
        load()
        unload()

    return once


def _many(count: int, make: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """`count` clients at once; one call is one request of each."""
    clients = [make() for _ in range(count)]

    def once() -> None:
        threads = [threading.Thread(target=client) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return once


NEIGHBOURS: dict[str, Callable[[int, int], Callable[[], None]]] = {
    "busy Python, 4 clients": lambda h, g: _many(
        4,
        lambda: _infer(
            h, "busy", binary_request(1)[0], Inference_Header_Content_Length=str(binary_request(1)[1])
        ),
    ),
    "JSON 1 MiB in": lambda h, g: _infer(h, "first", tensor_json(1)),
    "JSON 16 MiB in": lambda h, g: _infer(h, "first", tensor_json(16)),
    "JSON 1 MiB in and out": lambda h, g: _infer(h, "echo", tensor_json(1, False)),
    "JSON 16 MiB in and out": lambda h, g: _infer(h, "echo", tensor_json(16, False)),
    "binary 16 MiB": _binary,
    "gRPC 16 MiB": _grpc,
    "gzip of JSON 4 MiB": lambda h, g: _infer(
        h, "first", gzip.compress(tensor_json(4), 1), Content_Encoding="gzip"
    ),
    "a million strings": lambda h, g: _infer(
        h, "first_strings", _document("BYTES", [str(i) for i in range(1_000_000)])
    ),
    "statistics without pause": lambda h, g: Http(h, "GET", "/v2/models/stats"),
    "index without pause": lambda h, g: Http(h, "POST", "/v2/repository/index", b"{}"),
    "load and unload": _reload,
}


# ------------------------------------------------------------ the processes


def neighbour(name: str, http_port: int, grpc_port: int) -> None:
    """Works until its input ends, then prints how often and how long."""
    once = NEIGHBOURS[name](http_port, grpc_port)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    once()
    print("ready", flush=True)
    begun, times = time.perf_counter(), 0
    while not ended.is_set():
        once()
        times += 1
    print(json.dumps({"rate": times / (time.perf_counter() - begun)}), flush=True)


def probe(model: str, http_port: int, seconds: float) -> None:
    """Prints the latencies in ms, each from when its request was due."""
    body, head = binary_request(1)
    once = _infer(http_port, model, body, Inference_Header_Content_Length=str(head))
    for _ in range(20):
        once()
    begun = time.perf_counter()
    found = []
    for i in range(int(seconds / PERIOD_S)):
        due = begun + i * PERIOD_S
        left = due - time.perf_counter()
        if left > 0:
            time.sleep(left)
        once()
        found.append(1e3 * (time.perf_counter() - due))
    print(json.dumps(found))


def _role(*arguments: Any) -> list[str]:
    return [sys.executable, "-m", "benchmarks.neighbours", "--role", *map(str, arguments)]


@contextmanager
def beside(name: str, server: peers.Server) -> Iterator[dict[str, float]]:
    """Runs a neighbour inside; its rate is in the dictionary afterwards."""
    found: dict[str, float] = {}
    if not name:
        yield found
        return
    command = _role("neighbour", name, server.http_port, server.grpc_port)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the neighbour '{name}' of {server.name} ended at once")
        yield found
        process.stdin.close()
        found.update(json.loads(process.stdout.read()))


def measure(name: str, server: peers.Server, model: str, seconds: float) -> dict[str, float]:
    """Percentiles of the probe in ms and the neighbour's calls per second."""
    with beside(name, server) as found:
        command = _role("probe", model, server.http_port, seconds)
        latencies = sorted(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))
    row = {f"p{p}": latencies[min(len(latencies) - 1, len(latencies) * p // 100)] for p in (50, 90, 99)}
    return {**row, "rate": found.get("rate", 0.0)}


def start(names: list[str], folder: Path) -> list[peers.Server]:
    """The servers; one that is not installed is left out with a word."""
    made = []
    for name in names:
        models = repository(folder / name)
        try:
            if name == "neptrio":
                builtin(models)
                flags = ("--model-control-mode=explicit", "--load-model=*", "--loop-lag-warning-ms=0")
                made.append(peers.neptrio(models, None, folder / f"{name}.log", flags=flags))
            else:
                made.append(peers.tritonserver(models, None, folder / f"{name}.log"))
        except (RuntimeError, OSError, StopIteration) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return made


def markdown(rows: dict[str, dict[str, dict[str, float]]]) -> str:
    """neighbour -> server and probe -> percentiles, as a table."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = ["| neighbour | " + " | ".join(f"{c}: p50 / p90 / p99 ms | its rate" for c in columns) + " |"]
    lines.append("|---|" + "---|---|" * len(columns))
    for name, row in rows.items():
        cells = []
        for column in columns:
            found = row.get(column)
            shown = " / ".join(f"{found[p]:.1f}" for p in ("p50", "p90", "p99")) if found else ""
            cells += [shown, f"{found['rate']:.1f}/s" if found and found["rate"] else ""]
        lines.append(f"| {name or 'nobody'} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """`make bench-neighbours`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="neighbours whose name holds this text")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each row")
    parser.add_argument("--servers", default="neptrio,tritonserver")
    parser.add_argument("--probes", default="probe,builtin", help="models that are probed")
    options = parser.parse_args()
    if options.role is not None:
        role, what, *rest = options.role
        if role == "probe":
            probe(what, int(rest[0]), float(rest[1]))
        else:
            neighbour(what, int(rest[0]), int(rest[1]))
        return
    rows: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        servers = start(options.servers.split(","), Path(folder))
        try:
            for name in ("", *(n for n in NEIGHBOURS if options.only in n)):
                for server in servers:
                    for model in options.probes.split(","):
                        if model == "builtin" and server.name != "neptrio":
                            continue
                        found = measure(name, server, model, options.seconds)
                        rows.setdefault(name, {})[f"{server.name}, {model}"] = found
                        print(name or "nobody", server.name, model, found, file=sys.stderr, flush=True)
        finally:
            for server in servers:
                server.stop()
    text = markdown(rows)
    run.write("neighbours", rows, text)
    print(text)


if __name__ == "__main__":
    main()
