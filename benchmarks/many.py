"""Many models in the memory of few: `make bench-many`.

Writes a repository of ONNX and Python models, asks for them by Zipf's law on a server with a budget for a part of them, and
prints what clients saw and what the processes held. Beside it a model that is always loaded is asked all the time: alone first,
then while the others come and go. With --trouble models are unloaded by hand, their processes killed and their folders
replaced meanwhile.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

MIB = 1 << 20
PYTHON = """
import numpy
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.weights = numpy.ones({size}, numpy.uint8)

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(request, "X").as_numpy())]
            )
            for request in requests
        ]
"""
TENSORS = 'input [ { name: "X" data_type: TYPE_FP32 dims: [ 1, 4 ] } ] output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1, 4 ] } ]\n'
SMALL = {"a small Python model": "python-small", "an ONNX model of 4 MiB": "onnx-small"}
BODY = b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1,4],"data":[1,2,3,4]}]}'


def onnx_model(size: int) -> bytes:
    """Y = X, with so many bytes of weights that the session keeps."""
    wide = max(size // 16, 1)
    first = numpy_helper.from_array(np.random.default_rng(0).random((4, wide), np.float32), "A")
    second = helper.make_tensor("B", TensorProto.FLOAT, [1], [0.0])
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["X", "A"], ["H"]),
            helper.make_node("ReduceMean", ["H"], ["M"], axes=[1], keepdims=1),
            helper.make_node("Mul", ["M", "B"], ["Z"]),
            helper.make_node("Add", ["X", "Z"], ["Y"]),
        ],
        "many",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, [1, 4])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, [1, 4])],
        [first, second],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(made.SerializeToString())


def write(repository: Path, count: int, python: float, mib: float, chance: random.Random) -> list[str]:
    """Writes the models; their names, the most popular first."""
    drawn = []
    for number in range(count):
        size = int(chance.expovariate(1 / mib) * MIB) + (64 << 10)
        kind = "python" if chance.random() < python else "onnx"
        drawn.append((f"{kind}-{number:05}", size))
    names = [name for name, _ in drawn]
    for name, size in (*drawn, *zip(SMALL.values(), (64 << 10, 4 * MIB), strict=True)):
        kind = name.partition("-")[0]
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        backend = "python" if kind == "python" else "onnxruntime"
        (folder.parent / "config.pbtxt").write_text(f'backend: "{backend}" max_batch_size: 0\n{TENSORS}')
        if kind == "python":
            (folder / "model.py").write_text(PYTHON.format(size=size))
        else:
            (folder / "model.onnx").write_bytes(onnx_model(size))
    (repository / "warm" / "1").mkdir(parents=True)
    keep = 'parameters { key: "keep_loaded" value: { string_value: "true" } }'
    (repository / "warm" / "config.pbtxt").write_text(
        f'backend: "identity" max_batch_size: 0\n{TENSORS}{keep}'
    )
    chance.shuffle(names)
    return names


class Server:
    """A server process and what it holds."""

    def __init__(self, repository: Path, *flags: str) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "neptrio", str(repository), "--model-control-mode=on-demand"),
                *(
                    "--http-address=127.0.0.1",
                    "--http-port=0",
                    "--allow-grpc=false",
                    "--metrics-port=0",
                    *flags,
                ),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        self.log: list[str] = []
        for line in self.process.stderr:
            self.log.append(line)
            if line == "serving\n":
                break
        text = "".join(self.log)
        self.port = int(re.search(r"REST +on http://127.0.0.1:(\d+)", text)[1])  # type: ignore[index]
        self.metrics = int(re.search(r"metrics +on http://127.0.0.1:(\d+)", text)[1])  # type: ignore[index]
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.log += self.process.stderr

    def children(self) -> list[int]:
        """The processes below the server."""
        found, todo = [], [self.process.pid]
        while todo:
            tasks = Path(f"/proc/{todo.pop()}/task")
            try:  # each thread has those that it has started
                below = [
                    int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()
                ]
            except OSError:
                continue
            found += below
            todo += below
        return found

    def resident(self) -> tuple[int, int]:
        """Anonymous and shared memory of the server, and of what is below it: pages that several have count once."""
        return _pss(self.process.pid), sum(_pss(pid) for pid in self.children())

    def sample(self, name: str) -> float:
        """The sum of a metric."""
        client = http.client.HTTPConnection("127.0.0.1", self.metrics)
        client.request("GET", "/metrics")
        text = client.getresponse().read().decode()
        client.close()
        return sum(float(value) for value in re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.M))

    def stop(self) -> None:
        """Ends it."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def _pss(pid: int) -> int:
    return _kib(pid, "Pss_(?:Anon|Shmem)")


