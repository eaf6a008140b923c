"""Compiled code on a GPU: loads modules, finds their kernels and asks the driver about kernels' parameters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from neptrio.backends.kernel.device import call
from neptrio.backends.kernel.signature import CType, Parameter, Signature
from neptrio.errors import InvalidArgument, TritonError

if TYPE_CHECKING:
    from neptrio.backends.kernel.config import ModelSpec


def load_module(code: bytes, what: str) -> Any:
    """Loads compiled code into the current context (cuModuleLoadData)."""
    from cuda.bindings import driver

    return call(driver.cuModuleLoadData(code), f"loading {what}")


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
