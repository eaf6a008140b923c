"""Many models in the memory of few: `make bench-many`.

Writes a repository of ONNX and Python models, asks for them by Zipf's law on a server with a budget for a part of them, and
prints what clients saw and what the processes held. Beside it a model that is always loaded is asked all the time: alone first,
then beside as many processes that compute as there are cores, which is what loads cannot be better than, and while the others
come and go. What must be true for longer, and while models are unloaded, killed and replaced, is in many_soak.py.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.many_models import BODY, MIB, SMALL, write
from benchmarks.many_server import Asking, Server, kib, name_of, percentile, post, settled
from neptrio.cores import usable_cores


def beside_computing(server: Server, seconds: float) -> Asking:
    """Asks the warm model while each core has a process that computes: its times."""
    work = [sys.executable, "-c", "while True: sum(range(10000))"]
    computing = [subprocess.Popen(work) for _ in range(usable_cores())]
    beside = Asking(server)
    try:
        beside.start(["warm"], [1], 0, 0.001)
        time.sleep(seconds)
        beside.stop()
    finally:
        for process in computing:
            process.kill()
            process.wait()
    return beside


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
    pid = next(pid for pid in server.children() if name_of(pid) == f"py:{SMALL['a small Python model']}")
    return kib(pid, "Private_Dirty")


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
            run(options, server, names, weights)
        finally:
            server.stop()


def run(options: argparse.Namespace, server: Server, names: list[str], weights: list[float]) -> None:
    """Measures, and prints what was found."""
    for name in SMALL.values():  # what a backend needs once is not what its models hold
        post(server, f"/v2/models/{name}/infer", BODY)
        post(server, f"/v2/repository/models/{name}/unload", b"{}")
    alone = Asking(server)
    alone.start(["warm"], [1], 0, 0.001)
    time.sleep(min(options.seconds, 5))
    alone.stop()
    computing = beside_computing(server, min(options.seconds, 5))
    cold = first_asked(server, names[-100:], options.clients)
    reloaded = {kind: median_ms(functools.partial(reload, server, name), 15) for kind, name in SMALL.items()}
    idle = idle_process(server)
    for name in (*names, *SMALL.values()):  # what the server needs to know of them stays
        post(server, f"/v2/repository/models/{name}/unload", b"{}")
    before = settled(server)
    beside, asking = Asking(server), Asking(server)
    beside.start(["warm"], [1], 0, 0.001)
    for number in range(options.clients):
        asking.start(names, weights, options.seed + number)
    end = time.monotonic() + options.seconds
    samples = []
    while time.monotonic() < end:
        samples.append([now - then for now, then in zip(server.resident(), before, strict=True)])
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
        "warm model beside processes that compute p50, p99 ms": [
            round(percentile(computing.times, part), 2) for part in (0.5, 0.99)
        ],
        "warm model while 100 cold ones load p50, p99 ms": [
            round(percentile(cold.times, part), 2) for part in (0.5, 0.99)
        ],
        **{f"put away and loaded again, {kind}, ms": round(took, 1) for kind, took in reloaded.items()},
        "an idle Python model's own MiB": round(idle / MIB, 1),
        "warm model beside p50, p99 ms": [round(percentile(beside.times, part), 2) for part in (0.5, 0.99)],
    }
    print(json.dumps(found, indent=1))
    for text in asking.failures[:5] + beside.failures[:5]:
        print(text)


if __name__ == "__main__":
    main()
