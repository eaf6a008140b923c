"""What a kernel model's configuration may say, checked against the source at load."""

from __future__ import annotations

from pathlib import Path

import pytest

from neptrio.backends.kernel import config as kernel_config
from neptrio.backends.kernel import source
from neptrio.backends.kernel.model_spec import ModelSpec
from neptrio.backends.kernel.signature import kernels
from neptrio.config import model_config as model_config
from neptrio.errors import InvalidArgument
from tests.backends.kernel.family import FAMILY, parameter, tensors
from tests.backends.kernel.family import kernel_config as config_text

SOURCE = """
#define REAL float
typedef unsigned int uint_type;
using index_type = long long;
/* __global__ void commented(int x) */
extern "C" __global__ void __launch_bounds__(128, 2)
scale(const REAL* __restrict__ x, REAL *y, index_type n, uint_type k, double f, bool flag) {}
template <class T> __global__ void generic(T* x) {}
static __global__ void ints(int const * const a, unsigned char* b, unsigned long long int c, short int s) {}
__global__ void nothing(void) { const char* s = "__global__ void fake(int y)"; }
"""
IO = (tensors("input", ("X", "FP32", "4")), tensors("output", ("Y", "FP32", "4")))


def load(launch: str, *extra: str, io: tuple[str, ...] = IO, text: str = SOURCE) -> ModelSpec:
    parsed = model_config.parse_text(
        config_text(8, *io, parameter("kernels", launch), *extra), "config.pbtxt"
    )
    parsed.name = "m"
    spec = kernel_config.read(parsed)
    spec.check(kernels(text, "model.cu"), "model.cu")
    return spec


def test_signatures() -> None:
    found = kernels(SOURCE, "model.cu")
    assert set(found) == {"scale", "generic", "ints", "nothing"}
    scale = found["scale"]
    assert scale.line == 6
    assert [(p.type.name if p.type else None, p.pointer, p.const) for p in scale.parameters] == [
        ("float", True, True),
        ("float", True, False),
        ("long long", False, False),
        ("unsigned int", False, False),
        ("double", False, False),
        ("bool", False, False),
    ]
    assert [(p.type.name if p.type else None, p.size) for p in found["ints"].parameters] == [
        ("int", 8),
        ("unsigned char", 8),
        ("unsigned long long", 8),
        ("short", 2),
    ]
    assert found["generic"].template and found["nothing"].parameters == ()


def test_a_right_one() -> None:
    spec = load(
        "scale<<<(ceil_div(X.size, 32), 2), (32, 1, 2), 16>>>(X, Y, X.size, 3, 0.5, 1);nothing<<<1,1>>>()"
    )
    plan = spec.plan([(8, 4)], 8, {"scale": 0, "nothing": 1}, kernels(SOURCE, "model.cu"))
    assert plan.launches_as_text() == [(0, (1, 2, 1), (32, 1, 2), 16, 6), (1, (1, 1, 1), (1, 1, 1), 0, 0)]


