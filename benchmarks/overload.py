"""Goodput over offered load, open loop: what a queue limit is worth when too much arrives.

    python -m benchmarks.overload [--seconds 4] [--rounds 3] [--queue 64] [--only fixed|cpu|rejection]

Three parts:

- `fixed`: a batching model whose execution takes a fixed time and no CPU (a model on an accelerator):
  its capacity is known beforehand, and what the server does beside it decides nothing but latency.
- `cpu`: a model that computes on the server's own CPU, so every refusal takes from the answers.
- `rejection`: the server's CPU time per refused request, beside that of an answered one.

For the first two a server with `max_queue_size` is started and 0.5 to 5 times its capacity is offered at
fixed times, whatever comes back. With two CPUs or more, server and client each keep to their own. As the
machine may be shared, the capacity is measured (closed loop) right before each load, every round visits
every load, and the table has the medians of the rounds.

Columns: offered and answered requests per second, answered as a share of capacity, the 99th percentile of
accepted requests and what the queue bound implies for it. The bound says that a request is answered once
as many others have been as may be ahead of it (a full queue, the batch prepared and the one executing)
and its own batch is done; how long that took from its sending is seen in the answers themselves, so that
a machine which was slow for a moment was so for both. Then the median and the 99th percentile of refusals, the server's memory, its CPU time per answer (refusals included: what of it grows
with the load is their price), and how much of the machine everybody else used. Times are milliseconds
at the client, so a busy client machine adds its own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import tempfile
import threading
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import grpc.aio
import numpy as np
import tritonclient.grpc as tritonclient

from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

EXECUTION_MS, BATCH = 40, 8
FACTORS = (0.5, 0.8, 1, 1.5, 2, 3, 4, 5)
METHOD = "/inference.GRPCInferenceService/ModelInfer"
TICK = os.sysconf("SC_CLK_TCK")
COMPUTE = """
import hashlib

import triton_python_backend_utils as pb_utils

BLOCK = bytes(1 << 20)  # hashing this much lets go of the GIL


class TritonPythonModel:
    def execute(self, requests):
        for _ in range(4):
            hashlib.sha256(BLOCK).digest()
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())]
            )
            for request in requests
        ]
"""


def request_bytes(model: str) -> bytes:
    """A small request, as it goes over the wire."""
    tensor = tritonclient.InferInput("INPUT0", [1, 16], "INT32")
    tensor.set_data_from_numpy(np.zeros((1, 16), np.int32))
    from tritonclient.grpc._utils import _get_inference_request

    made = _get_inference_request(
        model_name=model, inputs=[tensor], model_version="", request_id="", outputs=None, sequence_id=0,
        sequence_start=False, sequence_end=False, priority=0, timeout=None, parameters=None,
    )  # fmt: skip
    return bytes(made.SerializeToString())


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, all its threads, to the nanosecond."""
    spent = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        spent += int((task / "schedstat").read_text().split()[0])
    return spent / 1e9


def machine_seconds() -> float:
    """CPU time that the whole machine has spent working."""
    fields = [int(f) for f in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(fields[:3]) + sum(fields[5:8])) / TICK


@dataclass
class Row:
    """One load in one round, or the medians of the rounds."""

    offered: float
    goodput: float
    share: float
    p99: float
    implied: float
    refused: float
    refused_p99: float
    rss_mb: float
    cpu_us: float  # per answered request
    others: float


async def capacity(call: Any, body: bytes, seconds: float) -> float:
    """Requests per second with always enough of them waiting for full batches."""
    done = 0
    end = time.monotonic() + seconds

    async def client() -> None:
        nonlocal done
        while time.monotonic() < end:
            await call(body)
            done += 1

    begin = time.monotonic()
    await asyncio.gather(*(client() for _ in range(BATCH * 4)))
    return done / (time.monotonic() - begin)


@dataclass
class Offered:
    """What became of the requests of one load: (sent, done) of answers, latencies of refusals in ms."""

    answers: list[tuple[float, float]]
    refused: list[float]

    def latencies(self) -> list[float]:
        """Of the answers, in ms."""
        return [(done - sent) * 1e3 for sent, done in self.answers]

    def implied(self, ahead: int) -> list[float]:
        """How long `ahead` answers took from each request's sending on, in ms. Of the last requests, which
        fewer followed, up to the last answer."""
        done = np.sort([done for _, done in self.answers])
        sent = np.array([sent for sent, _ in self.answers])
        last = np.minimum(np.searchsorted(done, sent) + ahead, len(done)) - 1
        return list((done[last] - sent) * 1e3)


