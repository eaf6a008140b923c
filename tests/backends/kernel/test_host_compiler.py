"""The host build: what it refuses, what its errors say, and what it does with threads that wait."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from neptrio.backends.kernel import compile_options, host_compiler, source
from neptrio.errors import InvalidArgument
from tests.backends.kernel.family import HERE, kernel_config, parameter, tensors
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

CONFIG = kernel_config(
    0,
    tensors("input", ("X", "INT32", "64")),
    tensors("output", ("Y", "INT32", "64")),
    parameter("kernels", "run<<<1, 64>>>(X, Y)"),
    " instance_group { kind: KIND_CPU }",
)
HEAD = 'extern "C" __global__ void run(const int* x, int* y) {\n'


def written(tmp_path: Path, text: str) -> source.Source:
    (tmp_path / "model.cu").write_text(text)
    return source.read(tmp_path / "model.cu")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('asm("nop;");', "model.cu:2: inline PTX ('asm')"),
        ("auto b = cooperative_groups::this_grid();", "model.cu:2: cooperative groups"),
        ("y[0] = tex2D<int>(0, 0, 0);", "model.cu:2: textures"),
        ("run<<<1, 1>>>(x, y);", "model.cu:2: launching kernels from a kernel"),
        ("y[0] = __shfl(x[0], 0);", "model.cu:2: shuffles without _sync"),
    ],
)
def test_refused_with_the_line(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as info:
        host_compiler.compile_source(written(tmp_path, HEAD + body + "\n}\n"), (), "m")
    assert message in str(info.value) and "KIND_GPU" in str(info.value)


def test_words_in_comments_and_strings_are_not_refused(tmp_path: Path) -> None:
    text = (
        HEAD
        + '// asm, <<<\n/* tex2D */ const char* s = "asm";\n if (s) y[threadIdx.x] = x[threadIdx.x];\n}\n'
    )
    assert host_compiler.compile_source(written(tmp_path, text), (), "m").is_file()


def test_a_c_library_may_have_functions_that_cuda_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """glibc 2.41 declares sinpif() and cospif(), 2.42 rsqrt(): here every one has them."""
    names = ("rsqrt", "sinpi", "cospi", "normcdf")
    lines = [f"double {name}(double) noexcept; float {name}f(float) noexcept;" for name in names]
    (tmp_path / "newer.h").write_text("\n".join(['#include <cmath>\nextern "C" {', *lines, "}\n"]))
    monkeypatch.setenv("CXX", f"{host_compiler.compiler()[0]} -include {tmp_path / 'newer.h'}")
    calls = " + ".join(f"{name}f(x[0])" for name in names)
    made = host_compiler.compile_source(written(tmp_path, HEAD + f"y[0] = {calls};\n}}\n"), (), "m")
    assert made.is_file()


@pytest.mark.slow
def test_a_compile_error_has_the_sources_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as info:
        host_compiler.compile_source(written(tmp_path, HEAD + "\n    y[0] = undeclared;\n}\n"), (), "m")
    text = str(info.value)
    assert text.startswith("model 'm' does not compile for the host:\n")
    assert "model.cu:3:" in text and "undeclared" in text


@pytest.mark.slow
def test_an_error_in_a_header_of_ours_has_no_trail_of_includes(tmp_path: Path) -> None:
    text = "struct Wide { double a, b; };\n" + HEAD + "Wide w{}; y[0] = __shfl_sync(~0u, w, 0).a;\n}\n"
    with pytest.raises(InvalidArgument, match="a shuffle moves at most 8 bytes") as info:
        host_compiler.compile_source(written(tmp_path, text), (), "m")
    assert not re.search(r"included|^\s+from \S+$", str(info.value), re.MULTILINE)


@pytest.mark.slow
def test_a_stack_frame_too_large_for_a_fiber_is_a_load_error(tmp_path: Path) -> None:
    body = "volatile int big[20000]; big[x[0]] = 1; __syncthreads(); y[0] = big[x[1]];\n}\n"
    with pytest.raises(InvalidArgument, match="frame size"):
        host_compiler.compile_source(written(tmp_path, HEAD + body), (), "m")


def test_recursion_with_barriers_is_a_load_error(tmp_path: Path) -> None:
    text = (
        "__device__ int f(int n) { __syncthreads(); return n ? f(n - 1) : 0; }\n"
        + HEAD
        + "y[0] = f(x[0]);\n}\n"
    )
    with pytest.raises(InvalidArgument, match=r"model\.cu:2: kernel 'run' waits .* recursive function 'f'"):
        host_compiler.compile_source(written(tmp_path, text), (), "m")


def test_waiting_is_found_through_calls_and_macros(tmp_path: Path) -> None:
    found = written(
        tmp_path,
        "#define SYNC() __syncthreads()\n__device__ void a() { SYNC(); }\n__device__ void b() { a(); }\n"
        + HEAD
        + "b();\n}\n__global__ void plain(int* y) { y[0] = 1; }\n",
    )
    assert "run" in found.waiting and "plain" not in found.waiting


def test_plain_kernels_are_vectorised(tmp_path: Path) -> None:
    """The object code of an elementwise kernel uses packed arithmetic."""
    if os.uname().machine != "x86_64":
        pytest.skip("looks for x86 instructions")
    import subprocess

    text = HEAD + "int i = blockIdx.x * blockDim.x + threadIdx.x;\n if (i < 64) y[i] = x[i] + 3;\n}\n"
    made = host_compiler.compile_source(written(tmp_path, text), (), "m")
    listing = subprocess.run(["objdump", "-d", str(made)], capture_output=True, text=True, check=True).stdout
    assert "paddd" in listing


@pytest.mark.slow
def test_the_cache_is_keyed_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEPTRIO_KERNEL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "h.cuh").write_text("#define STEP 1\n")
    text = '#include "h.cuh"\n' + HEAD + "y[threadIdx.x] = x[threadIdx.x] + STEP;\n}\n"
    first = host_compiler.compile_source(written(tmp_path, text), (), "m")
    before = first.stat().st_mtime_ns
    assert host_compiler.compile_source(written(tmp_path, text), (), "other name") == first
    assert first.stat().st_mtime_ns == before
    (tmp_path / "h.cuh").write_text("#define STEP 2\n")
    second = host_compiler.compile_source(written(tmp_path, text), (), "m")
    third = host_compiler.compile_source(written(tmp_path, text), ("-DOTHER",), "m")
    assert len({first, second, third}) == 3
    assert sorted(p.suffix for p in (tmp_path / "cache").iterdir()) == [".so"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("how", ['"../params.h"', "<params.h>", '"link.h"', "PARAMS"])
def test_the_cache_knows_every_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Two models with one source and headers of their own, outside of the version's folder and through links."""
    monkeypatch.setenv("NEPTRIO_KERNEL_CACHE", str(tmp_path / "cache"))
    text = f"#define PARAMS <params.h>\n#include {how}\n" + HEAD + "y[0] = x[0] * FACTOR;\n}\n"
    made, read = [], []
    for name, factor in (("a", 2), ("b", 3), ("a", 4)):
        folder = tmp_path / name / "1"
        folder.mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "params.h").write_text(f"#define FACTOR {factor}\n")
        if not (folder / "link.h").exists():
            (folder / "link.h").symlink_to(tmp_path / name / "params.h")
        found = written(folder, text)
        made.append(host_compiler.compile_source(found, (f"-I{tmp_path / name}",), "m"))
        read.append(source.closure(found.path, [folder, tmp_path / name]))
    assert len(set(made)) == 3
    if how == "PARAMS":
        assert read == [None] * 3, "the GPU's compiler is asked again"
    else:
        assert len({tuple(r or ()) for r in read}) == 3


