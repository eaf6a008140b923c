"""Kernel models on a GPU: correctness, overhead per batch, throughput against the card's own copies.

    python -m benchmarks.gpu [--rounds N] [--seconds S] [--kind CPU]

prints Markdown. It needs a GPU, NVRTC and this package built in place; no network and no client
library. With --kind CPU the same runs are made on the host build, to try the harness.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import gpu_onnx, gpu_served
from neptrio.backends.identity_batch import run_inline
from neptrio.backends.kernel import device
from neptrio.backends.kernel.backend import KernelBackend
from neptrio.config import model_config as model_config
from neptrio.execution.backend import LoadContext
from neptrio.execution.batch import Batch
from neptrio.loop.mailbox import CompletionQueue, Mailbox
from neptrio.request.infer_request import InferRequest, ModelCore
from neptrio.request.numpy_tensor import from_numpy, to_numpy
from neptrio.settings import Settings
from tests.backends.kernel.family import FAMILY, Arrays, Case, kernel_config, parameter, tensors


class Runner:
    """One kernel model instance without a server around it."""

    def __init__(self, case: Case, kind: str = "GPU", ordinal: int = 0, extra: str = "") -> None:
        self.case = case
        self._folder = tempfile.TemporaryDirectory()
        folder = case.write(
            Path(self._folder.name), f" instance_group {{ kind: KIND_{kind} count: 1 }}" + extra
        )
        config = model_config.read(folder).config
        config.name = case.name
        self.max_batch_size = config.max_batch_size
        context = LoadContext(case.name, 1, folder, folder / "1", config, Settings(), None)
        backend = KernelBackend(context)
        backend.load()
        self.instance = backend.create_instance("0", kind, ordinal)
        self.instance.initialize()
        self.completions = CompletionQueue()
        self.mailbox = Mailbox(self.completions)
        self.model = ModelCore(case.name, "1")

    def finished(self, batch: Batch) -> None:
        """What an Instance would be told."""

    def prepare(self, *requests: Arrays) -> Batch:
        """A batch of requests, ready to run."""
        made = []
        for arrays in requests:
            request = InferRequest()
            request.model_name = self.case.name
            request.inputs = [from_numpy(name, array) for name, array in arrays.items()]
            request.batch_size = len(next(iter(arrays.values()))) if self.max_batch_size else 1
            made.append(request)
        batch = Batch(self.model, made)
        batch.instance = self
        return self.instance.prepare(batch)

    def infer(self, *requests: Arrays) -> list[Arrays]:
        """Runs the requests as one batch."""
        batch = self.prepare(*requests)
        run_inline(batch)
        return self.results(batch)

    def results(self, batch: Batch) -> list[Arrays]:
        """The outputs of a batch that has run. Raises its error."""
        found = []
        for response in batch.responses:
            if response.error is not None:
                raise response.error
            found.append({t.name: to_numpy(t) for t in response.outputs})
        return found

    def pipeline(self, requests: list[Arrays]) -> float:
        """Seconds from the first to the last of batches that wait in the mailbox together."""
        batches = [self.prepare(arrays) for arrays in requests]
        thread = threading.Thread(target=self.mailbox.run)
        for batch in batches:
            self.mailbox.submit(batch)
        self.mailbox.close()
        start = time.perf_counter()
        thread.start()
        thread.join()
        took = time.perf_counter() - start
        self.completions.drain()
        self.mailbox = Mailbox(self.completions)
        return took

    def close(self) -> None:
        """Gives the instance back."""
        self.instance.finalize()
        self.completions.close()
        self._folder.cleanup()


def compare(case: Case, arrays: Arrays, got: Arrays) -> float:
    """The largest absolute difference from numpy in float64. Raises AssertionError above the tolerance."""
    worst = 0.0
    for name, expected in case.reference(arrays).items():
        values, wanted = got[name].astype(np.float64), expected.astype(np.float64)
        np.testing.assert_allclose(values, wanted, rtol=case.rtol, atol=case.atol)
        worst = max(worst, float(np.max(np.abs(values - wanted), initial=0.0)))
    return worst


SIMPLE = kernel_config(
    64,
    tensors("input", ("INPUT0", "INT32", "16"), ("INPUT1", "INT32", "16")),
    tensors("output", ("OUTPUT0", "INT32", "16"), ("OUTPUT1", "INT32", "16")),
    parameter(
        "kernels",
        "add_sub<<<ceil_div(INPUT0.size, 128), 128>>>(INPUT0, INPUT1, OUTPUT0, OUTPUT1, INPUT0.size)",
    ),
)
STREAM = kernel_config(
    64,
    tensors("input", ("X", "FP32", "-1")),
    tensors("output", ("Y", "FP32", "-1")),
    parameter("kernels", "scale<<<ceil_div(X.size, 1024), 256>>>(X, Y, X.size / 4, 2.0)"),
    parameter("shapes", "Y = [batch, X.shape[1]]"),
)
STREAM_SOURCE = """
extern "C" __global__ void scale(const float4* x, float4* y, long long n, float f)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { float4 v = x[i]; v.x *= f; v.y *= f; v.z *= f; v.w *= f; y[i] = v; }
}
"""


class Written(Case):
    """A case whose source is given here."""

    def write(self, repository: Path, extra: str = "", name: str = "") -> Path:
        from tests.support.repository import write_model

        return write_model(repository, name or self.name, self.config + extra, {"1/model.cu": self.source})


def simple_case() -> Case:
    """The example model."""
    source = Path(__file__).parent.parent / "examples" / "model_repository" / "simple" / "1" / "model.cu"
    return Written(
        "simple",
        source.read_text(),
        SIMPLE,
        lambda rng, n: {k: rng.integers(-1000, 1000, (n, 16)).astype(np.int32) for k in ("INPUT0", "INPUT1")},
        lambda a: {"OUTPUT0": a["INPUT0"] + a["INPUT1"], "OUTPUT1": a["INPUT0"] - a["INPUT1"]},
    )


def stream_case() -> Case:
    """y = 2 x, four floats per thread: bound by memory alone."""
    return Written(
        "scale",
        STREAM_SOURCE,
        STREAM,
        lambda rng, n: {"X": rng.standard_normal((n, 1024)).astype(np.float32)},
        lambda a: {"Y": a["X"].astype(np.float64) * 2},
    )


def correctness(kind: str) -> list[str]:
    """Every kernel at several batch sizes, alone and gathered from several requests."""
    lines = ["| kernel | batches | largest difference from float64 |", "|---|---|---|"]
    rng = np.random.default_rng(3)
    for case in (simple_case(), stream_case(), *FAMILY):
        runner = Runner(case, kind)
        worst, sizes = 0.0, [n for n in (1, 3, 8, 64) if n <= runner.max_batch_size]
        named = ", ".join(map(str, sizes)) + (", 1+2+3" if runner.max_batch_size > 1 else "")
        for n in sizes:
            for _ in range(6):  # often enough that graphs are recorded and used
                arrays = case.make(rng, n)
                worst = max(worst, compare(case, arrays, runner.infer(arrays)[0]))
        if runner.max_batch_size > 1:
            sent = [case.make(rng, n) for n in (1, 2, 3)]
            for arrays in sent[1:] if case.name in ("elementwise", "layernorm") else ():
                for name in ("B", "SCALE", "SHIFT"):
                    if name in arrays:
                        arrays[name] = np.repeat(sent[0][name][:1], len(arrays["X"]), axis=0)
            for arrays, got in zip(sent, runner.infer(*sent), strict=True):
                worst = max(worst, compare(case, arrays, got))
        lines.append(f"| {case.name} | {named} | {worst:.2e} |")
        runner.close()
    return lines


def overhead(kind: str, rounds: int) -> list[str]:
    """Time per batch of the example model, against a bare launch of the same kernel."""
    lines = [
        "| batch | bare launch + wait (us) | + copies (us) | whole batch (us) | of it on the loop's thread (us) |",
        "|---|---|---|---|---|",
    ]
    case = simple_case()
    rng = np.random.default_rng(5)
    for n in (1, 8, 64):
        runner = Runner(case, kind)
        arrays = case.make(rng, n)
        for _ in range(50):
            runner.infer(arrays)
        bare = copies = float("nan")
        if kind == "GPU":
            from neptrio.backends.kernel.cuda_batch import time_bare

            bare = statistics.median(time_bare(runner.prepare(arrays), rounds, False)) / 1000
            copies = statistics.median(time_bare(runner.prepare(arrays), rounds, True)) / 1000
        whole, prepared = [], []
        for _ in range(rounds):
            t0 = time.perf_counter_ns()
            batch = runner.prepare(arrays)
            t1 = time.perf_counter_ns()
            run_inline(batch)
            whole.append(time.perf_counter_ns() - t0)
            prepared.append(t1 - t0)
        lines.append(
            f"| {n} | {bare:.1f} | {copies:.1f} | {statistics.median(whole) / 1000:.1f} | "
            f"{statistics.median(prepared) / 1000:.1f} |"
        )
        runner.close()
    return lines


def copy_bandwidth(nbytes: int) -> dict[str, float]:
    """GB/s of the card's copies, timed with events: on the device (read + written), to it, from it."""
    from cuda.bindings import driver

    call = device.call
    gpu = device.Device.get(0)
    call(driver.cuCtxSetCurrent(gpu.context), "")
    stream = call(driver.cuStreamCreate(1), "creating a stream")
    a, b = (call(driver.cuMemAlloc(nbytes), "allocating") for _ in range(2))
    host = call(driver.cuMemHostAlloc(nbytes, 0), "allocating")
    start, end = (call(driver.cuEventCreate(0), "creating an event") for _ in range(2))
    found = {}
    for name, factor, copy in (
        ("device", 2, lambda: driver.cuMemcpyDtoDAsync(b, a, nbytes, stream)),
        ("to the device", 1, lambda: driver.cuMemcpyHtoDAsync(a, host, nbytes, stream)),
        ("from the device", 1, lambda: driver.cuMemcpyDtoHAsync(host, a, nbytes, stream)),
    ):
        best = 0.0
        for _ in range(5):
            call(driver.cuEventRecord(start, stream), "recording")
            for _ in range(4):
                call(copy(), "copying")
            call(driver.cuEventRecord(end, stream), "recording")
            call(driver.cuEventSynchronize(end), "waiting")
            best = max(
                best, 4 * factor * nbytes / call(driver.cuEventElapsedTime(start, end), "timing") / 1e6
            )
        found[name] = best
    call(driver.cuMemFree(a), "freeing")
    call(driver.cuMemFree(b), "freeing")
    call(driver.cuMemFreeHost(host), "freeing")
    call(driver.cuStreamDestroy(stream), "destroying")
    gpu.release()
    return found


