"""The kernel family: sources, configurations and float64 references, for host and GPU alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from tests.support.repository import write_model

HERE = Path(__file__).parent
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One member: how it is configured, what goes in, what must come out."""

    name: str
    source: str
    config: str
    make: Callable[[np.random.Generator, int], Arrays]
    reference: Callable[[Arrays], Arrays]
    rtol: float = 1e-5
    atol: float = 1e-5

    def write(self, repository: Path, extra: str = "", name: str = "") -> Path:
        """The model in a repository."""
        files = {"1/model.cu": (HERE / self.source).read_text()}
        if "reduce.cuh" in files["1/model.cu"]:
            files["1/reduce.cuh"] = (HERE / "reduce.cuh").read_text()
        return write_model(repository, name or self.name, self.config + extra, files)


def parameter(key: str, value: str) -> str:
    """One entry of a config's parameters."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f' parameters {{ key: "{key}" value {{ string_value: "{escaped}" }} }}'


def tensors(role: str, *specs: tuple[str, str, str]) -> str:
    """inputs or outputs: (name, datatype, dims)."""
    return "".join(f' {role} {{ name: "{n}" data_type: TYPE_{t} dims: [ {d} ] }}' for n, t, d in specs)


def kernel_config(max_batch_size: int, *parts: str) -> str:
    """The start of a kernel model's config.pbtxt."""
    return f'backend: "kernel" max_batch_size: {max_batch_size}' + "".join(parts)


def _floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def _gelu(a: Arrays) -> Arrays:
    x = 1.7 * a["X"].astype(np.float64) + a["B"].astype(np.float64)[0]
    erf = np.vectorize(math.erf)
    return {"Y": 0.5 * x * (1 + erf(x / math.sqrt(2)))}


def _softmax(a: Arrays) -> Arrays:
    x = a["X"].astype(np.float64)
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return {"Y": e / e.sum(axis=1, keepdims=True)}


def _layernorm(a: Arrays) -> Arrays:
    x = a["X"].astype(np.float64)
    centred = x - x.mean(axis=1, keepdims=True)
    normal = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)
    return {"Y": normal * a["SCALE"].astype(np.float64)[0] + a["SHIFT"].astype(np.float64)[0]}


def _topk(a: Arrays) -> Arrays:
    order = np.argsort(-a["X"], axis=1, kind="stable")[:, :5]
    return {"VALUES": np.take_along_axis(a["X"], order, axis=1), "INDICES": order.astype(np.int32)}


def _votes(a: Arrays) -> Arrays:
    x = a["X"][0]
    padded = np.zeros(64, dtype=np.int32)
    padded[: x.size] = x
    warps = padded.reshape(2, 32)
    ballot = (warps > 0).sum(axis=1)
    value = (
        ballot * 1000000
        + (padded > 0).sum() * 1000
        + (warps > 100).any(axis=1) * 10
        + (warps >= 0).all(axis=1)
    )
    return {"Y": np.repeat(value, 32)[: x.size].astype(np.int32).reshape(1, -1)}


