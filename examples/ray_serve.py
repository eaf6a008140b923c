"""Scales a real model, Magika's file types, from 1 to 3 replicas on Ray Serve, and prints the throughput of each step.

    pip install 'ray[serve]' aiohttp && python examples/prepare.py
    python examples/ray_serve.py [--seconds S] [--clients N] [--replicas 1,2,3]

Every replica hosts an engine with the ensemble `file_type`. The clients are threads with a batch of 16 files of 4 KiB in
each request, over REST through Ray's proxy. Replicas need a core each to show anything: on fewer cores than replicas,
clients and proxy want, the figures stay the same.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
from pathlib import Path

import numpy as np
import ray
import tritonclient.http as httpclient
from ray import serve

import neptrio.ray

REPOSITORY = Path(__file__).resolve().parent / "model_repository"
MODELS = ["file_type_ends", "file_type_scores", "file_type_label", "file_type"]
BATCH = 16
FILE_BYTES = 4096


def contents() -> np.ndarray:
    """A batch of files: pieces of this one in random order."""
    text = Path(__file__).read_bytes()
    pieces = random.Random(1).choices(range(len(text) - 64), k=BATCH * FILE_BYTES // 64)
    lines = [text[at : at + 64] for at in pieces]
    per_file = FILE_BYTES // 64
    files = [[b"".join(lines[i : i + per_file])] for i in range(0, len(lines), per_file)]
    return np.array(files, dtype=object)


def load(url: str, until: float, counts: list[int]) -> None:
    """Sends requests until the time has come, and adds how many files were answered."""
    with httpclient.InferenceServerClient(url) as client:
        batch = contents()
        name = client.get_model_metadata("file_type")["inputs"][0]["name"]
        tensor = httpclient.InferInput(name, batch.shape, "BYTES")
        tensor.set_data_from_numpy(batch)
        answered = 0
        while time.monotonic() < until:
            client.infer("file_type", [tensor])
            answered += BATCH
        counts.append(answered)


def measure(url: str, clients: int, seconds: float) -> float:
    """Files per second that so many clients get answered."""
    counts: list[int] = []
    until = time.monotonic() + seconds
    threads = [threading.Thread(target=load, args=(url, until, counts)) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(counts) != clients:
        sys.exit("some clients failed")
    return sum(counts) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--replicas", default="1,2,3")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    steps = [int(step) for step in given.replicas.split(",")]

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=max(steps) + 1, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": given.port})
    url = f"127.0.0.1:{given.port}"
    print(
        f"{os.cpu_count()} cores, {given.clients} clients, {BATCH} files of {FILE_BYTES} bytes in a request"
    )
    try:
        for replicas in steps:
            app = neptrio.ray.app(
                str(REPOSITORY),
                settings={"model_control_mode": "explicit"},
                user_config={"models": MODELS},
                num_replicas=replicas,
                ray_actor_options={"num_cpus": 1},
                drain_seconds=1.0,
            )
            serve.run(app)
            measure(url, given.clients, min(2.0, given.seconds))  # warms up
            print(f"{replicas} replicas: {measure(url, given.clients, given.seconds):8.0f} files per second")
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