def _kib(pid: int, what: str) -> int:
    """Bytes of some kinds of a process's memory."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(kib) << 10 for kib in re.findall(rf"^{what}: +(\d+) kB", text, re.M))


class Asking:
    """Clients on threads that ask until they are stopped."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.stopping = False
        self.times: list[float] = []
        self.failures: list[str] = []
        self._threads: list[threading.Thread] = []

    def start(self, models: list[str], weights: list[float], seed: int, pause: float = 0.0) -> None:
        """Starts a client."""
        thread = threading.Thread(target=self._ask, args=(models, weights, random.Random(seed), pause))
        self._threads.append(thread)
        thread.start()

    def _ask(self, models: list[str], weights: list[float], chance: random.Random, pause: float) -> None:
        client = http.client.HTTPConnection("127.0.0.1", self.server.port)
        while not self.stopping:
            (name,) = chance.choices(models, weights)
            began = time.perf_counter()
            client.request("POST", f"/v2/models/{name}/infer", BODY)
            answer = client.getresponse()
            body = answer.read()
            self.times.append(time.perf_counter() - began)
            if answer.status != 200:
                self.failures.append(f"{name}: {answer.status} {body.decode()}")
            time.sleep(pause)
        client.close()

    def stop(self) -> None:
        """Stops all."""
        self.stopping = True
        for thread in self._threads:
            thread.join()


def percentile(times: list[float], part: float) -> float:
    """In milliseconds."""
    return sorted(times)[min(int(len(times) * part), len(times) - 1)] * 1e3


def trouble(server: Server, repository: Path, names: list[str], chance: random.Random) -> str:
    """Does one thing that an operator, or bad luck, does."""
    name = chance.choice(names[:50])
    what = chance.choice(("unload", "kill", "replace"))
    if what == "unload":
        post(server, f"/v2/repository/models/{name}/unload", b"{}")
    elif what == "kill":
        children = [pid for pid in server.children() if _name(pid).startswith("py:python")]
        if children:
            os.kill(chance.choice(children), signal.SIGKILL)
    else:
        folder = repository / name
        copy = repository / f".{name}"
        shutil.copytree(folder, copy)
        shutil.rmtree(folder)
        copy.rename(folder)
    return what


def post(server: Server, path: str, body: bytes) -> int:
    """The status of a request."""
    client = http.client.HTTPConnection("127.0.0.1", server.port)
    client.request("POST", path, body)
    answer = client.getresponse()
    answer.read()
    client.close()
    return answer.status


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def first_asked(server: Server, names: list[str], clients: int) -> Asking:
    """Asks for models that were never loaded, once each, while a client asks the warm one: its times."""
    beside = Asking(server)
    beside.start(["warm"], [1], 0, 0.001)
    with ThreadPoolExecutor(clients) as pool:
        for status in pool.map(lambda name: post(server, f"/v2/models/{name}/infer", BODY), names):
            assert status == 200
    beside.stop()
    return beside


def reload(server: Server, name: str) -> None:
    """Has a model put away, and asks for it."""
    post(server, f"/v2/repository/models/{name}/unload", b"{}")
    assert post(server, f"/v2/models/{name}/infer", BODY) == 200