def test_options_are_translated() -> None:
    given = ("-DA=1", "-D", "B", "--define-macro=C", "--use_fast_math", "--maxrregcount=32", "--std=c++20")
    made = host_compiler.options(
        compile_options.checked(given, Path("/m/1"), Path("/m"), {}, "m"), Path("/m/1")
    )
    assert made[2:] == ["-DA=1", "-DB", "-DC", "-ffast-math", "-std=c++20"]


def test_folders_of_headers_lie_in_the_models_folder(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "out").symlink_to(tmp_path)

    def checked(*given: str, **settings: str) -> tuple[str, ...]:
        named = {key.replace("_", "-"): value for key, value in settings.items()}
        return compile_options.checked(given, folder / "1", folder, named, "m")

    assert checked("-I", "../include") == (f"-I{folder}/include",)
    assert checked(f"--include-path={folder}/1/own") == (f"-I{folder}/1/own",)
    assert checked(f"-I{tmp_path}/shared", allowed_directory=f"{tmp_path}/shared") == (
        f"-I{tmp_path}/shared",
    )
    two = os.pathsep.join((f"{tmp_path}/other", "", f"{tmp_path}/shared"))
    for place in ("other", "shared/below"):
        assert checked(f"-I{tmp_path}/{place}", allowed_directory=two) == (f"-I{tmp_path}/{place}",)
    with pytest.raises(InvalidArgument, match="--backend-config=kernel,allowed-directory=FOLDER names"):
        checked(f"-I{tmp_path}/third", allowed_directory=two)
    for outside in ("-I/etc", "-I../..", "-I../out", f"--include-path={tmp_path}/m2"):
        with pytest.raises(
            InvalidArgument, match=r"compile_options of model 'm': .* must lie in the model's folder"
        ):
            checked(outside)


