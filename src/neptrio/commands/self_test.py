"""Tries the server out on this machine: `neptrio self-test`. It starts one on free loopback ports, with a small model of each
built-in backend, sends each a request over HTTP and over gRPC, opens the pages, takes a trace, and stops it. A line for each.

Exit status: 0 when everything works or cannot be tried here (the line says why), 1 when something fails.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import json
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

HELP = "try the server out on this machine, in a minute"
TENSORS = "".join(
    f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: [ 4 ] }} '
    for kind, name in (("input", "INPUT0"), ("output", "OUTPUT0"))
)
PYTHON = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        found = [pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", 2 * x)]) for x in found]
"""
KERNEL = """
extern "C" __global__ void twice(const float* x, float* y, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) y[i] = 2 * x[i];
}
"""
KERNELS = (
    'parameters { key: "kernels" value { string_value: '
    '"twice<<<ceil_div(INPUT0.size, 128), 128>>>(INPUT0, OUTPUT0, INPUT0.size)" } }'
)
# an ONNX file of one node: Y = X of FP32[N,4]
ONNX = (
    "CAk6RAoQCgFYEgFZIghJZGVudGl0eRIEdGVzdFoUCgFYEg8KDQgBEgkKAxIBTgoCCARiFAoBWRIPCg0IARIJCgMSAU4KAggEQgQKABAR"
)
STEP = (
    'ensemble_scheduling { step { model_name: "python" model_version: -1 '
    'input_map { key: "INPUT0" value: "INPUT0" } output_map { key: "OUTPUT0" value: "OUTPUT0" } } }'
)
# model -> (configuration, its file in version 1, that file's content, input, output, factor)
MODELS: dict[str, tuple[str, str, bytes, str, str, int]] = {
    "identity": (f'backend: "identity" {TENSORS}', "", b"", "INPUT0", "OUTPUT0", 1),
    "python": (f'backend: "python" {TENSORS}', "model.py", PYTHON.encode(), "INPUT0", "OUTPUT0", 2),
    "kernel": (f'backend: "kernel" {TENSORS}{KERNELS}', "model.cu", KERNEL.encode(), "INPUT0", "OUTPUT0", 2),
    "onnxruntime": ("", "model.onnx", base64.b64decode(ONNX), "X", "Y", 1),
    "ensemble": (f'platform: "ensemble" {TENSORS}{STEP}', "", b"", "INPUT0", "OUTPUT0", 2),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`neptrio self-test` has no flags."""


class _Report:
    """Prints the lines, and knows whether one failed."""

    failed = False

    @contextmanager
    def line(self, what: str) -> Iterator[None]:
        """`what` is said to work, or to fail when the block raises."""
        begun = time.monotonic()
        try:
            yield
        except Exception as error:
            self.failed = True
            print(f"FAILED  {what}: {type(error).__name__}: {error}", flush=True)
        else:
            print(f"ok      {what} ({(time.monotonic() - begun) * 1000:.0f} ms)", flush=True)


def run(options: argparse.Namespace) -> int:
    """Prints the lines; returns the exit status of the module's text."""
    import neptrio

    report = _Report()
    left_out = lacking()
    with tempfile.TemporaryDirectory(prefix="neptrio-self-test-") as name:
        folder = Path(name)
        for model, (config, file, content, *_) in MODELS.items():
            version = folder / "models" / model / "1"
            if model in left_out:
                print(f"skipped {model}: {left_out[model]}", flush=True)
                continue
            version.mkdir(parents=True)
            if config:
                (version.parent / "config.pbtxt").write_text(config)
            if file:
                (version / file).write_bytes(content)
        server = neptrio.Server(
            folder / "models",
            http_port=0,
            grpc_port=0,
            metrics_port=0,
            allow_console=True,
            allow_forced_trace=True,
            trace_dir=folder / "traces",
        )
        context = server.running()
        with report.line("the server starts and loads its models"):
            running = context.__enter__()
        if report.failed:
            return 1
        try:
            _try(report, running.addresses, [model for model in MODELS if model not in left_out])
        finally:
            with report.line("it stops and its processes end"):
                context.__exit__(None, None, None)
    print("something does not work: see above" if report.failed else "everything works", flush=True)
    return int(report.failed)


def lacking() -> dict[str, str]:
    """What cannot be tried here, and why."""
    from neptrio.backends.kernel.host_compiler import compiler
    from neptrio.errors import TritonError

    found = {}
    if importlib.util.find_spec("onnxruntime") is None:
        found["onnxruntime"] = "the package onnxruntime is not installed (extra onnx)"
    try:
        compiler()
    except TritonError as error:
        found["kernel"] = str(error)
    return found


def _try(report: _Report, addresses: dict[str, str], models: list[str]) -> None:
    from neptrio.client.http import HttpClient

    client = HttpClient(addresses["http"])
    try:
        for model in models:
            with report.line(f"HTTP: a request to {model}"):
                _right(model, lambda inputs, name=model: client.infer(name, inputs).outputs)  # type: ignore[misc]
        for model in models:
            with report.line(f"gRPC: a request to {model}"):
                _right(model, lambda inputs, name=model: _over_grpc(addresses["grpc"], name, inputs))  # type: ignore[misc]
        with report.line("a trace"):
            client.infer("identity", {"INPUT0": np.ones(4, np.float32)}, parameters={"neptrio_trace": True})
            traces = json.loads(client.call("GET", "/v2/trace/recent")[0])
            assert traces and traces[-1]["model_name"] == "identity", f"got {traces}"
        with report.line("the statistics"):
            stats = json.loads(client.call("GET", "/v2/models/identity/stats")[0])["model_stats"][0]
            assert stats["inference_count"] >= 3, f"3 requests were sent, {stats['inference_count']} counted"
    finally:
        client.close()
    # a proxy of the environment is for other machines
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for what, url, text in (
        ("the metrics", f"http://{addresses['metrics']}/metrics", b"nv_inference_request_success"),
        ("the console", f"http://{addresses['metrics']}/console", b"<html"),
        ("the page of the API", f"http://{addresses['http']}/docs", b"<html"),
    ):
        with report.line(f"{what}: {url}"), direct.open(url, timeout=30) as answer:
            assert text in answer.read(), f"the answer has no {text.decode()}"


def _right(model: str, infer: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> None:
    """Raises AssertionError when the model's answer is not right."""
    *_, into, out, factor = MODELS[model]
    given: np.ndarray = np.arange(4, dtype=np.float32)
    if model == "onnxruntime":
        given = given.reshape(1, 4)  # its file says that it batches
    found = infer({into: given})[out]
    assert np.array_equal(found, factor * given), f"expected {factor * given}, got {found}"


def _over_grpc(address: str, model: str, inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    import trio

    from neptrio.client import open_client

    async def ask() -> dict[str, np.ndarray]:
        async with open_client(address) as client:
            return (await client.infer(model, inputs)).outputs

    return trio.run(ask)
