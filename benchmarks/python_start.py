"""How fast many Python models start, and what one more instance of a small one needs.

A repository of small Python models is served by this server and by tritonserver (if `make bench-peers` installed it) in
turns, beside a repository of one; the difference of the times until the server says that it is ready is what the models
took. The target of 50 models in 5 s is for two cores. The memory is what the processes of four more instances of a
model have for themselves (Private_Clean and Private_Dirty of smaps_rollup), less what one has.

    python -m benchmarks.python_start [--models 50] [--rounds 3]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import peers
from benchmarks import tritonserver as triton

MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.two = np.float32(2)

    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy() * self.two for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", t)]) for t in tensors]
"""
CONFIG = """
backend: "python" max_batch_size: 8
input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] }} ]
instance_group [ {{ kind: KIND_CPU count: {count} }} ]
"""
Start = Callable[[Path, Path], peers.Server]


def repository(folder: Path, models: int, instances: int = 1) -> Path:
    """So many models of `instances` instances each."""
    for i in range(models):
        version = folder / f"model_{i}" / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(MODEL)
        (version.parent / "config.pbtxt").write_text(CONFIG.format(count=instances))
    return folder


def ready_s(start: Start, models: Path, log: Path) -> float:
    """Seconds from the start of the process until it is ready."""
    server = start(models, log)
    try:
        return server.ready_s
    finally:
        server.stop()


def private_bytes(server: peers.Server) -> int:
    """Memory that the server's processes have for themselves; Linux only."""
    total = 0
    for pid in server.tree():
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += sum(int(row.split()[1]) << 10 for row in rows if row.startswith("Private_"))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    starts: dict[str, Start] = {"neptrio": lambda models, log: peers.neptrio(models, None, log)}
    if triton.home() is not None:
        starts["tritonserver"] = lambda models, log: peers.tritonserver(models, None, log)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one, many = repository(folder / "one", 1), repository(folder / "many", options.models)
        log = folder / "log"
        found: dict[str, list[tuple[float, float]]] = {server: [] for server in starts}
        for _ in range(options.rounds):
            for server, start in starts.items():
                found[server].append((ready_s(start, one, log), ready_s(start, many, log)))
        print(f"| server | one model, ready after s | {options.models} models | each further model, ms |")
        print("|---|---|---|---|")
        for server, times in found.items():
            first, all_ = (statistics.median(column) for column in zip(*times, strict=True))
            print(
                f"| {server} | {first:.2f} | {all_:.2f} | {1e3 * (all_ - first) / (options.models - 1):.0f} |"
            )
        five = repository(folder / "five", 1, instances=5)
        used = []
        for models in (one, five):
            server = starts["neptrio"](models, log)
            used.append(private_bytes(server))
            server.stop()
        print(
            f"\neach further instance of a small model: {(used[1] - used[0]) / 4 / (1 << 20):.1f} MiB of its own"
        )


if __name__ == "__main__":
    main()
