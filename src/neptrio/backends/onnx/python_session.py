"""A session of the Python module onnxruntime, with the same methods as session.OnnxSession.

The problem: onnxruntime's Python interface is made for numpy and copies inputs and outputs. The choice: inputs are
OrtValues that use their tensor's memory, and outputs are used where ONNX Runtime made them. OrtValues cannot hold
strings, so models with strings go through numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from neptrio import datatypes
from neptrio.backends.onnx import library as onnx_library
from neptrio.backends.onnx import model as onnx_model
from neptrio.backends.onnx import providers as onnx_providers
from neptrio.errors import InvalidArgument
from neptrio.request.infer_request import MemoryKind, Tensor, tensor_at
from neptrio.request.numpy_tensor import join_bytes, split_bytes

BF16_IN_ONNX = 16  # onnx.TensorProto.BFLOAT16
FATAL = 4
GPU = int(MemoryKind.GPU_MEMORY)
ERRORS = 3  # log level of sessions: errors only


def open_session(path: Path, options: Any, providers: list[Any]) -> PythonSession:
    """Makes a session with the options of an options.Options. Raises what onnxruntime raises."""
    onnxruntime = onnx_library.module()
    made = onnxruntime.SessionOptions()
    made.log_severity_level = ERRORS
    levels = onnxruntime.GraphOptimizationLevel
    made.graph_optimization_level = {
        0: levels.ORT_DISABLE_ALL,
        1: levels.ORT_ENABLE_BASIC,
        2: levels.ORT_ENABLE_EXTENDED,
        99: levels.ORT_ENABLE_ALL,
    }[options.level]
    if options.intra_threads is not None:
        made.intra_op_num_threads = options.intra_threads
    if options.inter_threads is not None:
        made.inter_op_num_threads = options.inter_threads
    if options.arena is not None:
        made.enable_cpu_mem_arena = options.arena
    if options.pattern is not None:
        made.enable_mem_pattern = options.pattern
    if options.parallel is not None:
        modes = onnxruntime.ExecutionMode
        made.execution_mode = modes.ORT_PARALLEL if options.parallel else modes.ORT_SEQUENTIAL
    for key, value in options.entries:
        made.add_session_config_entry(key, value)
    for library in options.libraries:
        try:
            made.register_custom_ops_library(str(library))
        except Exception as error:
            raise options.library_failure(library, error) from None
    if onnx_providers.on_gpu(providers):
        onnx_providers.preload()
    # without its fallback: a provider that fails would silently be replaced by the CPU's
    session = onnxruntime.InferenceSession(str(path), made, providers=providers, enable_fallback=0)
    session.disable_fallback()
    onnx_providers.verify(session, providers, options.model)
    return PythonSession(session)


class PythonSession:
    """One session; run() converts tensors to OrtValues and back."""

    def __init__(self, session: Any) -> None:
        import onnxruntime

        self._session = session
        # makes what a tensor on a GPU refers to, so that the value is freed where that may wait for the device
        self.hold: Callable[[Any], Any] = lambda value: value
        # a failed run would also be reported on the process's stderr, once per request
        self._quiet = onnxruntime.RunOptions()
        self._quiet.log_severity_level = FATAL
        self._new_value = onnxruntime.OrtValue.ortvalue_from_numpy
        self._new_typed_value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type
        self._inputs = {i.name for i in (*session.get_inputs(), *session.get_overridable_initializers())}
        self._datatypes = {o.name: onnx_model.datatype(o.type) for o in session.get_outputs()}
        types = [i.type for i in session.get_inputs()]
        self.strings = "tensor(string)" in types or datatypes.BYTES in self._datatypes.values()

    def get_inputs(self) -> Any:
        """The inputs that every request must have."""
        return self._session.get_inputs()

    def get_overridable_initializers(self) -> Any:
        """The inputs that have a default and may be left out."""
        return self._session.get_overridable_initializers()

    def get_outputs(self) -> Any:
        """The outputs."""
        return self._session.get_outputs()

    def close(self) -> None:
        """Drops the session."""
        self._session = None

    def run(
        self, names: list[str], tensors: list[Tensor], ready: Callable[[], object] | None = None
    ) -> list[Tensor]:
        """Runs the model and returns the named outputs. Inputs that the model does not have are ignored; `ready()` is
        called when the inputs are prepared. Raises what onnxruntime raises, and InvalidArgument for strings that are
        not UTF-8."""
        feeds = {t.name: self._feed(t) for t in tensors if t.name in self._inputs}
        if ready is not None:
            ready()
        if self.strings:
            results = self._session.run(names, feeds, self._quiet)
        else:
            results = _run(self._session, names, feeds, self._quiet)
        found = [self._tensor(name, result) for name, result in zip(names, results, strict=True)]
        return [_apart(output, tensors) for output in found]

    def run_bound(
        self,
        names: list[str],
        tensors: list[Tensor],
        ready: Callable[[], object],
        device: int,
        kept: set[str],
    ) -> list[Tensor]:
        """run() with IO binding: inputs in memory of GPU `device` are read where they lie, and outputs in `kept` are left
        in its memory. Not for models with strings. Raises what onnxruntime raises."""
        binding = self._session.io_binding()
        try:
            self._bind(binding, names, tensors, device, kept)
            ready()
            _run_bound(self._session, binding, self._quiet)
            found = [
                self._left(name, value, device) if name in kept else self._tensor(name, value)
                for name, value in zip(names, binding.get_outputs(), strict=True)
            ]
        finally:
            del binding  # here, and not with the traceback of a failure, which dies on the trio thread
        return [_apart(output, tensors) for output in found]

    def _bind(
        self, binding: Any, names: list[str], tensors: list[Tensor], device: int, kept: set[str]
    ) -> None:
        for t in tensors:
            if t.name not in self._inputs:
                continue
            if t.memory_kind == GPU:
                dtype: Any = BF16_IN_ONNX if t.dtype == datatypes.BF16 else datatypes.NUMPY[t.dtype]
                binding.bind_input(t.name, "cuda", t.memory_id, dtype, list(t.shape), t.address)
            else:
                binding.bind_ortvalue_input(t.name, self._feed(t))
        for name in names:
            if name in kept:
                binding.bind_output(name, "cuda", device)
            else:
                binding.bind_output(name)

    def _left(self, name: str, value: Any, device: int) -> Tensor:
        """An output in device memory, which ONNX Runtime frees with the tensor."""
        if value.device_name() == "cpu":
            return self._tensor(name, value)
        shape, size = tuple(value.shape()), value.tensor_size_in_bytes()
        held = self.hold(value)
        return tensor_at(name, self._datatypes[name], shape, value.data_ptr(), size, held, GPU, device)

    def _feed(self, tensor: Tensor) -> Any:
        """A tensor in the form in which ONNX Runtime takes inputs."""
        if tensor.dtype == datatypes.BYTES:
            array = np.empty(tensor.count(), dtype=object)
            array[:] = [decoded(tensor.name, element) for element in split_bytes(tensor)]
            return array.reshape(tensor.shape)
        dtype = np.dtype(np.uint16) if tensor.dtype == datatypes.BF16 else datatypes.NUMPY[tensor.dtype]
        if tensor.nbytes == 0:
            array = np.empty(tensor.shape, dtype)
        else:
            array = np.frombuffer(tensor, dtype)  # type: ignore[call-overload]  # it is a buffer
            array = array.reshape(tensor.shape)
        if tensor.address % dtype.itemsize != 0:
            # ONNX Runtime needs aligned memory; in a request's body a tensor may start at any byte
            array = array.copy()
        if tensor.dtype == datatypes.BF16:
            return self._new_typed_value(array, BF16_IN_ONNX)
        return array if self.strings else self._new_value(array)

    def _tensor(self, name: str, result: Any) -> Tensor:
        """A result as a tensor that uses the memory which ONNX Runtime made."""
        dtype = self._datatypes[name]
        if isinstance(result, np.ndarray):
            if dtype == datatypes.BYTES:
                return Tensor(name, dtype, tuple(result.shape), join_bytes(result.reshape(-1).tolist()))
            result = np.ascontiguousarray(result)
            return tensor_at(name, dtype, tuple(result.shape), result.ctypes.data, result.nbytes, result)
        if result.device_name() != "cpu":
            return self._tensor(name, result.numpy())
        shape = tuple(result.shape())
        return tensor_at(name, dtype, shape, result.data_ptr(), result.tensor_size_in_bytes(), result)


def _run(session: Any, names: list[str], feeds: dict[str, Any], options: Any) -> list[Any]:
    """session.run_with_ort_values, but without iterating over the vector of results.

    The end of such an iteration is a C++ exception, which takes several times as long as a small model.
    """
    inner = getattr(session, "_sess", None)
    if inner is None or not hasattr(inner, "run_with_ort_values"):
        return list(session.run_with_ort_values(names, feeds, options))
    import onnxruntime

    values = {name: value._get_c_value() for name, value in feeds.items()}
    made = inner.run_with_ort_values(values, names, options)
    return [onnxruntime.OrtValue(made[i]) for i in range(len(made))]


def _run_bound(session: Any, binding: Any, options: Any) -> None:
    """session.run_with_iobinding, but without its question for the graph of a run (since 1.31).

    The answer to it is a C++ exception as long as nobody has named one, which takes longer than a small model.
    """
    inner, bound = getattr(session, "_sess", None), getattr(binding, "_iobinding", None)
    if inner is None or bound is None or not hasattr(inner, "run_with_iobinding"):
        session.run_with_iobinding(binding, options)
    else:
        inner.run_with_iobinding(bound, options)


def _apart(output: Tensor, inputs: list[Tensor]) -> Tensor:
    """A copy of an output that shares memory with an input, because that memory belongs to the request."""
    if output.memory_kind == GPU:
        return output  # its addresses are no host's
    if (
        any(t.memory_kind != GPU and t.address <= output.address < t.address + t.nbytes for t in inputs)
        and output.nbytes
    ):
        return Tensor(output.name, output.dtype, output.shape, output.tobytes())
    return output


def decoded(name: str, element: bytes) -> str:
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"input '{name}' must hold UTF-8 strings for an ONNX model, got bytes that are not: {error}"
        ) from None
