"""Builds the Cython modules of cext/ into the packages of neptrio.

cext/ mirrors src/neptrio/: cext/scheduling/batch_queue.pyx becomes neptrio.scheduling.batch_queue, beside
the Python modules that use it. The sources cimport each other by their installed name, so the build gives
Cython a folder in which neptrio/ has those packages.

The nghttp2_* modules need libnghttp2 and its headers. Without them they are left out and
the server serves gRPC over h2 instead (slower, same behaviour).

The cuda_* modules need cuda-bindings and cuda.h at build time (no driver). Without them they are left
out and kernel models run on the host only.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CEXT = ROOT / "cext"
DEBUG = os.environ.get("NEPTRIO_CEXT_DEBUG") == "1"
JOBS = os.cpu_count() or 1
# with their names modules are three times as large; profilers and benchmarks/instructions.py want them
SYMBOLS = DEBUG or os.environ.get("NEPTRIO_SYMBOLS") == "1"
COMPILE_ARGS = ["-O0", "-g"] if DEBUG else ["-O2", "-g0"]
LINK_ARGS = [] if SYMBOLS or sys.platform != "linux" else ["-Wl,-s"]
# loops over elements gain from -O3; the rest is calls, takes a quarter longer to compile and gains nothing
LOOPS = {"codec/json_tensor", "codec/number_text", "backends/accumulate", "backends/kernel/host_batch"}
# tools/sanitized.py: the counters' object file. The sanitizers' library is preloaded, not linked.
SANITIZE = os.environ.get("NEPTRIO_CEXT_SANITIZE")
if SANITIZE:
    # left out: what AddressSanitizer or the processor finds as well, at a third of the compiler's time
    LEFT_OUT = "-fno-sanitize=null,object-size,pointer-overflow,vptr"
    COMPILE_ARGS = ["-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", LEFT_OUT]
    LINK_ARGS = []
# whose ways the fuzzers are to see
COVERED = ("codec/", "request/", "transport/", "backends/kernel/", "observe/element_text")
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": False,
    "initializedcheck": DEBUG,
    "cdivision": True,
    "embedsignature": True,
    "freethreading_compatible": False,
    "auto_pickle": False,  # nothing of ours is pickled; the code for it is a tenth of what is compiled
}


def builds(*flags: str) -> bool:
    """Whether every compiler that there is, for C and for C++, builds a program with these flags and has nothing to say."""
    source = b"#include <string.h>\nint main(int n, char **v) { char s[8]; memset(s, n, sizeof s); return s[n & 7] + !v; }\n"
    for variable, usual, language in (("CC", "cc", "c"), ("CXX", "c++", "c++")):
        words = (os.environ.get(variable) or sysconfig.get_config_var(variable) or usual).split()
        command = [*words, "-O2", "-Werror", *flags, "-x", language, "-", "-o", os.devnull]
        try:
            done = subprocess.run(command, input=source, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        except OSError:
            continue
        if done.returncode:
            return False
    return True


@cache
def hardening() -> tuple[list[str], list[str]]:
    """What makes a released module end where memory is overrun, as arguments for compiling and for linking.

    Left out: what a compiler does not know, all of it in builds for debuggers and sanitizers, which find more, and
    -fstack-protector-strong, which costs a small request 1.2 to 1.6 % of its instructions (these: 0.2 to 0.4 %).
    """
    if DEBUG or SANITIZE:
        return [], []
    compiling: list[str] = []
    for level in (3, 2):
        # some compilers bring a level of their own
        fortify = ["-U_FORTIFY_SOURCE", f"-D_FORTIFY_SOURCE={level}"]
        if builds(*fortify):
            compiling += fortify
            break
    if platform.machine().lower() in ("x86_64", "amd64") and builds("-fcf-protection"):
        compiling.append("-fcf-protection")
    linking = ["-Wl,-z,relro,-z,now"]
    return compiling, linking if sys.platform == "linux" and builds(*linking) else []


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
    compiler = shutil.which("nvcc")
    if compiler is not None:
        candidates.append(Path(compiler).resolve().parent.parent / "include")
    candidates.append(Path("/usr/local/cuda/include"))
    for folder in candidates:
        if (folder / "cuda.h").is_file():
            return str(folder)
    return None


def cimport_folder() -> Path:
    """A folder in which `neptrio.X` has the declarations of cext/X, for Cython's cimport search."""
    base = ROOT / "build" / "cimport"
    shutil.rmtree(base, ignore_errors=True)
    package = base / "neptrio"
    package.mkdir(parents=True)
    (package / "__init__.pxd").touch()
    for declarations in sorted(CEXT.rglob("*.pxd")):
        link = package / declarations.relative_to(CEXT)
        link.parent.mkdir(parents=True, exist_ok=True)
        for folder in link.relative_to(package).parents:
            (package / folder / "__init__.pxd").touch()
        link.symlink_to(declarations)
    return base


