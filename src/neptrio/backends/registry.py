"""Which backend serves which model."""

from __future__ import annotations

from importlib import import_module

from neptrio.backends.base import Backend
from neptrio.errors import InvalidArgument

# backend name -> "module:class"; imported when the first model needs it
BUILT_IN = {
    "identity": "neptrio.backends.identity:IdentityBackend",
    "kernel": "neptrio.backends.kernel.backend:KernelBackend",
    "onnxruntime": "neptrio.backends.onnx:OnnxBackend",
    "python": "neptrio.backends.python:PythonBackend",
}


def find(name: str) -> type[Backend]:
    """The backend class of that name. Raises InvalidArgument when there is none."""
    target = BUILT_IN.get(name)
    if target is None:
        raise InvalidArgument(
            f"unable to find backend library for backend '{name}', try specifying runtime on the model "
            "configuration."
        )
    module, _, attribute = target.partition(":")
    found: type[Backend] = getattr(import_module(module), attribute)
    return found
