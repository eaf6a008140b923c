"""A server over many models: what it and its processes hold, and who asks it."""

from __future__ import annotations

import http.client
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchmarks.many_models import BODY, SMALL


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
        return below(self.process.pid)

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


def post(server: Server, path: str, body: bytes) -> int:
    """The status of a request."""
    client = http.client.HTTPConnection("127.0.0.1", server.port)
    client.request("POST", path, body)
    answer = client.getresponse()
    answer.read()
    client.close()
    return answer.status


def below(pid: int) -> list[int]:
    """The processes below one."""
    found, todo = [], [pid]
    while todo:
        tasks = Path(f"/proc/{todo.pop()}/task")
        try:  # each thread has those that it has started
            children = [
                int(one) for task in tasks.iterdir() for one in (task / "children").read_text().split()
            ]
        except OSError:
            continue
        found += children
        todo += children
    return found


def name_of(pid: int) -> str:
    """What the kernel calls a process."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _pss(pid: int) -> int:
    return kib(pid, "Pss_(?:Anon|Shmem)")


def kib(pid: int, what: str) -> int:
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


def settled(server: Server) -> tuple[int, int]:
    """resident() once what was put away has gone: only the warm model's memory stays, and the process that Python models are
    forked from, which ends by itself where there is none for a while."""
    left = float("inf")
    while (held := server.sample("neptrio_demand_held_bytes")) < left:
        left = held
        time.sleep(1)
    name = SMALL["a small Python model"]
    post(server, f"/v2/models/{name}/infer", BODY)
    post(server, f"/v2/repository/models/{name}/unload", b"{}")
    while any(name_of(pid) == f"py:{name}" for pid in server.children()):
        time.sleep(0.05)
    return server.resident()