def throughput(kind: str) -> list[str]:
    """y = 2 x at growing sizes: what the kernel reaches on the device, and whole batches with copies."""
    lines = []
    limits: dict[str, float] = {}
    if kind == "GPU":
        limits = copy_bandwidth(256 << 20)
        lines.append(
            "Copies of 256 MiB: "
            + ", ".join(f"{name} {gbs:.0f} GB/s" for name, gbs in limits.items())
            + ".\n"
        )
    lines += [
        "| batch | MiB in | kernel (GB/s read + written) | of the device copy | batches/s one by one | "
        "batches/s pipelined | input + output GB/s pipelined |",
        "|---|---|---|---|---|---|---|",
    ]
    case = stream_case()
    for n, columns in ((1, 1024), (8, 1024), (64, 1024), (64, 65536), (1, 16 << 20), (4, 16 << 20)):
        runner = Runner(case, kind)
        arrays = {"X": np.random.default_rng(1).standard_normal((n, columns), dtype=np.float32)}
        nbytes = arrays["X"].nbytes
        rounds = max(8, min(500, (1 << 31) // nbytes))
        for _ in range(4):
            runner.infer(arrays)
        start = time.perf_counter()
        infer_ns = []
        for _ in range(rounds):
            batch = runner.prepare(arrays)
            run_inline(batch)
            batch.count_execution = False
            t = batch.times() if hasattr(batch, "times") else (0, 0, 0, 0)
            infer_ns.append(t[2] - t[1])
            del batch
        alone = rounds / (time.perf_counter() - start)
        # so many at once as the pinned pool has room for; the second time their memory is there already
        together = max(2, min(rounds, 64, (192 << 20) // nbytes))
        piped = max(together / runner.pipeline([arrays] * together) for _ in range(3))
        kernel = 2 * nbytes / max(statistics.median(infer_ns), 1)
        share = f"{100 * kernel / limits['device']:.0f} %" if limits else ""
        lines.append(
            f"| {n} | {nbytes / 2**20:.2f} | {kernel:.1f} | {share} | {alone:.0f} | {piped:.0f} | "
            f"{2 * nbytes * piped / 1e9:.2f} |"
        )
        runner.close()
    return lines


def main() -> int:
    """Prints the report; 1 when there is no GPU."""
    p = argparse.ArgumentParser()
    p.add_argument("--rounds", type=int, default=2000)
    p.add_argument("--seconds", type=float, default=2.0, help="of each served row")
    p.add_argument("--kind", choices=("GPU", "CPU"), default="GPU")
    options = p.parse_args()
    if options.kind == "GPU" and not device.count():
        print(f"no GPU: {device.why_none()}", file=sys.stderr)
        return 1
    gpu: Any = device.Device.get(0) if options.kind == "GPU" else None
    if gpu is not None:
        print(f"GPU 0: {gpu.name}, {gpu.architecture}\n")
    sections = [
        ("Correctness", lambda: correctness(options.kind)),
        (
            "Overhead per batch (simple: 2 x INT32[n,16] in, the same out)",
            lambda: overhead(options.kind, options.rounds),
        ),
        ("Throughput (y = 2 x, FP32)", lambda: throughput(options.kind)),
        ("Served over HTTP", lambda: gpu_served.served(options.kind, options.seconds)),
    ]
    if options.kind == "GPU":
        sections.append(
            ("ONNX models on CUDA's provider", lambda: gpu_onnx.section(options.rounds, options.seconds))
        )
    for title, lines in sections:
        print(f"## {title}\n", flush=True)
        print("\n".join(lines()) + "\n", flush=True)
    if gpu is not None:
        print(f"Pools at the end: {gpu.statistics()}")
        gpu.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