async def offer(call: Any, body: bytes, rate: float, seconds: float) -> Offered:
    """Offers `rate` requests per second at fixed times, whatever comes back."""
    made = Offered([], [])

    async def one() -> None:
        begin = time.monotonic()
        try:
            await call(body)
        except grpc.aio.AioRpcError as error:
            assert error.code() == grpc.StatusCode.UNAVAILABLE, error
            made.refused.append((time.monotonic() - begin) * 1e3)
        else:
            made.answers.append((begin, time.monotonic()))

    tasks = []
    begin = time.monotonic()
    for i in range(int(rate * seconds)):
        wait = begin + i / rate - time.monotonic()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.ensure_future(one()))
    await asyncio.gather(*tasks)
    return made


def percentile(values: list[float], p: float) -> float:
    return float(np.percentile(values, p)) if values else 0.0


async def measure(server: ServerProcess, model: str, seconds: float, queue: int, rounds: int) -> None:
    """Prints the table of one model."""
    body, pid = request_bytes(model), server.process.pid
    found: dict[float, list[Row]] = {factor: [] for factor in FACTORS}
    capacities = []
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary(METHOD)
        await call(body)
        for _ in range(rounds):
            for factor in FACTORS:
                full = await capacity(call, body, seconds / 2)
                capacities.append(full)
                begin = time.monotonic()
                own, mine, machine = cpu_seconds(pid), time.process_time(), machine_seconds()
                offered = await offer(call, body, full * factor, seconds)
                took = time.monotonic() - begin
                own = cpu_seconds(pid) - own
                others = machine_seconds() - machine - own - (time.process_time() - mine)
                rss = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6
                good, refused = offered.latencies(), offered.refused
                count = len(good) + len(refused)
                found[factor].append(
                    Row(
                        offered=count / took,
                        goodput=len(good) / took,
                        share=len(good) / took / full,
                        p99=percentile(good, 99),
                        implied=percentile(offered.implied(queue + 3 * BATCH), 99),
                        refused=percentile(refused, 50),
                        refused_p99=percentile(refused, 99),
                        rss_mb=rss,
                        cpu_us=own / max(len(good), 1) * 1e6,
                        others=max(0.0, others) / took / (os.cpu_count() or 1),
                    )
                )
    full = median(capacities)
    batch_ms = BATCH / full * 1e3
    print(
        f"capacity {full:.0f}/s ({min(capacities):.0f} to {max(capacities):.0f}), batches of {BATCH} in "
        f"{batch_ms:.0f} ms, max_queue_size {queue}, {rounds} rounds of {seconds:g} s"
    )
    print(
        "factor  offered  goodput  of capacity  p99 ok (implied)  refused p50 / p99   rss MB  CPU us  others"
    )
    for factor, rows in found.items():
        row = Row(*(median(column) for column in zip(*map(astuple, rows), strict=True)))
        # the bound has nothing to say of a queue that is not full
        implied = f"({row.implied:.0f})" if row.refused else "(-)"
        print(
            f"{factor:6.1f}  {row.offered:7.0f}  {row.goodput:7.0f}  {row.share:11.0%}  {row.p99:6.0f} "
            f"{implied:<9}  {row.refused:6.1f} / {row.refused_p99:<6.1f} "
            f"{row.rss_mb:8.1f}  {row.cpu_us:6.0f}  {row.others:6.0%}"
        )


def http_request(model: str) -> bytes:
    """A small binary request as HTTP/1.1."""
    tensors = '{"inputs":[{"name":"INPUT0","datatype":"INT32","shape":[1,16],"parameters":{"binary_data_size":64}}]}'
    return (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: {len(tensors)}"
        f"\r\nContent-Length: {len(tensors) + 64}\r\n\r\n{tensors}"
    ).encode() + bytes(64)


