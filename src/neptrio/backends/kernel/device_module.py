"""Compiled code on a GPU: loads modules, finds their kernels and asks the driver about kernels' parameters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from neptrio.backends.kernel.device import call
from neptrio.backends.kernel.signature import CType, Parameter, Signature
from neptrio.errors import Internal, InvalidArgument, Reason, TritonError

if TYPE_CHECKING:
    from neptrio.backends.kernel.model_spec import ModelSpec


LOG_BYTES = 8192  # of the driver's compiler


def load_module(code: bytes, what: str) -> Any:
    """Loads compiled code into the current context. Raises Internal with the driver's error and, for PTX that it
    could not compile or link, with its compiler's text."""
    from cuda.bindings import driver

    option = driver.CUjit_option
    log = bytearray(LOG_BYTES)
    error, module = driver.cuModuleLoadDataEx(
        code,
        2,
        [option.CU_JIT_ERROR_LOG_BUFFER, option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES],
        [log, len(log)],
    )
    if int(error):
        said = bytes(log).split(b"\0", 1)[0].decode(errors="replace").strip()
        lines = "\n".join(line for line in said.splitlines() if line.strip())
        raise Internal(
            f"{error.name} while loading {what}" + (f":\n{lines}" if lines else ""), reason=Reason.BACKEND
        )
    return module


def find_function(module: Any, name: str, what: str) -> Any:
    """A kernel by its name in the code, or by its C++ name. Raises InvalidArgument naming the kernels there are."""
    from cuda.bindings import driver

    error, function = driver.cuModuleGetFunction(module, name.encode())
    if not int(error):
        return function
    names = []
    try:
        total = call(driver.cuModuleGetFunctionCount(module), "listing kernels")
        for candidate in call(driver.cuModuleEnumerateFunctions(total, module), "listing kernels"):
            mangled = call(driver.cuFuncGetName(candidate), "listing kernels").decode()
            names.append(mangled)
            if mangled.startswith(f"_Z{len(name)}{name}"):
                return candidate
    except (AttributeError, TritonError):
        pass
    raise InvalidArgument(
        f"{what} has no kernel '{name}' (it has: {', '.join(names) or 'none that can be listed'})"
    )


def parameter_sizes(function: Any) -> list[int]:
    """The sizes in bytes of a compiled kernel's parameters, as the driver gives them."""
    from cuda.bindings import driver

    sizes: list[int] = []
    while True:
        error, *values = driver.cuFuncGetParamInfo(function, len(sizes))
        if int(error):
            return sizes
        sizes.append(int(values[1]))


def binary_signature(spec: ModelSpec, name: str, sizes: list[int]) -> Signature:
    """A signature made from compiled code, which tells only sizes: tensors need 8 bytes, scalars the value's type."""
    launch = next(launch for launch in spec.launches if launch.kernel == name)
    parameters = []
    for i, size in enumerate(sizes):
        tensor = i < len(launch.arguments) and launch.arguments[i].tensor is not None
        if tensor and size == 8:
            parameters.append(Parameter(f"argument {i}, 8 bytes", CType("void", 0, "v"), True, False))
        elif size in (1, 2, 4, 8):
            parameters.append(
                Parameter(f"argument {i}, {size} bytes", CType(f"{size} bytes", size, "x"), False, False)
            )
        else:
            parameters.append(Parameter(f"argument {i}, {size} bytes", None, False, False))
    return Signature(name, 0, tuple(parameters), False)


def read_code(path: Path) -> bytes:
    """The file's bytes; PTX, which is text, with the zero byte at its end that the driver needs."""
    code = path.read_bytes()
    return code + b"\0" if path.suffix == ".ptx" else code
