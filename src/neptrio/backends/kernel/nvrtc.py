"""Compiles CUDA sources for GPUs with NVRTC, which needs neither a GPU nor a driver.

Compiled code is cached under the hash of the source, all that it may include, options, compiler version and architecture, beside the
host objects. NVRTC lacks the headers of the C library; the few that sources commonly include are provided here,
empty or with the part that kernels use.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neptrio import extras
from neptrio.backends.kernel import host_compiler
from neptrio.backends.kernel.source import Source, closure
from neptrio.errors import InvalidArgument

log = logging.getLogger("neptrio.kernel")

_INTS = """#pragma once
typedef signed char int8_t; typedef unsigned char uint8_t; typedef short int16_t; typedef unsigned short uint16_t;
typedef int int32_t; typedef unsigned int uint32_t; typedef long long int64_t; typedef unsigned long long uint64_t;
"""
# the C++ library (cuda/std/climits and others) defines the same values once more, in other words: no cause for a warning
_LIMITS = """#pragma once
#pragma nv_diag_suppress 47
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fffffff)
#endif
#ifndef FLT_MAX
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define DBL_MAX 1.7976931348623158e+308
#define DBL_MIN 2.2250738585072014e-308
#define DBL_EPSILON 2.2204460492503131e-16
#endif
#ifndef INT_MAX
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 4294967295u
#define LLONG_MAX 9223372036854775807ll
#endif
"""
HEADERS = {
    "stdint.h": _INTS,
    "cstdint": _INTS,
    "math.h": _LIMITS,
    "cmath": _LIMITS,
    "float.h": _LIMITS,
    "cfloat": _LIMITS,
    "limits.h": _LIMITS,
    "climits": _LIMITS,
    **dict.fromkeys(
        (
            "stdio.h",
            "cstdio",
            "stdlib.h",
            "cstdlib",
            "string.h",
            "cstring",
            "stddef.h",
            "cstddef",
            "assert.h",
            "cassert",
        ),
        "#pragma once\n",
    ),
    **dict.fromkeys(("cuda_runtime.h", "cuda.h", "device_launch_parameters.h"), "#pragma once\n"),
}


@dataclass(frozen=True)
class Compiled:
    """Device code, and the name of each kernel in that code."""

    code: bytes
    names: dict[str, str]


def library() -> Any:
    """The module cuda.bindings.nvrtc. Raises InvalidArgument that says what to install."""
    try:
        from cuda.bindings import nvrtc

        try:
            nvrtc.nvrtcVersion()
        except Exception:
            if not _load_beside_headers():
                raise
            nvrtc.nvrtcVersion()
    # the package or its library is missing: the error's type depends on the release
    except Exception as error:
        said = " ".join(str(error).split())
        raise InvalidArgument(
            f"NVRTC is not available ({said}); install it with: {extras.install('cuda')}"
        ) from None
    return nvrtc


def _load_beside_headers() -> bool:
    """Loads NVRTC from a package `nvidia` anywhere on sys.path, and returns whether there was one: cuda-bindings itself
    searches the environment's own folder only, and takes a library that is loaded already."""
    try:
        import nvidia
    except ImportError:
        return False
    for place in nvidia.__path__:
        for file in sorted(Path(place).glob("cu*/lib/libnvrtc.so.*")):
            try:
                ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)
            except OSError:
                continue
            return True
    return False