def test_the_headers_of_cuda_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the compiler is given anyway; what lies beside them may not."""
    include = tmp_path / "cuda" / "include"
    (include / "cooperative_groups").mkdir(parents=True)
    (include / "cuda_fp16.h").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))

    def checked(folder: Path) -> tuple[str, ...]:
        return compile_options.checked((f"-I{folder}",), tmp_path / "m" / "1", tmp_path / "m", {}, "m")

    assert checked(include) == (f"-I{include}",)
    assert checked(include / "cooperative_groups") == (f"-I{include}/cooperative_groups",)
    for outside in (tmp_path / "cuda", include / "..", tmp_path):
        with pytest.raises(InvalidArgument, match="must lie in the model's folder"):
            checked(outside)


@pytest.mark.parametrize(
    "option",
    [
        "--time=/tmp/t",
        "--pre-include=/etc/passwd",
        "-include",
        "-fplugin=x.so",
        "--create-pch=f",
        "@file",
        "x.cu",
    ],
)
def test_options_that_reach_files_are_refused(option: str) -> None:
    with pytest.raises(InvalidArgument, match="is no option that a configuration may give"):
        compile_options.checked((option,), Path("/m/1"), Path("/m"), {}, "m")


def infer(client: httpclient.InferenceServerClient, model: str, values: np.ndarray) -> np.ndarray:
    tensor = httpclient.InferInput("X", [64], "INT32")
    tensor.set_data_from_numpy(values)
    return client.infer(model, [tensor]).as_numpy("Y")


@pytest.mark.slow
def test_faults_fail_their_requests_and_nothing_else(tmp_path: Path) -> None:
    bodies = {
        "deadlock": "if (threadIdx.x < 32) __syncthreads(); else __syncwarp(1u);\ny[threadIdx.x] = 1;\n}\n",
        "trap": "if (x[threadIdx.x] < 0) __trap();\ny[threadIdx.x] = x[threadIdx.x];\n}\n",
        "counter": "if (threadIdx.x == 0) atomicAdd(&calls, 1);\n__syncthreads();\ny[threadIdx.x] = calls;\n}\n",
    }
    for name, body in bodies.items():
        text = ("__device__ int calls = 0;\n" if name == "counter" else "") + HEAD + body
        write_model(tmp_path, name, CONFIG, {"1/model.cu": text})
    ones = np.ones(64, dtype=np.int32)
    with ServerProcess(tmp_path) as server, httpclient.InferenceServerClient(server.http) as client:
        with pytest.raises(InferenceServerException, match="threads of a block wait for each other for ever"):
            infer(client, "deadlock", ones)
        with pytest.raises(InferenceServerException, match="an assertion failed or __trap"):
            infer(client, "trap", -ones)
        np.testing.assert_array_equal(infer(client, "trap", ones), ones)
        with pytest.raises(InferenceServerException, match="threads of a block wait for each other for ever"):
            infer(client, "deadlock", ones)
        for i in range(1, 4):
            np.testing.assert_array_equal(infer(client, "counter", ones), ones * i)
        stats = client.get_inference_statistics("trap")["model_stats"][0]["inference_stats"]
        assert (stats["success"]["count"], stats["fail"]["count"]) == (1, 1)


@pytest.mark.slow
def test_instances_have_statics_of_their_own(tmp_path: Path) -> None:
    """Two instances of one model compute at once; shared memory must not be shared between them."""
    text = HEAD + (
        "__shared__ int tile[64];\n"
        "for (int round = 0; round < 2000; round++) { tile[threadIdx.x] = x[threadIdx.x] + round; __syncthreads();\n"
        "  y[threadIdx.x] = tile[63 - threadIdx.x] - round; __syncthreads(); }\n}\n"
    )
    config = CONFIG.replace("kind: KIND_CPU", "kind: KIND_CPU count: 2")
    write_model(tmp_path, "reverse", config, {"1/model.cu": text})
    with (
        ServerProcess(tmp_path) as server,
        httpclient.InferenceServerClient(server.http, concurrency=8) as client,
    ):
        values = [np.arange(64, dtype=np.int32) * (i + 1) for i in range(8)]
        pending = []
        for v in values:
            tensor = httpclient.InferInput("X", [64], "INT32")
            tensor.set_data_from_numpy(v)
            pending.append(client.async_infer("reverse", [tensor]))
        for v, result in zip(values, pending, strict=True):
            np.testing.assert_array_equal(result.get_result().as_numpy("Y"), v[::-1])


@pytest.mark.slow
def test_without_a_compiler_only_kernel_models_fail(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    write_model(repository, "identity", identity_config())
    write_model(repository, "kernel", CONFIG, {"1/model.cu": (HERE / "dtypes.cu").read_text()})
    config = (
        (repository / "kernel" / "config.pbtxt")
        .read_text()
        .replace("run<<<1, 64>>>(X, Y)", "votes<<<1, 64>>>(X, Y, 50)")
    )
    (repository / "kernel" / "config.pbtxt").write_text(config)
    env = {
        **os.environ,
        "CXX": str(tmp_path / "no-such-compiler"),
        "NEPTRIO_KERNEL_CACHE": str(tmp_path / "cache"),
    }
    with ServerProcess(repository, "--exit-on-error=false", env=env) as server:
        server.until_logged("no C++ compiler found (looked for")
        with httpclient.InferenceServerClient(server.http) as client:
            assert client.is_model_ready("identity") and not client.is_model_ready("kernel")


def test_vector_loads_from_any_place_in_a_request(tmp_path: Path) -> None:
    """A tensor starts wherever the JSON in front of it ends; a kernel reads it as what needs 16 bytes' alignment."""
    body = "((int4*)y)[threadIdx.x] = ((const int4*)x)[threadIdx.x];\n}\n"
    config = CONFIG.replace("run<<<1, 64>>>", "run<<<1, 16>>>")
    write_model(tmp_path, "wide", config, {"1/model.cu": HEAD + body})
    values = np.arange(64, dtype=np.int32)
    with ServerProcess(tmp_path) as server, httpclient.InferenceServerClient(server.http) as client:
        for n in range(1, 17):
            tensor = httpclient.InferInput("X", [64], "INT32")
            tensor.set_data_from_numpy(values)
            result = client.infer("wide", [tensor], request_id="i" * n).as_numpy("Y")
            np.testing.assert_array_equal(result, values)