async def over_http(address: str, model: str, count: int, good: bool) -> None:
    """`count` requests over eight connections; all must be answered, or all be refused."""
    expected = b" 200 " if good else b" 503 "
    host, port = address.rsplit(":", 1)
    body = http_request(model)
    problems: list[bytes] = []

    def one() -> None:
        with socket.create_connection((host, int(port))) as connection:
            reader = connection.makefile("rb")
            for _ in range(count // 8):
                connection.sendall(body)
                status = reader.readline()
                if expected not in status:
                    problems.append(status)
                length = 0
                while (line := reader.readline()) != b"\r\n":
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                reader.read(length)

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert not problems, problems[:3]


async def over_grpc(address: str, model: str, count: int, good: bool) -> None:
    """`count` requests over one channel, 64 at a time; all must be answered, or all be refused."""
    body = request_bytes(model)
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(METHOD)

        async def client() -> None:
            for _ in range(count // 64):
                try:
                    await call(body)
                except grpc.aio.AioRpcError as error:
                    assert not good and error.code() == grpc.StatusCode.UNAVAILABLE, error
                else:
                    assert good

        await asyncio.gather(*(client() for _ in range(64)))


async def rejection(server: ServerProcess, count: int, rounds: int) -> None:
    """Prints the server's CPU time per answered and per refused request, over both protocols."""
    body = request_bytes("blocked")
    found: dict[str, list[float]] = {}
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary(METHOD)
        held = [call(body) for _ in range(3)]  # one executes until the server ends, one waits, one is refused
        done, held_tasks = await asyncio.wait(
            [asyncio.ensure_future(one.code()) for one in held], return_when=asyncio.FIRST_COMPLETED
        )
        assert [task.result() for task in done] == [grpc.StatusCode.UNAVAILABLE]
        for _ in range(rounds):
            for title, model, over, expected in (
                ("HTTP, answered", "quick", over_http, True),
                ("HTTP, refused", "blocked", over_http, False),
                ("gRPC, answered", "quick", over_grpc, True),
                ("gRPC, refused", "blocked", over_grpc, False),
            ):
                begin = cpu_seconds(server.process.pid)
                address = server.http if over is over_http else server.grpc
                await over(address, model, count, expected)
                found.setdefault(title, []).append((cpu_seconds(server.process.pid) - begin) / count * 1e6)
        for one in held:
            one.cancel()
        await asyncio.wait(held_tasks)
    for title, values in found.items():
        spread = ", ".join(f"{v:.1f}" for v in sorted(values))
        print(f"{title:<16} {median(values):6.1f} us of server CPU a request (rounds: {spread})")


def write_models(folder: Path, queue: int) -> None:
    """The repository of all three parts."""
    limit = f"dynamic_batching {{ default_queue_policy {{ max_queue_size: {queue} }} }}"
    delay = 'parameters {{ key: "execute_delay_ms" value {{ string_value: "{}" }} }} '
    fixed = identity_config(pairs=1, max_batch_size=BATCH, extra=delay.format(EXECUTION_MS) + limit)
    write_model(folder, "fixed", fixed)
    cpu = identity_config(pairs=1, max_batch_size=BATCH, extra=limit).replace('"identity"', '"python"')
    write_model(folder, "cpu", cpu, {"1/model.py": COMPUTE})
    write_model(folder, "quick", identity_config(pairs=1, max_batch_size=1, extra="dynamic_batching { }"))
    blocked = "dynamic_batching { default_queue_policy { max_queue_size: 1 } }"
    write_model(
        folder, "blocked", identity_config(pairs=1, max_batch_size=1, extra=delay.format(3_600_000) + blocked)
    )


def main() -> None:
    """Runs the benchmark and prints its tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--queue", type=int, default=64)
    parser.add_argument("--requests", type=int, default=8_000, help="of the rejection part, per round")
    parser.add_argument("--only", choices=("fixed", "cpu", "rejection"))
    options = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, load average {' '.join(f'{load:.1f}' for load in os.getloadavg())}")
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder), options.queue)
        cpus = sorted(os.sched_getaffinity(0))
        apart = len(cpus) > 1
        if apart:
            os.sched_setaffinity(0, cpus[:1])  # the server inherits it
        with ServerProcess(Path(folder)) as server:
            if apart:
                for thread in os.listdir("/proc/self/task"):
                    os.sched_setaffinity(int(thread), cpus[1:])
            for part in ("fixed", "cpu"):
                if options.only in (None, part):
                    print(f"\n{part}:", end=" ")
                    asyncio.run(measure(server, part, options.seconds, options.queue, options.rounds))
            if options.only in (None, "rejection"):
                print("\nrejection:")
                asyncio.run(rejection(server, options.requests, options.rounds))
            print(f"load average at the end {' '.join(f'{load:.1f}' for load in os.getloadavg())}")
            server.process.kill()  # a model that blocks for good would hold its shutdown up
            server.process.wait()


if __name__ == "__main__":
    main()
