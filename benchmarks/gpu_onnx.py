"""ONNX models on ONNX Runtime's CUDA provider: what an execution takes in this server and without it, and through a served port.

    python -m benchmarks.gpu_onnx [--rounds N] [--seconds S]

prints Markdown; benchmarks.gpu has it as its last section. It needs a GPU, a package of ONNX Runtime with that provider, the
package onnx, and this package built in place or installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_served import measure
from benchmarks.requests import Workload
from neptrio.backends.kernel import device
from neptrio.backends.onnx import library, providers
from neptrio.backends.onnx.backend import OnnxBackend
from neptrio.execution.batch import Batch
from neptrio.request.infer_request import InferRequest, ModelCore, RequestedOutput, tensor_at
from neptrio.request.numpy_tensor import from_numpy

SIZES = (1, 8, 64)
GPU = 2  # kind of memory
CONFIG = 'backend: "onnxruntime" max_batch_size: 64 instance_group { kind: KIND_GPU count: 1 }'


def missing() -> str:
    """Why nothing of this can be measured here, "" when it can."""
    try:
        import onnx  # noqa: F401

        found = library.module().get_available_providers()
    except Exception as error:
        return str(error)
    return "" if providers.CUDA in found else f"ONNX Runtime has {', '.join(found)} alone"


def median_us(run: Callable[[], Any], rounds: int) -> float:
    """The median of a call, in microseconds."""
    for _ in range(50):
        run()
    taken = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        run()
        taken.append(time.perf_counter_ns() - start)
    return statistics.median(taken) / 1000


def alone(model: bytes, arrays: dict[str, np.ndarray], rounds: int) -> tuple[float, float]:
    """Microseconds of a run by ONNX Runtime's own interface: with numpy arrays, and with memory on the device."""
    onnxruntime = library.module()
    providers.preload()
    session = onnxruntime.InferenceSession(model, providers=[providers.CUDA])
    plain = median_us(lambda: session.run(None, arrays), rounds)
    binding = session.io_binding()
    held = [onnxruntime.OrtValue.ortvalue_from_numpy(array, "cuda", 0) for array in arrays.values()]

    def bound() -> None:
        for name, value in zip(arrays, held, strict=True):
            binding.bind_ortvalue_input(name, value)
        for output in session.get_outputs():
            binding.bind_output(output.name, "cuda", 0)
        session.run_with_iobinding(binding)

    return plain, median_us(bound, rounds)


def executed(model: bytes, arrays: dict[str, np.ndarray], rounds: int) -> tuple[float, float]:
    """Microseconds of an execution of an instance: tensors on the host, and tensors that stay on the device."""
    from tests.support.onnx_instances import context

    with tempfile.TemporaryDirectory() as folder:
        made = context(Path(folder), model, CONFIG)
        OnnxBackend.auto_complete(made)
        instance = OnnxBackend(made).create_instance("m_0_0", "GPU", 0)
        instance.initialize()
        gpu = device.Device.get(0)
        core = ModelCore("m", "1")

        def run(inputs: list[Any], keep: bool) -> None:
            request = InferRequest()
            request.inputs = inputs
            request.outputs = [RequestedOutput(name) for name in ("SUM", "DIFF")]
            for output in request.outputs:
                output.keep_on_device = keep
            request.batch_size = len(arrays["A"])
            batch = Batch(core, [request])
            instance.execute(batch)
            if batch.error is not None:
                raise batch.error

        host = [from_numpy(name, array) for name, array in arrays.items()]
        there = []
        for tensor in host:
            block = gpu.pool.block(tensor.nbytes)
            gpu.pool.store(block.address, tensor)
            there.append(
                tensor_at(
                    tensor.name, tensor.dtype, tensor.shape, block.address, tensor.nbytes, block, GPU, 0
                )
            )
        found = (
            median_us(lambda: run(host, False), rounds),
            median_us(lambda: run(there, True), rounds),
        )
        there.clear()
        instance.finalize()
        gpu.release()
        return found


def measured(rounds: int, seconds: float) -> list[str]:
    """Both tables."""
    from tests.support import onnx_models
    from tests.support.repository import write_model
    from tests.support.server import ServerProcess

    model = onnx_models.add_sub()
    rng = np.random.default_rng(11)
    lines = [
        "| batch | ONNX Runtime alone: numpy (us) | bound on the device (us) | execution here: host (us) | on the device (us) |",
        "|---|---|---|---|---|",
    ]
    works = []
    for n in SIZES:
        arrays = {name: rng.integers(-1000, 1000, (n, 16)).astype(np.int32) for name in "AB"}
        times = (*alone(model, arrays, rounds), *executed(model, arrays, rounds))
        lines.append(f"| {n} | {' | '.join(f'{us:.1f}' for us in times)} |")
        works.append(Workload("onnx", tuple(arrays.items()), arrays["A"] - arrays["B"]))
    lines += [
        "",
        "| dynamic batching | batch | connections | requests/s | p50 (us) | p99 (us) |",
        "|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        # without dynamic batching: one execution for each request, as in the rows of kernel models
        for name, extra in (("onnx", ""), ("batched", " dynamic_batching { }")):
            write_model(Path(folder), name, CONFIG + extra, {"1/model.onnx": model})
        with ServerProcess(Path(folder)) as server:
            for name, said in (("onnx", "no"), ("batched", "yes")):
                for n, work in zip(SIZES, works, strict=True):
                    work = dataclasses.replace(work, model=name)
                    for connections in (1, 8, 64):
                        rate, p50, p99 = measure(server.http, work, connections, seconds)
                        lines.append(f"| {said} | {n} | {connections} | {rate:.0f} | {p50:.0f} | {p99:.0f} |")
    return lines


def section(rounds: int, seconds: float) -> list[str]:
    """Both tables, or why there are none."""
    why = missing()
    return [f"Not measured: {why}."] if why else measured(rounds, seconds)


def main() -> int:
    """Prints the tables; 1 where nothing can be measured."""
    p = argparse.ArgumentParser()
    p.add_argument("--rounds", type=int, default=2000)
    p.add_argument("--seconds", type=float, default=2.0, help="of each served row")
    options = p.parse_args()
    why = (device.why_none() if not device.count() else "") or missing()
    if why:
        print(why, file=sys.stderr)
        return 1
    print("\n".join(measured(options.rounds, options.seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
