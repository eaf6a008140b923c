"""The proof of many models in the memory of few: `make soak-many`.

The problem: that nothing is lost and the budget holds is only believed of a server that was asked for long, of far more models
than fit, while things go wrong. The choice: 1,000 ONNX and Python models of mixed sizes, asked for by Zipf's law within a budget
for about 100, for 30 minutes, while models are unloaded by hand, their processes killed, their folders replaced and taken away for
a while. Before that the same is asked of a server without a budget, which holds all that was asked for, and with --tritonserver of
tritonserver's explicit mode (Python models, loaded and unloaded by its clients).

Rules:
 1. It ends with status 1 where a request failed, a sample of resident memory was above the budget and 5 %, or the server has said
    that something of its own went wrong.
 2. Requests for a model whose folder is away may be refused, as may those of the second after it has come back; they are counted.
 3. Times depend on the machine, and are told, not judged.
 4. Which requests have waited for a load the server says: whoever waited longer than any hit asks it for the model's misses.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import many_peer
from benchmarks.many_models import BODY, MIB, SMALL, write
from benchmarks.many_server import Server, name_of, percentile, post, settled

SLOW_SECONDS = 0.003  # a request that took less cannot have waited for a load
GONE_SECONDS = 0.5  # for which a folder is taken away
AFTERWARDS_SECONDS = 2.0  # in which its model may still be refused: a load is not tried again at once
TROUBLES = ("unload", "kill", "replace", "take away")
OWN_FAULTS = ("Traceback", "internal error", "ERROR")


@dataclass
class Seen:
    """What clients saw."""

    hits: list[float] = field(default_factory=list)  # seconds
    misses: list[float] = field(default_factory=list)
    beyond: list[float] = field(default_factory=list)  # of misses: the seconds beyond their model's load
    failures: list[str] = field(default_factory=list)
    refused: int = 0  # while a folder was away

    def document(self) -> dict[str, Any]:
        """For people."""
        return {
            "hits": len(self.hits),
            "misses": len(self.misses),
            "failed": len(self.failures),
            "refused while a folder was away": self.refused,
            "hits' p50, p99 ms": _ms(self.hits),
            "misses' p50, p99 ms": _ms(self.misses),
            "misses beyond their load's time p50, p99 ms": _ms(self.beyond),
        }


def _ms(times: list[float]) -> list[float]:
    return [round(percentile(times, part), 2) for part in (0.5, 0.99)] if times else []


class Folders:
    """Which folders are away, or were a moment ago. Any thread."""

    def __init__(self, repository: Path) -> None:
        self._repository = repository
        self._back: dict[str, float] = {}  # name -> until when its model may be refused

    def away(self, name: str, since: float) -> bool:
        """Whether a request that began then may have met a folder that was not there."""
        return self._back.get(name, 0.0) > since

    def replace(self, name: str) -> None:
        """Puts a new folder into the place of a model's: the same files, newer."""
        folder, new, old = (
            self._repository / name,
            self._repository / f".{name}",
            self._repository / f".-{name}",
        )
        for file in folder.rglob("*"):
            if file.is_file():
                copy = new / file.relative_to(folder)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(file.read_bytes())
        self._back[name] = float("inf")
        folder.rename(old)
        new.rename(folder)
        self._back[name] = time.monotonic() + AFTERWARDS_SECONDS
        for file in sorted(old.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        old.rmdir()

    def take_away(self, name: str) -> None:
        """Takes a model's folder away for a while."""
        self._back[name] = float("inf")
        (self._repository / name).rename(self._repository / f".{name}")
        time.sleep(GONE_SECONDS)
        (self._repository / f".{name}").rename(self._repository / name)
        self._back[name] = time.monotonic() + AFTERWARDS_SECONDS


class Clients:
    """Clients that ask for models by Zipf's law until they are stopped."""

    def __init__(self, server: Server, names: list[str], folders: Folders) -> None:
        self._server = server
        self._names = names
        self._weights = [1 / (rank + 1) for rank in range(len(names))]
        self._folders = folders
        self._lock = threading.Lock()
        self._known: dict[str, int] = {}  # the misses of each model that were counted
        self._owed: dict[str, int] = {}  # of these, those that no client has taken for its own yet
        self._stopping = False
        self._threads: list[threading.Thread] = []
        self.seen = Seen()

    def start(self, count: int, seed: int) -> None:
        """Starts so many."""
        for number in range(count):
            thread = threading.Thread(target=self._ask, args=(random.Random(seed + number),))
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Waits for the answers that are under way."""
        self._stopping = True
        for thread in self._threads:
            thread.join()

    def know(self) -> None:
        """What was asked so far is not these clients'."""
        for name in self._names:
            self._known[name] = _progress(self._server, name)[0]

    def _ask(self, chance: random.Random) -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", self._server.port)) as client:
            while not self._stopping:
                (name,) = chance.choices(self._names, self._weights)
                began = time.monotonic()
                try:
                    client.request("POST", f"/v2/models/{name}/infer", BODY)
                    answer = client.getresponse()
                    status, body = answer.status, answer.read()
                except (OSError, http.client.HTTPException) as error:
                    client.close()
                    status, body = 0, repr(error).encode()
                self._note(name, began, time.monotonic() - began, status, body)

    def _note(self, name: str, began: float, took: float, status: int, body: bytes) -> None:
        seen = self.seen
        if status != 200:
            if self._folders.away(name, began):
                seen.refused += 1
            else:
                seen.failures.append(f"{name}: {status} {body.decode(errors='replace')}")
            return
        if took < SLOW_SECONDS:
            seen.hits.append(took)
            return
        count, load = _progress(self._server, name)
        with self._lock:
            self._owed[name] = self._owed.get(name, 0) + count - self._known.get(name, 0)
            self._known[name] = count
            missed = self._owed[name] > 0
            self._owed[name] -= missed
        (seen.misses if missed else seen.hits).append(took)
        if missed:
            seen.beyond.append(took - load)


def _progress(server: Server, name: str) -> tuple[int, float]:
    """How often requests had to wait for a model, and how many seconds it loaded last."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.port)) as client:
        client.request("GET", f"/v2/repository/models/{name}")
        answer = client.getresponse()
        text = answer.read()
    if answer.status != 200:  # its folder is away
        return 0, 0.0
    found = json.loads(text)
    return found.get("on_demand", {}).get("misses", 0), found.get("last_load_duration_ns", 0) / 1e9


class Trouble:
    """What an operator does, and bad luck: one thing after the other, until it is stopped."""

    def __init__(self, server: Server, folders: Folders, names: list[str], pause: float, seed: int) -> None:
        self._server = server
        self._folders = folders
        self._names = names[:100]
        self._pause = pause
        self._chance = random.Random(seed)
        self._stopping = threading.Event()
        self.done = dict.fromkeys(TROUBLES, 0)
        self._thread = threading.Thread(target=self._cause)
        self._thread.start()

    def _cause(self) -> None:
        while not self._stopping.wait(self._pause):
            what, name = self._chance.choice(TROUBLES), self._chance.choice(self._names)
            if what == "unload":
                post(self._server, f"/v2/repository/models/{name}/unload", b"{}")
            elif what == "replace":
                self._folders.replace(name)
            elif what == "take away":
                self._folders.take_away(name)
            else:
                models = [pid for pid in self._server.children() if name_of(pid).startswith("py:python")]
                if not models:
                    continue
                os.kill(self._chance.choice(models), signal.SIGKILL)
            self.done[what] += 1

    def stop(self) -> None:
        """Waits for the last one."""
        self._stopping.set()
        self._thread.join()


def without_a_budget(options: argparse.Namespace, repository: Path, names: list[str]) -> Seen:
    """What clients see of a server that holds everything."""
    server = Server(repository)
    try:
        for name in names:
            post(server, f"/v2/models/{name}/infer", BODY)
        clients = Clients(server, names, Folders(repository))
        clients.know()
        clients.start(options.clients, options.seed)
        time.sleep(options.without_seconds)
        clients.stop()
    finally:
        server.stop()
    return clients.seen


def within_the_budget(
    options: argparse.Namespace, repository: Path, names: list[str]
) -> tuple[dict[str, Any], list[str]]:
    """What was found, and what must not have been."""
    began = time.monotonic()
    server = Server(repository, f"--model-memory-budget={options.budget_mib}MiB")
    known = time.monotonic() - began
    try:
        for name in SMALL.values():  # what a backend needs once is not what its models hold
            post(server, f"/v2/models/{name}/infer", BODY)
            post(server, f"/v2/repository/models/{name}/unload", b"{}")
        before = settled(server)
        folders = Folders(repository)
        clients = Clients(server, names, folders)
        clients.know()
        clients.start(options.clients, options.seed)
        trouble = Trouble(server, folders, names, options.trouble_seconds, options.seed)
        samples = []
        end = time.monotonic() + options.seconds
        while time.monotonic() < end and server.process.poll() is None:
            samples.append([now - then for now, then in zip(server.resident(), before, strict=True)])
            time.sleep(0.25)
        trouble.stop()
        clients.stop()
        most = max(samples, key=sum)
        above = sum(sum(one) > options.budget_mib * 1.05 * MIB for one in samples)
        found = {
            "models known after s": round(known, 2),
            **clients.seen.document(),
            "trouble": trouble.done,
            "put away": server.sample("neptrio_demand_put_away_total"),
            "budget MiB": options.budget_mib,
            "held at the end MiB": round(server.sample("neptrio_demand_held_bytes") / MIB, 1),
            "samples": len(samples),
            "of these above the budget and 5 %": above,
            "most resident above that without models, the server's and its processes' MiB": [
                round(part / MIB, 1) for part in most
            ],
        }
    finally:
        server.stop()
    said = [line.strip() for line in server.log if any(word in line for word in OWN_FAULTS)]
    wrong = [f"failed: {text}" for text in clients.seen.failures] + [f"log: {line}" for line in said]
    if above:
        wrong.append(f"{above} of {len(samples)} samples were above the budget and 5 %")
    if server.process.returncode != 0:
        wrong.append(f"the server ended with status {server.process.returncode}")
    return found, wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--python", type=float, default=0.2, help="the part of Python models")
    parser.add_argument("--mib", type=float, default=4.0, help="the mean size of a model's weights")
    parser.add_argument("--instances", type=int, default=1, help="of each ONNX model")
    parser.add_argument("--budget-mib", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument(
        "--without-seconds", type=float, default=60.0, help="without a budget, 0 to leave that out"
    )
    parser.add_argument("--trouble-seconds", type=float, default=1.0, help="between two kinds of trouble")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--tritonserver", type=float, default=0.0, metavar="SECONDS", help="the same of tritonserver"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder)
        names = write(
            repository,
            options.models,
            options.python,
            options.mib,
            random.Random(options.seed),
            options.instances,
        )
        if options.tritonserver:
            print(
                json.dumps({"tritonserver": many_peer.measure(options, repository, names)}, indent=1),
                flush=True,
            )
        if options.without_seconds:
            seen = without_a_budget(options, repository, names)
            print(json.dumps({"without a budget": seen.document()}, indent=1), flush=True)
        found, wrong = within_the_budget(options, repository, names)
    print(json.dumps({"within the budget": found}, indent=1))
    for text in wrong[:30]:
        print(text)
    print(f"{len(wrong)} things went wrong" if wrong else "nothing went wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
