"""The peer of `make soak-many`: many Python models on tritonserver in explicit mode, which its clients load and unload.

The server knows no budget, so the clients keep one, as its users do: before a load they unload the model that they used longest
ago. A load call, an infer call and an unload call are three; so that they do not race, a client holds a model while it asks it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import subprocess
import tempfile
import threading
import time
from collections import OrderedDict
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks import tritonserver as triton
from benchmarks.many_models import BODY, MIB
from benchmarks.many_server import below, kib, percentile
from benchmarks.peers import free_port

START_SECONDS = 60.0
ANON = "Pss_(?:Anon|Shmem)"


class Held:
    """What clients have loaded, the model that was used longest ago first. Any thread."""

    def __init__(self, port: int, sizes: dict[str, int], budget: int) -> None:
        self._port = port
        self._sizes = sizes
        self._budget = budget
        self._lock = threading.Condition()
        self._users: OrderedDict[str, int] = OrderedDict()
        self._changing: set[str] = set()  # loads and unloads under way
        self.failures: list[str] = []

    def take(self, name: str) -> bool:
        """Has the model loaded until give(); False where it was."""
        with self._lock:
            while name in self._changing:
                self._lock.wait()
            if name in self._users:
                self._users[name] += 1
                self._users.move_to_end(name)
                return False
            self._changing.add(name)
        while True:
            with self._lock:
                held = sum(self._sizes[one] for one in (*self._users, *self._changing))
                victim = next((one for one, users in self._users.items() if not users), None)
                if held <= self._budget or not (self._users or self._changing - {name}):
                    break  # a model that is larger than all of the budget is loaded alone
                if victim is None:
                    self._lock.wait(0.01)
                    continue
                del self._users[victim]
                self._changing.add(victim)
            self._call(victim, "unload")
            while self._state(victim) in ("READY", "UNLOADING"):  # the call does not wait for the memory
                time.sleep(0.01)
            with self._lock:
                self._changing.discard(victim)
                self._lock.notify_all()
        self._call(name, "load")
        with self._lock:
            self._changing.discard(name)
            self._users[name] = 1
            self._lock.notify_all()
        return True

    def give(self, name: str) -> None:
        """The client has its answer."""
        with self._lock:
            self._users[name] -= 1
            self._lock.notify_all()

    def _call(self, name: str, what: str) -> None:
        status, body = _post(self._port, f"/v2/repository/models/{name}/{what}", b"{}")
        if status != 200:
            self.failures.append(f"{what} {name}: {status} {body.decode(errors='replace')}")

    def _state(self, name: str) -> str:
        _, body = _post(self._port, "/v2/repository/index", b"{}")
        return next(
            (state for one, state in _rows(body) if one == name),
            "",
        )


def _rows(body: bytes) -> list[tuple[str, str]]:
    return [(row["name"], row.get("state", "")) for row in json.loads(body)]


def _post(port: int, path: str, body: bytes) -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as client:
        client.request("POST", path, body)
        answer = client.getresponse()
        return answer.status, answer.read()


def measure(options: argparse.Namespace, repository: Path, names: list[str]) -> dict[str, Any]:
    """What its clients see."""
    site = triton.home()
    if site is None:
        return {"left out": "tritonserver is not installed: `make bench-peers` does it"}
    python = [name for name in names if name.startswith("python")]
    with tempfile.TemporaryDirectory() as folder:
        backends, models = Path(folder) / "backends", Path(folder) / "models"
        models.mkdir()
        for name in python:
            (models / name).symlink_to(repository / name)
        triton.lay_out(site, backends)
        port = free_port()
        process = subprocess.Popen(
            triton.command(site, backends, models, port, free_port(), "--model-control-mode=explicit"),
            env=triton.environment(site),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait(port)
            return _ask(options, process.pid, port, python, repository)
        finally:
            process.terminate()
            process.wait(60)


def _wait(port: int) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            with closing(http.client.HTTPConnection("127.0.0.1", port)) as client:
                client.request("GET", "/v2/health/ready")
                if client.getresponse().status == 200:
                    return
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(0.1)


def _ask(
    options: argparse.Namespace, pid: int, port: int, names: list[str], repository: Path
) -> dict[str, Any]:
    def resident() -> int:
        return sum(kib(one, ANON) for one in (pid, *below(pid)))

    weights = {name: _size(repository / name) for name in names}
    _post(port, f"/v2/repository/models/{names[0]}/load", b"{}")  # what a backend needs once is no model's
    once = resident()
    _post(port, f"/v2/repository/models/{names[1]}/load", b"{}")
    own = resident() - once - weights[names[1]]  # of a model without weights
    held = Held(port, {name: size + own for name, size in weights.items()}, options.budget_mib * MIB)
    for name in names[:2]:
        _post(port, f"/v2/repository/models/{name}/unload", b"{}")
    before = once - own - weights[names[0]]
    hits: list[float] = []
    misses: list[float] = []
    failures: list[str] = []
    stop = threading.Event()

    def client(chance: random.Random) -> None:
        zipf = [1 / (rank + 1) for rank in range(len(names))]
        while not stop.is_set():
            (name,) = chance.choices(names, zipf)
            began = time.monotonic()
            missed = held.take(name)
            status, body = _post(port, f"/v2/models/{name}/infer", BODY)
            held.give(name)
            (misses if missed else hits).append(time.monotonic() - began)
            if status != 200:
                failures.append(f"{name}: {status} {body.decode(errors='replace')}")

    threads = [
        threading.Thread(target=client, args=(random.Random(options.seed + n),))
        for n in range(options.clients)
    ]
    for thread in threads:
        thread.start()
    end, samples = time.monotonic() + options.tritonserver, []
    while time.monotonic() < end:
        samples.append(resident() - before)
        time.sleep(0.25)
    stop.set()
    for thread in threads:
        thread.join()
    limit = options.budget_mib * 1.05 * MIB
    return {
        "Python models": len(names),
        "a model without weights MiB": round(own / MIB, 1),
        "hits": len(hits),
        "misses": len(misses),
        "failed": len(failures) + len(held.failures),
        "hits' p50, p99 ms": [round(percentile(hits, part), 2) for part in (0.5, 0.99)] if hits else [],
        "misses' p50, p99 ms": [round(percentile(misses, part), 2) for part in (0.5, 0.99)] if misses else [],
        "samples": len(samples),
        "of these above the budget and 5 %": sum(one > limit for one in samples),
        "most resident above that without models MiB": round(max(samples) / MIB, 1),
        "first failures": (failures + held.failures)[:3],
    }


def _size(folder: Path) -> int:
    """The bytes of a Python model's weights, which its code says."""
    text = (folder / "1" / "model.py").read_text()
    return int(text.partition("numpy.ones(")[2].partition(",")[0])