COLUMNS = "X.shape[1]"
FAMILY: tuple[Case, ...] = (
    Case(
        "elementwise",
        "elementwise.cu",
        kernel_config(
            64,
            tensors("input", ("X", "FP32", "-1"), ("B", "FP32", "-1")),
            tensors("output", ("Y", "FP32", "-1")),
            parameter(
                "kernels",
                "affine_gelu<<<min(ceil_div(X.size, 256), 4096), 256>>>(X, B, Y, parameter.alpha, X.size, X.shape[1])",
            ),
            parameter("shapes", "Y = [batch, X.shape[1]]"),
            parameter("alpha", "1.7"),
        ),
        # the shift is a row of its own per request; the kernel reads the first
        lambda rng, n: {"X": _floats(rng, n, 1000), "B": np.repeat(_floats(rng, 1, 1000), n, axis=0)},
        _gelu,
    ),
    Case(
        "softmax",
        "softmax.cu",
        kernel_config(
            64,
            tensors("input", ("X", "FP32", "-1")),
            tensors("output", ("Y", "FP32", "-1")),
            parameter(
                "kernels", f"softmax<<<batch, min(256, 32 * ceil_div({COLUMNS}, 32))>>>(X, Y, {COLUMNS})"
            ),
            parameter("shapes", "Y = [batch, X.shape[-1]]"),
        ),
        lambda rng, n: {"X": _floats(rng, n, 777) * 5},
        _softmax,
    ),
    Case(
        "layernorm",
        "layernorm.cu",
        kernel_config(
            64,
            tensors("input", ("X", "FP32", "384"), ("SCALE", "FP32", "384"), ("SHIFT", "FP32", "384")),
            tensors("output", ("Y", "FP32", "384")),
            parameter(
                "kernels", "layernorm<<<batch, 256>>>(X, SCALE, SHIFT, Y, X.shape[1], parameter.epsilon)"
            ),
            parameter("epsilon", "1e-5"),
        ),
        lambda rng, n: {
            "X": _floats(rng, n, 384) * 3 + 1,
            "SCALE": np.repeat(_floats(rng, 1, 384), n, axis=0),
            "SHIFT": np.repeat(_floats(rng, 1, 384), n, axis=0),
        },
        _layernorm,
        atol=2e-5,
    ),
    Case(
        "reduction",
        "reduction.cu",
        kernel_config(
            64,
            tensors("input", ("X", "FP32", "-1")),
            tensors("output", ("Y", "FP32", "1")),
            parameter(
                "kernels",
                "partial<<<(ceil_div(X.shape[1], 512), batch), 128, 128 * 4>>>(X, SUMS, X.shape[1]);"
                "total<<<ceil_div(SUMS.size, 64), 64>>>(SUMS, Y, SUMS.shape[1], batch)",
            ),
            parameter("scratch", "SUMS = FP32[batch, ceil_div(X.shape[1], 512)]"),
            parameter("zero", "Y"),
        ),
        lambda rng, n: {"X": _floats(rng, n, 3001)},
        lambda a: {"Y": a["X"].astype(np.float64).sum(axis=1, keepdims=True)},
        atol=1e-3,
    ),
    Case(
        "matmul",
        "matmul.cu",
        kernel_config(
            16,
            tensors("input", ("A", "FP32", "-1, -1"), ("B", "FP32", "-1, -1")),
            tensors("output", ("C", "FP32", "-1, -1")),
            parameter(
                "kernels",
                "matmul<<<(ceil_div(B.shape[2], 16), ceil_div(A.shape[1], 16), batch), (16, 16)>>>"
                "(A, B, C, A.shape[1], B.shape[2], A.shape[2])",
            ),
            parameter("shapes", "C = [batch, A.shape[1], B.shape[2]]"),
        ),
        lambda rng, n: {"A": _floats(rng, n, 37, 50), "B": _floats(rng, n, 50, 21)},
        lambda a: {"C": a["A"].astype(np.float64) @ a["B"].astype(np.float64)},
        atol=1e-4,
    ),
    Case(
        "topk",
        "topk.cu",
        kernel_config(
            16,
            tensors("input", ("X", "FP32", "-1")),
            tensors("output", ("VALUES", "FP32", "5"), ("INDICES", "INT32", "5")),
            parameter("kernels", f"topk<<<batch, 128>>>(X, VALUES, INDICES, {COLUMNS}, INDICES.shape[1])"),
        ),
        # few distinct values, so that ties matter
        lambda rng, n: {"X": rng.integers(-9, 9, (n, 301)).astype(np.float32)},
        _topk,
        rtol=0,
        atol=0,
    ),
    Case(
        "halves",
        "dtypes.cu",
        kernel_config(
            8,
            tensors("input", ("X", "FP16", "100")),
            tensors("output", ("Y", "FP16", "100")),
            parameter("kernels", "halves<<<ceil_div(X.size, 64), 64>>>(X, Y, X.size)"),
        ),
        lambda rng, n: {
            "X": (rng.standard_normal((n, 100)) * 10.0 ** rng.integers(-8, 4, (n, 100))).astype(np.float16)
        },
        lambda a: {"Y": a["X"] * np.float16(2)},
        rtol=0,
        atol=0,
    ),
    Case(
        "votes",
        "dtypes.cu",
        kernel_config(
            1,
            tensors("input", ("X", "INT32", "50")),
            tensors("output", ("Y", "INT32", "50")),
            parameter("kernels", "votes<<<1, 64>>>(X, Y, X.size)"),
        ),
        lambda rng, n: {"X": rng.integers(-1, 120, (1, 50)).astype(np.int32)},
        _votes,
        rtol=0,
        atol=0,
    ),
)


def _narrow_inputs(rng: np.random.Generator, n: int) -> Arrays:
    """All numbers of eight bits in every row (without the two that are none), times others."""
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    return {"X": np.tile(codes, (n, 1)), "W": rng.standard_normal((n, 254)).astype(ml_dtypes.bfloat16)}


def _narrow(a: Arrays) -> Arrays:
    product = a["X"].view(ml_dtypes.float8_e4m3fn).astype(np.float32) * a["W"].astype(np.float32)
    eight = np.clip(product, -57344.0, 57344.0).astype(ml_dtypes.float8_e5m2)
    return {"Y": eight.view(np.uint8), "Z": product.astype(ml_dtypes.bfloat16)}


# not of the family: JSON, which some tests of it send, has no BF16
NARROW = Case(
    "narrow",
    "narrow.cu",
    kernel_config(
        8,
        tensors("input", ("X", "UINT8", "254"), ("W", "BF16", "254")),
        tensors("output", ("Y", "UINT8", "254"), ("Z", "BF16", "254")),
        parameter("kernels", "narrow<<<ceil_div(X.size, 64), 64>>>(X, W, Y, Z, X.size)"),
    ),
    _narrow_inputs,
    _narrow,
    rtol=0,
    atol=0,
)
