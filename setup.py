"""Builds the Cython modules of cext/ into the package neptrio._cext.

The sources live in cext/ at the top level, one concept per .pyx/.pxd pair. They cimport
each other by their installed name, so the build gives Cython a folder in which
neptrio/_cext is a link to cext/.

http2_nghttp2 and nghttp2_headers need libnghttp2 and its headers. Without them they are left out and
the server serves gRPC over h2 instead (slower, same behaviour).

The cuda_* modules need cuda-bindings and cuda.h at build time (no driver). Without them they are left
out and kernel models run on the host only.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
DEBUG = os.environ.get("NEPTRIO_CEXT_DEBUG") == "1"
JOBS = os.cpu_count() or 1
NGHTTP2_MODULES = {"http2_nghttp2", "nghttp2_headers"}
COMPILE_ARGS = ["-O0", "-g"] if DEBUG else ["-O3"]
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": False,
    "initializedcheck": DEBUG,
    "cdivision": True,
    "embedsignature": True,
    "freethreading_compatible": False,
}


def have_nghttp2() -> bool:
    """True when a C program can be compiled and linked against libnghttp2."""
    if os.environ.get("NEPTRIO_WITHOUT_NGHTTP2") == "1":
        return False
    cc = os.environ.get("CC", "cc").split()
    source = "#include <nghttp2/nghttp2.h>\nint main(void){return nghttp2_version(0)==0;}\n"
    try:
        done = subprocess.run(
            [*cc, "-x", "c", "-", "-o", os.devnull, "-lnghttp2"],
            input=source.encode(),
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return False
    return done.returncode == 0


def cuda_headers() -> str | None:
    """The folder of cuda.h, when the Cython declarations of cuda-bindings are there as well.

    Both come from PyPI: `cuda-bindings` and `nvidia-cuda-runtime` (extra `cuda`). No driver is needed.
    """
    if os.environ.get("NEPTRIO_WITHOUT_CUDA") == "1":
        return None
    try:
        bindings = importlib.util.find_spec("cuda.bindings")
    except ImportError:
        return None
    if bindings is None or not bindings.submodule_search_locations:
        return None
    if not (Path(bindings.submodule_search_locations[0]) / "cydriver.pxd").is_file():
        return None
    candidates = [Path(os.environ[v]) / "include" for v in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(v)]
    nvidia = importlib.util.find_spec("nvidia")
    for place in (nvidia.submodule_search_locations or []) if nvidia is not None else []:
        candidates += [*sorted(Path(place).glob("cu*/include")), Path(place) / "cuda_runtime" / "include"]
    candidates.append(Path("/usr/local/cuda/include"))
    for folder in candidates:
        if (folder / "cuda.h").is_file():
            return str(folder)
    return None


def cimport_folder() -> Path:
    """A folder in which `neptrio._cext` resolves to cext/, for Cython's cimport search."""
    base = ROOT / "build" / "cimport"
    package = base / "neptrio"
    shutil.rmtree(base, ignore_errors=True)
    package.mkdir(parents=True)
    (package / "__init__.pxd").touch()
    (package / "_cext").symlink_to(ROOT / "cext", target_is_directory=True)
    return base


def extensions() -> list[Extension]:
    found = []
    nghttp2 = have_nghttp2()
    if not nghttp2:
        print("libnghttp2 not found: gRPC will be served over h2 (slower)")
    headers = cuda_headers()
    if headers is None:
        print("cuda-bindings or cuda.h not found: kernel models will run on the host only")
    for source in sorted((ROOT / "cext").glob("*.pyx")):
        name = source.stem
        libraries = []
        if name in NGHTTP2_MODULES:
            if not nghttp2:
                continue
            libraries.append("nghttp2")
        include_dirs = [str(ROOT / "cext")]
        cuda = name.startswith("cuda_")
        if cuda:
            if headers is None:
                continue
            include_dirs.append(headers)
            if not (Path(headers) / "cudaProfiler.h").is_file():
                include_dirs.append(str(ROOT / "cext" / "stubs"))
        found.append(
            Extension(
                f"neptrio._cext.{name}",
                [str(source.relative_to(ROOT))],
                libraries=libraries,
                extra_compile_args=COMPILE_ARGS,
                include_dirs=include_dirs,
                language="c++" if cuda else None,
            )
        )
    return found


os.chdir(ROOT)
setup(
    ext_modules=cythonize(
        extensions(),
        include_path=[str(cimport_folder())],
        compiler_directives=DIRECTIVES,
        build_dir="build/cython",
        nthreads=JOBS,
    ),
    options={"build_ext": {"parallel": JOBS}},
)