def test_blocks_that_run_together() -> None:
    extras = ", 16, cooperative, cluster(2, 1, 1)", ", cluster(X.shape[1] / 2), cooperative", ", cooperative"
    launches = "; ".join(f"nothing<<<(X.size, 2), 32{more}>>>()" for more in extras)
    spec = load(launches)
    order = {"nothing": 0}
    plan = spec.plan([(8, 4)], 8, order, kernels(SOURCE, "model.cu"))
    assert [shared for *_, shared, _ in plan.launches_as_text()] == [16, 0, 0]
    assert [launch.cooperative for launch in spec.launches] == [True, True, True]
    assert [len(launch.cluster) for launch in spec.launches] == [3, 1, 0]


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (
            "nothing<<<6, 32, 0, cluster(4)>>>()",
            "a grid of (6, 1, 1) blocks cannot be divided into clusters of (4, 1, 1)",
        ),
        ("nothing<<<16, 32, 0, cluster(16)>>>()", "cluster.x = 16 is 16, expected 1 to 8"),
        ("nothing<<<(4, 4), 32, 0, cluster(4, 4)>>>()", "a cluster has at most 8 blocks, got (4, 4, 1) = 16"),
        ("nothing<<<1, 32, cluster>>>()", "expected '(', got '>>>'"),
        ("nothing<<<1, 32, 0, 5>>>()", "expected 'cooperative' or 'cluster(x, y, z)', got '5'"),
    ],
)
def test_clusters_that_no_gpu_takes(launch: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as info:
        spec = load(launch)
        spec.plan([(8, 4)], 8, {"nothing": 0}, kernels(SOURCE, "model.cu"))
    assert message in str(info.value)


GOOD = "scale<<<1, 32>>>(X, Y, X.size, 3, 0.5, 1)"


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ("", "model 'm' has no parameter 'kernels'"),
        ("scal<<<1, 32>>>(X)", "launches kernel 'scal', which model.cu does not define (it defines: scale,"),
        ("generic<<<1, 32>>>(X)", "kernel 'generic' (model.cu:8) is a template"),
        (
            "scale<<<1, 32>>>(X, Y)",
            "kernel 'scale' (model.cu:6) takes 6 arguments, the config of model 'm' gives 2",
        ),
        (
            "scale<<<1, 32>>>(X, Y, X.size, Y, 0.5, 1)",
            "argument 3 ('uint_type k'): expected a scalar, got the tensor 'Y' (FP32)",
        ),
        (
            "scale<<<1, 32>>>(X, 3, 1, 1, 1, 1)",
            "argument 1 ('REAL *y'): expected a tensor, got the scalar '3'",
        ),
        (
            "scale<<<1, 32>>>(Y, X, 1, 1, 1, 1)",
            "argument 0 ('const REAL* __restrict__ x'): output 'Y' can't be written through a const pointer",
        ),
        (
            "ints<<<1, 32>>>(X, Y, 1, 1)",
            "argument 0 ('int const * const a'): expected 'int*' data, got input 'X' of type FP32 ('float*')",
        ),
        ("scale<<<1, 32>>>(X, Y, 1, 0.5, 1, 1)", "expected a whole number for 'uint_type k', got 0.5"),
        ("scale<<<1, 32>>>(X, Y, 1, -1, 1, 1)", "-1 does not fit 'uint_type k' (0 to 4294967295)"),
        ("scale<<<1, 2048>>>(X, Y, 1, 1, 1, 1)", "block.x = 2048 is 2048, expected 1 to 1024"),
        (
            "scale<<<1, (64, 64)>>>(X, Y, 1, 1, 1, 1)",
            "a block has at most 1024 threads, got (64, 64, 1) = 4096",
        ),
        ("scale<<<1, 0>>>(X, Y, 1, 1, 1, 1)", "block.x = 0 is 0, expected 1 to 1024"),
        ("scale<<<-1, 32>>>(X, Y, 1, 1, 1, 1)", "grid.x = -1 is -1, expected 0 to 2147483647"),
        ("scale<<<1, 32>>(X)", "unexpected character '>'"),
        ("scale<<<1, 32>>>(X, Y, 1, 1, 1, 1) nothing", "expected ';', got 'nothing'"),
        ("scale<<<(1, 2, 3, 4), 32>>>(X)", "expected at most 3 dimensions, got 4"),
        ("scale<<<1 / (batch - 1), 32>>>(X, Y, 1, 1, 1, 1)", "has no value for these shapes"),
    ],
)
def test_wrong_launches(launch: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as info:
        load(launch)
    assert message in str(info.value)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (parameter("shapes", "Y = [batch]"), "output 'Y' of model 'm' has 2 dimensions (the batch included)"),
        (
            parameter("shapes", "Y = [batch, 5]"),
            "the config's dims say [1, 4], the shape expression gives [1, 5]",
        ),
        (parameter("shapes", "Z = [batch]"), "parameter 'shapes' of model 'm' names 'Z', which is no output"),
        (parameter("shapes", "Y = [1, 4]; Y = [1, 4]"), "'Y' is given twice"),
        (parameter("scratch", "S = FLOAT[1]"), "expected a datatype such as FP32 or UINT8, got 'FLOAT'"),
        (parameter("scratch", "X = FP32[1]"), "two tensors named 'X'"),
        (parameter("scratch", "S = FP32[0 - 1]"), "the shape [-1] has a negative dimension"),
        (parameter("zero", "X"), "parameter 'zero' of model 'm' names 'X', which is no output or scratch"),
    ],
)
def test_wrong_parameters(extra: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as info:
        load(GOOD, extra)
    assert message in str(info.value)


@pytest.mark.parametrize(
    ("io", "message"),
    [
        (
            (tensors("input", ("X", "STRING", "4")), IO[1]),
            "kernels take tensors of fixed-size elements, got TYPE_STRING",
        ),
        ((IO[0], tensors("output", ("Y", "FP32", "-1"))), "parameter 'shapes' must say how large it is"),
        ((IO[0],), "must configure at least one input and one output"),
    ],
)
def test_wrong_tensors(io: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidArgument) as info:
        load(GOOD, io=io)
    assert message in str(info.value)


def test_the_file_is_named_when_it_is_missing(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    with pytest.raises(InvalidArgument, match=r"expected model\.cu or model\.ptx .* in 'm/1'"):
        source.find(tmp_path / "m" / "1")


def test_the_family_checks_out(tmp_path: Path) -> None:
    for case in FAMILY:
        folder = case.write(tmp_path)
        parsed = model_config.read(folder).config
        kernel_config.read(parsed).check(source.read(folder / "1" / "model.cu").signatures, "model.cu")
