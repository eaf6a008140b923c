"""An ONNX Runtime with a CUDA provider, on the fake driver: what the server calls of the Python module, and no more.

It computes Y = X + 1, or for models with an input BEFORE, Y = AFTER = BEFORE + X. What it is asked to do is written as
lines of JSON to the file FAKE_ORT_LOG. FAKE_ORT_LACKS names a provider whose library is to fail; as the real one it then
runs without. An element -N of X up to -100 makes it answer as if CUDA's error N had come.

With an element -2 of X a run hangs until somebody writes to the pipe `run` in the folder FAKE_ORT_LATCHES. While there is
a pipe `release`, the release of a session on a GPU hangs in the same way. What is freed on the process's first thread, which
is the server's loop, is told in the log as `on_the_loop`: a device could keep it waiting there.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from neptrio.backends.onnx import signature

CPU = "CPUExecutionProvider"
TYPES = {"tensor(int32)": np.dtype(np.int32), "tensor(float)": np.dtype(np.float32)}


def note(**said: Any) -> None:
    with open(os.environ["FAKE_ORT_LOG"], "a") as file:
        file.write(json.dumps(said) + "\n")


def latch(name: str) -> None:
    """Waits as long as nobody writes to that pipe, if there is one."""
    pipe = Path(os.environ.get("FAKE_ORT_LATCHES", "/nowhere"), name)
    if pipe.exists():
        note(hangs=name)
        pipe.read_bytes()
        note(goes_on=name)


def freed(what: str) -> None:
    if threading.current_thread() is threading.main_thread():
        note(on_the_loop=what)


def get_available_providers() -> list[str]:
    return ["TensorrtExecutionProvider", "CUDAExecutionProvider", CPU]


def preload_dlls() -> None:
    note(preloaded=True)


class GraphOptimizationLevel:
    ORT_DISABLE_ALL, ORT_ENABLE_BASIC, ORT_ENABLE_EXTENDED, ORT_ENABLE_ALL = 0, 1, 2, 99


class ExecutionMode:
    ORT_SEQUENTIAL, ORT_PARALLEL = 0, 1


class RunOptions:
    log_severity_level = 2


class SessionOptions:
    def add_session_config_entry(self, key: str, value: str) -> None:
        pass


class Device:
    """The memory of one GPU through the driver's synchronous calls, kept for the next value as an arena does."""

    def __init__(self, number: int) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.number = number
        self.context = ctypes.c_void_p()
        self.idle: list[tuple[int, int]] = []
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), number)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.cuda, name)(*arguments)
        if status:
            raise RuntimeError(f"CUDA failure {status}: {name}")

    def enter(self) -> None:
        self._call("cuCtxSetCurrent", self.context)

    def read(self, address: int, shape: Any, dtype: np.dtype) -> np.ndarray:
        array = np.empty(shape, dtype)
        if array.nbytes:
            self.enter()
            size = ctypes.c_size_t(array.nbytes)
            self._call("cuMemcpyDtoH", ctypes.c_void_p(array.ctypes.data), ctypes.c_uint64(address), size)
        return array

    def write(self, array: np.ndarray) -> OrtValue:
        self.enter()
        found = next((block for block in self.idle if block[1] >= array.nbytes), None)
        if found is not None:
            self.idle.remove(found)
        else:
            address = ctypes.c_uint64()
            self._call("cuMemAlloc", ctypes.byref(address), ctypes.c_size_t(max(array.nbytes, 256)))
            found = address.value, max(array.nbytes, 256)
        size = ctypes.c_size_t(array.nbytes)
        self._call("cuMemcpyHtoD", ctypes.c_uint64(found[0]), ctypes.c_void_p(array.ctypes.data), size)
        return OrtValue(array, self, found)

    def __del__(self) -> None:
        freed("a session")
        latch("release")
        self.enter()
        for address, _ in self.idle:
            self._call("cuMemFree", ctypes.c_uint64(address))
        self._call("cuDevicePrimaryCtxRelease", self.number)