def median_ms(work: Callable[[], None], times: int) -> float:
    """The milliseconds that it takes, the median of so many times."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return percentile(found, 0.5)


def idle_process(server: Server) -> int:
    """The bytes that only the process of a small Python model has."""
    pid = next(pid for pid in server.children() if _name(pid) == f"py:{SMALL['a small Python model']}")
    return _kib(pid, "Private_Dirty")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--python", type=float, default=0.2, help="the part of Python models")
    parser.add_argument("--mib", type=float, default=4.0, help="the mean size of a model's weights")
    parser.add_argument("--budget-mib", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trouble", action="store_true")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder)
        names = write(repository, options.models, options.python, options.mib, chance)
        weights = [1 / (rank + 1) for rank in range(len(names))]
        began = time.monotonic()
        server = Server(repository, f"--model-memory-budget={options.budget_mib}MiB")
        print(f"{len(names)} models known after {time.monotonic() - began:.2f} s")
        try:
            run(options, server, repository, names, weights, chance)
        finally:
            server.stop()


def run(
    options: argparse.Namespace,
    server: Server,
    repository: Path,
    names: list[str],
    weights: list[float],
    chance: random.Random,
) -> None:
    """Measures, and prints what was found."""
    for name in SMALL.values():  # what a backend needs once is not what its models hold
        post(server, f"/v2/models/{name}/infer", BODY)
        post(server, f"/v2/repository/models/{name}/unload", b"{}")
    alone = Asking(server)
    alone.start(["warm"], [1], 0, 0.001)
    time.sleep(min(options.seconds, 5))
    alone.stop()
    cold = first_asked(server, names[-100:], options.clients)
    reloaded = {kind: median_ms(lambda name=name: reload(server, name), 15) for kind, name in SMALL.items()}
    idle = idle_process(server)
    for name in (*names, *SMALL.values()):  # what the server needs to know of them stays
        post(server, f"/v2/repository/models/{name}/unload", b"{}")
    left = float("inf")  # until what is put away has gone: only the warm model's memory stays
    while (held := server.sample("neptrio_demand_held_bytes")) < left:
        left = held
        time.sleep(1)
    before = server.resident()
    beside, asking = Asking(server), Asking(server)
    beside.start(["warm"], [1], 0, 0.001)
    for number in range(options.clients):
        asking.start(names, weights, options.seed + number)
    end = time.monotonic() + options.seconds
    done = {"unload": 0, "kill": 0, "replace": 0}
    samples = []
    while time.monotonic() < end:
        samples.append([now - then for now, then in zip(server.resident(), before, strict=True)])
        if options.trouble:
            done[trouble(server, repository, names, chance)] += 1
        time.sleep(0.25)
    asking.stop()
    beside.stop()
    held, most = server.sample("neptrio_demand_held_bytes"), max(samples, key=sum)
    found = {
        "requests": len(asking.times),
        "failed": len(asking.failures) + len(beside.failures),
        "misses": server.sample("neptrio_demand_misses_total"),
        "put away": server.sample("neptrio_demand_put_away_total"),
        "budget MiB": options.budget_mib,
        "held at the end MiB": round(held / MIB, 1),
        "samples": len(samples),
        "of these above the budget + 5 %": sum(sum(one) > options.budget_mib * 1.05 * MIB for one in samples),
        "most resident above that without models MiB": round(sum(most) / MIB, 1),
        "of that the server, models' processes MiB": [round(part / MIB, 1) for part in most],
        "p50 ms": round(percentile(asking.times, 0.5), 2),
        "p99 ms": round(percentile(asking.times, 0.99), 2),
        "longest ms": round(percentile(asking.times, 1.0), 2),
        "warm model alone p50, p99 ms": [round(percentile(alone.times, part), 2) for part in (0.5, 0.99)],
        "warm model while 100 cold ones load p50, p99 ms": [
            round(percentile(cold.times, part), 2) for part in (0.5, 0.99)
        ],
        **{f"put away and loaded again, {kind}, ms": round(took, 1) for kind, took in reloaded.items()},
        "an idle Python model's own MiB": round(idle / MIB, 1),
        "warm model beside p50, p99 ms": [round(percentile(beside.times, part), 2) for part in (0.5, 0.99)],
        **({"trouble": done} if options.trouble else {}),
    }
    print(json.dumps(found, indent=1))
    for text in asking.failures[:5] + beside.failures[:5]:
        print(text)


if __name__ == "__main__":
    main()
