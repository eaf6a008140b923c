"""Goodput over offered load, open loop: what a queue limit is worth when too much arrives.

Starts a server with one batching model of known execution time and `max_queue_size`, measures its
capacity (closed loop), then offers 0.5 to 5 times that at fixed times, whatever comes back.

    python -m benchmarks.overload [--seconds 5] [--queue 64]

Columns: offered and answered requests per second, answered as a share of capacity, the 99th
percentile of accepted requests and what the queue bound implies for it, the median and the 99th
percentile of refusals, and the server's memory. Times are milliseconds at the client, so a busy
client machine adds its own delay.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
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


def request_bytes() -> bytes:
    tensor = tritonclient.InferInput("INPUT0", [1, 16], "INT32")
    tensor.set_data_from_numpy(np.zeros((1, 16), np.int32))
    from tritonclient.grpc._utils import _get_inference_request

    made = _get_inference_request(
        model_name="m", inputs=[tensor], model_version="", request_id="", outputs=None, sequence_id=0,
        sequence_start=False, sequence_end=False, priority=0, timeout=None, parameters=None,
    )  # fmt: skip
    return bytes(made.SerializeToString())


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


async def offer(call: Any, body: bytes, rate: float, seconds: float) -> tuple[list[float], list[float]]:
    """(latencies of answers, latencies of refusals) in ms, at `rate` requests per second."""
    good: list[float] = []
    refused: list[float] = []

    async def one() -> None:
        begin = time.monotonic()
        try:
            await call(body)
        except grpc.aio.AioRpcError as error:
            assert error.code() == grpc.StatusCode.UNAVAILABLE, error
            refused.append((time.monotonic() - begin) * 1e3)
        else:
            good.append((time.monotonic() - begin) * 1e3)

    tasks = []
    begin = time.monotonic()
    for i in range(int(rate * seconds)):
        wait = begin + i / rate - time.monotonic()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.ensure_future(one()))
    await asyncio.gather(*tasks)
    return good, refused


def percentile(values: list[float], p: float) -> float:
    return float(np.percentile(values, p)) if values else 0.0


async def measure(address: str, pid: int, seconds: float, queue: int) -> None:
    body = request_bytes()
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(METHOD)
        await call(body)
        full = await capacity(call, body, seconds)
        implied = (queue / BATCH + 2) * EXECUTION_MS
        print(f"capacity {full:.0f}/s, batches of {BATCH} in {EXECUTION_MS} ms, max_queue_size {queue}")
        print("factor  offered  goodput  of capacity  p99 ok (implied)  refused p50 / p99   rss MB")
        for factor in FACTORS:
            begin = time.monotonic()
            good, refused = await offer(call, body, full * factor, seconds)
            took = time.monotonic() - begin
            rss = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6
            print(
                f"{factor:6.1f}  {full * factor:7.0f}  {len(good) / took:7.0f}  {len(good) / took / full:11.0%}  "
                f"{percentile(good, 99):6.0f} ({implied:.0f})      {percentile(refused, 50):6.1f} / "
                f"{percentile(refused, 99):.1f}   {rss:8.1f}"
            )


def main() -> None:
    """Runs the benchmark and prints one line per offered load."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--queue", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        extra = (
            f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{EXECUTION_MS}" }} }} '
            f"dynamic_batching {{ default_queue_policy {{ max_queue_size: {options.queue} }} }}"
        )
        write_model(Path(folder), "m", identity_config(pairs=1, max_batch_size=BATCH, extra=extra))
        with ServerProcess(Path(folder)) as server:
            asyncio.run(measure(server.grpc, server.process.pid, options.seconds, options.queue))


if __name__ == "__main__":
    main()