class OrtValue:
    """A tensor; on a GPU its bytes are at `block`, and the array here tells its shape only."""

    def __init__(
        self, array: np.ndarray, device: Device | None = None, block: tuple[int, int] = (0, 0)
    ) -> None:
        self.array, self.device, self.block = array, device, block

    @staticmethod
    def ortvalue_from_numpy(array: np.ndarray) -> OrtValue:
        return OrtValue(array)

    ortvalue_from_numpy_with_onnx_type = None

    def device_name(self) -> str:
        return "cuda" if self.device else "cpu"

    def shape(self) -> list[int]:
        return list(self.array.shape)

    def data_ptr(self) -> int:
        return self.block[0] if self.device else self.array.ctypes.data

    def tensor_size_in_bytes(self) -> int:
        return self.array.nbytes

    def __del__(self) -> None:
        if self.device is not None:
            freed("a tensor")
            self.device.idle.append(self.block)  # no call of the driver: values die on any thread


class Binding:
    def __init__(self, session: InferenceSession) -> None:
        self.session = session
        self.inputs: dict[str, np.ndarray] = {}
        self.outputs: dict[str, str] = {}
        self.made: list[OrtValue] = []
        self.said: dict[str, str] = {}

    def __del__(self) -> None:
        freed("a binding")

    def bind_input(
        self, name: str, kind: str, device: int, dtype: Any, shape: list[int], address: int
    ) -> None:
        assert kind == "cuda" and device == self.session.device.number and address % 256 == 0
        self.inputs[name] = self.session.device.read(address, shape, np.dtype(dtype))
        self.said[name] = "cuda"

    def bind_ortvalue_input(self, name: str, value: OrtValue) -> None:
        self.inputs[name] = value.array
        self.said[name] = "cpu"

    def bind_output(self, name: str, kind: str = "cpu", device: int = 0) -> None:
        self.outputs[name] = self.said[name] = kind

    def get_outputs(self) -> list[OrtValue]:
        return self.made


class InferenceSession:
    def __init__(self, path: str, options: Any, providers: list[Any], enable_fallback: int = 1) -> None:
        assert enable_fallback == 0
        self.signature = signature.read(__import__("pathlib").Path(path))
        note(providers=providers)
        lacks = os.environ.get("FAKE_ORT_LACKS", "")
        asked = [(p, {}) if isinstance(p, str) else p for p in providers]
        self.asked = {name: given for name, given in asked if name != lacks}
        number = next((int(given["device_id"]) for given in self.asked.values() if given), None)
        self.device: Any = None if number is None else Device(number)

    def get_providers(self) -> list[str]:
        return list(self.asked)

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        return self.asked

    def disable_fallback(self) -> None:
        pass

    def get_inputs(self) -> Any:
        return self.signature.get_inputs()

    def get_overridable_initializers(self) -> Any:
        return self.signature.get_overridable_initializers()

    def get_outputs(self) -> Any:
        return self.signature.get_outputs()

    def io_binding(self) -> Binding:
        return Binding(self)

    def _computed(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        least = int(inputs["X"].min(initial=0))
        if least == -2:
            latch("run")
        if least <= -100:
            raise RuntimeError(
                f"CUDA failure {-least}: an error ; GPU={self.device.number} ; hostname=here ; file=f ; line=1"
            )
        return inputs["X"] + (inputs["BEFORE"] if "BEFORE" in inputs else np.int32(1))

    def run_with_iobinding(self, binding: Binding, options: Any) -> None:
        note(bound=binding.said)
        found = self._computed(binding.inputs)
        for kind in binding.outputs.values():
            binding.made.append(self.device.write(found) if kind == "cuda" else OrtValue(found.copy()))

    def run_with_ort_values(
        self, names: list[str], feeds: dict[str, OrtValue], options: Any
    ) -> list[OrtValue]:
        note(plain=sorted(feeds))
        found = self._computed({name: value.array for name, value in feeds.items()})
        return [OrtValue(found.copy()) for _ in names]