def toolkit() -> list[Path]:
    """The folder of headers beside the NVRTC that is loaded: where there are several CUDAs, the compiler's own. Empty
    where that is not known."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        file = load_nvidia_dynamic_lib("nvrtc").abs_path
    except Exception:
        return []
    return [Path(file).resolve().parent.parent / "include"] if file else []


def include_folders() -> list[str]:
    """The folders with CUDA's headers: those of one toolkit (cuda_fp16.h), and where that lacks them, of the packages
    that hold tensor core headers (crt/mma.h) and the C++ library (cuda/std), which lies in a folder `cccl`."""
    found = [Path(os.environ[v]) / "include" for v in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(v)]
    found += toolkit()
    try:
        import nvidia

        for place in nvidia.__path__:
            found += [*sorted(Path(place).glob("cu*/include")), Path(place) / "cuda_runtime" / "include"]
            found += [Path(place) / name / "include" for name in ("cuda_crt", "cuda_cccl")]
    except ImportError:
        pass
    compiler = shutil.which("nvcc")
    if compiler is not None:
        found.append(Path(compiler).resolve().parent.parent / "include")
    found.append(Path("/usr/local/cuda/include"))
    found += [folder / "cccl" for folder in found]
    chosen: list[Path] = []
    for header in ("cuda_fp16.h", "crt/mma.h", "cuda/std/cstdint"):
        if not any((folder / header).is_file() for folder in chosen):
            chosen += [folder for folder in found if (folder / header).is_file()][:1]
    return [str(folder) for folder in chosen]


def compile_source(
    source: Source,
    compile_options: tuple[str, ...],
    architecture: str,
    model: str,
    launched: Sequence[str] | None = None,
) -> Compiled:
    """Device code for an architecture such as "sm_90", with the names of the `launched` kernels, or of all.

    Kernels that are not launched are not named to the compiler: it refuses names that mean several functions or none
    (overloads, a namespace, `#if 0`). Raises InvalidArgument with the compiler's text.
    """
    nvrtc = library()
    _, major, minor = nvrtc.nvrtcVersion()
    main = source.files[0]
    here = f"--include-path={source.path.parent}"
    options = [
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        "-default-device",
        here,
        *(f"--include-path={folder}" for folder in include_folders()),
    ]
    given = list(compile_options)
    if any(o.startswith(("--std", "-std")) for o in given):
        options.remove("--std=c++17")
    options += given
    names = [
        name
        for name, signature in source.signatures.items()
        if not signature.template and (launched is None or name in launched)
    ]
    text = f'#include "math.h"\n#include "stdint.h"\n#line 1 "{main.name}"\n{main.text}\n'
    own = [source.path.parent, *(Path(o.removeprefix("-I")) for o in given if o.startswith("-I"))]
    read = closure(source.path, own)
    key = host_compiler._fingerprint(
        [
            text.encode(),
            *(read or ()),
            "\0".join(o for o in options if o != here and not o.startswith("-I")).encode(),
            json.dumps([names, HEADERS, major, minor]).encode(),
        ]
    )
    folder = host_compiler.cache_dir()
    target = folder / f"{key}.cubin"
    try:
        if read is None:
            raise ValueError("nobody knows what it includes")
        head, code = target.read_bytes().split(b"\n", 1)
        return Compiled(code, json.loads(head))
    except (OSError, ValueError):
        pass
    made = compile_text(nvrtc, text, main.name, options, names, model)
    if read is None:
        return made
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix="build-", dir=folder)
        with os.fdopen(descriptor, "wb") as out:
            out.write(json.dumps(made.names).encode() + b"\n" + made.code)
        os.replace(temporary, target)
    except OSError as error:
        log.warning("the compiled kernels of %s could not be cached: %s", model, error)
    return made


def compile_text(
    nvrtc: Any, text: str, where: str, options: list[str], names: list[str], model: str
) -> Compiled:
    headers = [content.encode() for content in HEADERS.values()]
    error, program = nvrtc.nvrtcCreateProgram(
        text.encode(), where.encode(), len(headers), headers, [name.encode() for name in HEADERS]
    )
    _check(nvrtc, error, model)
    try:
        for name in names:
            _check(nvrtc, nvrtc.nvrtcAddNameExpression(program, name.encode())[0], model)
        encoded = [o.encode() for o in options]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            _, size = nvrtc.nvrtcGetProgramLogSize(program)
            said = bytearray(size)
            nvrtc.nvrtcGetProgramLog(program, said)
            lines = [
                line for line in said.decode(errors="replace").strip("\0\n").splitlines() if line.strip()
            ]
            first = next(
                (i for i, line in enumerate(lines) if "error" in line), 0
            )  # warnings may come before
            lines = lines[first:]
            raise InvalidArgument(f"model '{model}' does not compile for the GPU:\n" + "\n".join(lines[:12]))
        lowered = {}
        for name in names:
            error, low = nvrtc.nvrtcGetLoweredName(program, name.encode())
            _check(nvrtc, error, model)
            lowered[name] = low.decode()
        error, size = nvrtc.nvrtcGetCUBINSize(program)
        _check(nvrtc, error, model)
        code = bytearray(size)
        _check(nvrtc, nvrtc.nvrtcGetCUBIN(program, code)[0], model)
        return Compiled(bytes(code), lowered)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _check(nvrtc: Any, error: Any, model: str) -> None:
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise InvalidArgument(f"model '{model}' does not compile for the GPU: {error.name}")
