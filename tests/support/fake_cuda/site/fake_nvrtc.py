"""Those functions of NVRTC that backends/kernel/nvrtc.py calls. The "device code" they make is text for the fake driver
(module.c): it names the same source compiled for the host."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

from neptrio.backends.kernel import host_compiler, source
from neptrio.errors import TritonError


class nvrtcResult(enum.IntEnum):
    NVRTC_SUCCESS = 0
    NVRTC_ERROR_COMPILATION = 6


OK = nvrtcResult.NVRTC_SUCCESS


class Program:
    def __init__(self, name: str) -> None:
        self.name = name
        self.code = b""
        self.log = b""


def nvrtcVersion() -> tuple[Any, int, int]:
    return OK, 13, 0


def nvrtcCreateProgram(text: bytes, name: bytes, *_: Any) -> tuple[Any, Program]:
    return OK, Program(name.decode())


def nvrtcDestroyProgram(program: Program) -> tuple[Any]:
    return (OK,)


def nvrtcAddNameExpression(program: Program, name: bytes) -> tuple[Any]:
    return (OK,)


def nvrtcCompileProgram(program: Program, count: int, options: list[bytes]) -> tuple[Any]:
    given = [o.decode() for o in options]
    folder = next(o.split("=", 1)[1] for o in given if o.startswith("--include-path="))
    own = [o for o in given if not o.startswith(("--gpu-architecture", "--include-path", "-default-device"))]
    try:
        program.code = code_for(Path(folder) / program.name, tuple(own))
    except TritonError as error:
        program.log = str(error).encode()
        return (nvrtcResult.NVRTC_ERROR_COMPILATION,)
    return (OK,)


def code_for(path: Path, options: tuple[str, ...] = ()) -> bytes:
    """Text that the fake driver's cuModuleLoadData accepts."""
    read = source.read(path)
    compiled = host_compiler.compile_source(read, options, path.name)
    lines = ["neptrio fake module", f"object {compiled}"]
    for name, signature in read.signatures.items():
        if not signature.template:
            sizes = [f"{p.size}{'p' if p.pointer else ''}" for p in signature.parameters]
            lines.append(" ".join(["kernel", name, *sizes]))
    return "\n".join(lines).encode() + b"\n\0"


def nvrtcGetProgramLogSize(program: Program) -> tuple[Any, int]:
    return OK, len(program.log) + 1


def nvrtcGetProgramLog(program: Program, into: bytearray) -> tuple[Any]:
    into[: len(program.log)] = program.log
    return (OK,)


def nvrtcGetLoweredName(program: Program, name: bytes) -> tuple[Any, bytes]:
    return OK, name


def nvrtcGetCUBINSize(program: Program) -> tuple[Any, int]:
    return OK, len(program.code)


def nvrtcGetCUBIN(program: Program, into: bytearray) -> tuple[Any]:
    into[:] = program.code
    return (OK,)
