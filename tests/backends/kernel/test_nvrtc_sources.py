"""What is given to NVRTC: names and folders. Needs neither NVRTC nor a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from neptrio.backends.kernel import nvrtc, source
from neptrio.errors import InvalidArgument

SOURCE = """
namespace other { __global__ void hidden(int* x) { x[0] = 1; } }
#if 0
__global__ void absent(int* x) { }
#endif
extern "C" __global__ void run(int* x) { x[0] = 2; }
"""


def test_only_launched_kernels_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC refuses names like `hidden` and `absent`, and with them the whole source."""
    (tmp_path / "model.cu").write_text(SOURCE)
    named: list[list[str]] = []

    def compiled(library: Any, text: str, where: str, options: Any, names: list[str], model: str) -> Any:
        named.append(names)
        return nvrtc.Compiled(b"code", {name: name for name in names})

    monkeypatch.setenv("NEPTRIO_KERNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "library", lambda: SimpleNamespace(nvrtcVersion=lambda: (0, 13, 0)))
    monkeypatch.setattr(nvrtc, "compile_text", compiled)
    read = source.read(tmp_path / "model.cu")
    assert set(read.signatures) == {"hidden", "absent", "run"}
    assert nvrtc.compile_source(read, (), "sm_90", "m", ["run"]).names == {"run": "run"}
    assert named == [["run"]]


@pytest.mark.parametrize("place", ["include", "include/cccl"])
def test_headers_are_found_where_packages_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    for header in ("include/cuda_fp16.h", "include/crt/mma.h", f"{place}/cuda/std/cstdint"):
        (tmp_path / header).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / header).touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert nvrtc.include_folders() == list(dict.fromkeys([str(tmp_path / "include"), str(tmp_path / place)]))


def test_headers_that_packages_lack_are_found_beside_nvcc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's packages have no crt/mma.h and no cuda/std; a toolkit may be anywhere, with links to its programs."""
    for header in (
        "packages/cu13/include/cuda_fp16.h",
        "toolkit/include/cuda_fp16.h",
        "toolkit/include/crt/mma.h",
        "toolkit/include/cccl/cuda/std/cstdint",
        "toolkit/bin/nvcc",
        "bin/here",
    ):
        (tmp_path / header).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / header).touch()
    (tmp_path / "toolkit/bin/nvcc").chmod(0o755)
    (tmp_path / "bin/nvcc").symlink_to(tmp_path / "toolkit/bin/nvcc")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    stand_in = SimpleNamespace(__path__=[str(tmp_path / "packages")])
    monkeypatch.setitem(sys.modules, "nvidia", stand_in)  # type: ignore[arg-type]
    monkeypatch.setattr(nvrtc, "toolkit", lambda: [])
    found = ["packages/cu13/include", "toolkit/include", "toolkit/include/cccl"]
    assert nvrtc.include_folders() == [str(tmp_path / folder) for folder in found]


def test_nvrtc_is_loaded_from_wherever_its_package_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuda-bindings does not look in folders of PYTHONPATH, where a machine without a network has its packages."""
    file = tmp_path / "cu13" / "lib" / "libnvrtc.so.13"
    file.parent.mkdir(parents=True)
    file.touch()
    loaded: list[str] = []

    def version() -> tuple[int, int, int]:
        if not loaded:
            raise RuntimeError("Failure finding\n  libnvrtc.so.13")
        return 0, 13, 5

    module = SimpleNamespace(nvrtcVersion=version)
    for name, stand_in in (
        ("cuda", SimpleNamespace()),
        ("cuda.bindings", SimpleNamespace(nvrtc=module)),
        ("nvidia", SimpleNamespace(__path__=[str(tmp_path)])),
    ):
        monkeypatch.setitem(sys.modules, name, stand_in)  # type: ignore[arg-type]
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", lambda path, mode: loaded.append(path))
    assert nvrtc.library() is module and loaded == [str(file)]
    loaded.clear()
    file.unlink()
    with pytest.raises(
        InvalidArgument, match=r"\(Failure finding libnvrtc\.so\.13\); install it with: pip install"
    ):
        nvrtc.library()


def test_headers_are_those_of_the_compiler_that_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside another CUDA of the machine: headers of one are not for the compiler of another."""
    for place in ("own", "other/cu13/include"):
        for header in ("cuda_fp16.h", "crt/mma.h", "cuda/std/cstdint"):
            (tmp_path / place / header).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / place / header).touch()
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    stand_in = SimpleNamespace(__path__=[str(tmp_path / "other")])
    monkeypatch.setitem(sys.modules, "nvidia", stand_in)  # type: ignore[arg-type]
    monkeypatch.setattr(nvrtc, "toolkit", lambda: [])
    assert nvrtc.include_folders() == [str(tmp_path / "other/cu13/include")]
    monkeypatch.setattr(nvrtc, "toolkit", lambda: [tmp_path / "own"])
    assert nvrtc.include_folders() == [str(tmp_path / "own")]


def test_the_text_of_an_error_comes_before_that_of_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    log = (
        b"".join(b"a.h(%d): warning #47-D: again\n" % i for i in range(20)) + b'm.cu(3): error: "x"\n  x\n\0'
    )

    def fill(program: Any, into: bytearray) -> None:
        into[: len(log)] = log

    result = SimpleNamespace(NVRTC_SUCCESS=0)
    fake = SimpleNamespace(
        nvrtcResult=result,
        nvrtcCreateProgram=lambda *_: (0, None),
        nvrtcCompileProgram=lambda *_: (6,),
        nvrtcGetProgramLogSize=lambda *_: (0, len(log)),
        nvrtcGetProgramLog=fill,
        nvrtcDestroyProgram=lambda *_: (0,),
    )
    with pytest.raises(InvalidArgument, match=r'compile for the GPU:\nm\.cu\(3\): error: "x"\n  x'):
        nvrtc.compile_text(fake, "", "m.cu", [], [], "m")