def extensions() -> list[Extension]:
    found = []
    nghttp2 = have_nghttp2()
    if not nghttp2:
        print("libnghttp2 not found: gRPC will be served over h2 (slower)")
    headers = cuda_headers()
    if headers is None:
        print("cuda-bindings or cuda.h not found: kernel models will run on the host only")
    for source in sorted(CEXT.rglob("*.pyx")):
        name = ".".join(source.relative_to(CEXT).with_suffix("").parts)
        libraries = []
        if source.name.startswith("nghttp2_"):
            if not nghttp2:
                continue
            libraries.append("nghttp2")
        covered = SANITIZE and str(source.relative_to(CEXT)).startswith(COVERED)
        coverage = ["-fsanitize-coverage=trace-pc,trace-cmp"] if covered else []
        include_dirs = [str(source.parent)] if any(source.parent.glob("*.h")) else []
        cuda = source.name.startswith("cuda_")
        if cuda:
            if headers is None:
                continue
            include_dirs.append(headers)
            if not (Path(headers) / "cudaProfiler.h").is_file():
                include_dirs.append(str(CEXT / "stubs"))
        found.append(
            Extension(
                f"neptrio.{name}",
                [str(source.relative_to(ROOT))],
                libraries=libraries,
                extra_compile_args=[
                    *COMPILE_ARGS,
                    *hardening()[0],
                    *(["-O3"] if name.replace(".", "/") in LOOPS and not (DEBUG or SANITIZE) else []),
                    *coverage,
                ],
                extra_objects=[SANITIZE] if SANITIZE and coverage else [],
                depends=[
                    *map(str, source.parent.glob("*.h")),
                    *([SANITIZE] if SANITIZE and coverage else []),
                ],
                extra_link_args=[*LINK_ARGS, *hardening()[1]],
                include_dirs=include_dirs,
                language="c++" if cuda else None,
            )
        )
    return found


class BuildPy(build_py):
    """Puts the example models that `neptrio demo` serves into the package."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "neptrio" / "demo_repository"
        shutil.rmtree(target, ignore_errors=True)
        for pattern in ("identity_*", "mean", "simple", "upper_case"):
            for model in sorted((ROOT / "examples" / "model_repository").glob(pattern)):
                shutil.copytree(model, target / model.name)


def have_cplusplus() -> bool:
    """True when a C++ program can be compiled and linked."""
    words = (os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++").split()
    source = b"#include <string>\nint main(int n, char **) { return int(std::to_string(n).size()) - 1; }\n"
    try:
        done = subprocess.run(
            [*words, "-std=c++17", "-x", "c++", "-", "-o", os.devnull],
            input=source,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return False
    return done.returncode == 0


def compiled_backends() -> list[Extension]:
    """The library that Triton's compiled backends are bound to: it has the name that they ask the loader for."""
    folder = CEXT / "backends" / "compiled"
    if sys.platform != "linux" or not have_cplusplus():
        print("no C++ compiler: Triton's compiled backends cannot be served")
        return []
    return [
        Extension(
            "neptrio.backends.compiled.abi",
            [str(source.relative_to(ROOT)) for source in sorted(folder.glob("*.cpp"))],
            depends=[*map(str, folder.glob("*.h")), str(folder / "exported.map")],
            extra_compile_args=["-std=c++17", "-fvisibility=hidden", *COMPILE_ARGS, *hardening()[0]],
            extra_link_args=[
                "-Wl,-soname,libtritonserver.so",
                f"-Wl,--version-script={(folder / 'exported.map').relative_to(ROOT)}",
                *LINK_ARGS,
                *hardening()[1],
            ],
            language="c++",
        )
    ]


def plain() -> list[Extension]:
    """Libraries without Python: they are built and installed like modules, and loaded with ctypes."""
    return [
        *compiled_backends(),
        Extension(
            "neptrio.rings.plain_ring",
            ["cext/rings/plain_ring.c"],
            depends=["cext/rings/words.h"],
            extra_compile_args=[*COMPILE_ARGS, *hardening()[0]],
            extra_link_args=[*LINK_ARGS, *hardening()[1]],
        ),
    ]


if __name__ == "__main__":  # processes that translate modules import this file
    os.chdir(ROOT)
    setup(
        cmdclass={"build_py": BuildPy},
        ext_modules=cythonize(
            extensions(),
            include_path=[str(cimport_folder())],
            compiler_directives=DIRECTIVES,
            build_dir="build/cython",
            nthreads=JOBS,
        )
        + plain(),
        options={"build_ext": {"parallel": JOBS}},
    )
