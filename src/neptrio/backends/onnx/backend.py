"""The onnxruntime backend: loads ONNX models.

The problem: ONNX Runtime executes well, but what surrounds it (Python objects, copies, changes of threads, thread
pools that spin on cores which the event loop needs) may cost more than a small model itself. The choices:

 1. Sessions are made with ONNX Runtime's C library where possible, otherwise with its Python module (library.py
    says when). Everything below is the same for both.
 2. Batches of C sessions that need no Python are executed without the GIL, and on the trio thread when they take
    microseconds (cext/backends/onnx/batch). Strings, ragged inputs, batch inputs and batch outputs need Python:
    such models go through execute(), and only the session's run itself is without the GIL.
 3. The inputs of a lone request are its own memory, those of several requests one gathered buffer. Outputs are the
    memory that ONNX Runtime made, divided by rows without a copy. Only BYTES tensors are converted.
 4. Threads that wait for work sleep instead of spinning, unless the model's parameter
    session.intra_op.allow_spinning says otherwise; docs/onnx.md explains the trade-off.
 5. Sessions on a GPU run on the provider that was asked for, or the load fails (providers.py); tensors stay on the
    device between models there (device_instance.py).
 6. Only outputs that some request of the batch wants are computed.
 7. Requests that cannot share a batch (different inputs, or different sizes other than of the batch dimension)
    are executed one after the other, never mixed.
 8. Instances on the CPU run one session together where the configuration allows it (config/session_sharing.py).

model.py says what a configuration may leave open and how it must agree with the model, options.py which parameters
there are.
"""

from __future__ import annotations

from collections.abc import Callable

from neptrio.backends import own_process
from neptrio.backends.onnx import model as onnx_model
from neptrio.backends.onnx import options as onnx_options
from neptrio.backends.onnx import providers as onnx_providers
from neptrio.backends.onnx import signature as onnx_signature
from neptrio.backends.onnx.instance import NativeInstance, OnnxInstance, needs_python
from neptrio.backends.onnx.shared_session import SharedSession
from neptrio.config import accelerators, time_limits
from neptrio.errors import InvalidArgument
from neptrio.execution.backend import Backend, BackendInstance, LoadContext
from neptrio.execution.layout import Layout

# how long an execution on a GPU may take where the model does not say
EXECUTE_SECONDS = 300.0
BUILD_SECONDS = 3600.0  # with TensorRT, which builds an engine in a run whose shapes are new


class OnnxBackend(Backend):
    """One loaded version of an ONNX model."""

    platform = "onnxruntime_onnx"
    default_model_filename = "model.onnx"
    default_cpu_instances = 2

    def __init__(self, context: LoadContext) -> None:
        super().__init__(context)
        self._shared = SharedSession(lambda: onnx_options.session(context, "CPU", 0))

    @classmethod
    def runs_on_gpu(cls) -> bool:
        return bool(accelerators.gpus()) and onnx_providers.CUDA in onnx_providers.available()

    @classmethod
    def auto_complete(cls, context: LoadContext) -> None:
        """Fills in inputs, outputs, max_batch_size and dynamic batching from the model. Raises InvalidArgument."""
        config = context.config
        tensors = (*config.input, *config.output)
        if config.input and config.output and all(onnx_model.complete(t) for t in tensors):
            return
        session = onnx_options.light_session(context)
        try:
            found = onnx_signature.ranked(session, onnx_options.model_path(context))
            onnx_model.auto_complete(config, found, context.settings.backend_settings("onnxruntime"))
        finally:
            session.close()

    @classmethod
    def complete_from_files(cls, context: LoadContext) -> bool:
        signature = onnx_signature.read(onnx_options.model_path(context))
        if signature.complete:
            onnx_model.auto_complete(
                context.config, signature, context.settings.backend_settings("onnxruntime")
            )
        return signature.complete

    @classmethod
    def examine(cls, context: LoadContext, report: Callable[[str], None]) -> None:
        own_process.examine(context)
        try:
            signature = onnx_signature.read(onnx_options.model_path(context))
        except InvalidArgument:
            return  # complete_from_files() has reported it
        Layout(context.config)
        onnx_options.examine(context)
        for difference in onnx_model.differences(context.config, signature):
            report(difference)
        for file in signature.external:
            if not (context.version_dir / file).is_file():
                report(
                    f"weights of model '{context.name}' are in '{file}', which is not beside the model's file"
                )

    def load(self) -> None:
        """Checks that the file exists. Sessions are made by the instances, in parallel."""
        onnx_options.model_path(self.context)
        # loads the library here, so that it is not loaded on the trio thread
        onnx_options.is_native(self.context, "CPU")

    @property
    def own_processes(self) -> bool:  # type: ignore[override]
        return own_process.wanted(self.context)

    def create_instance(self, name: str, kind: str, device_id: int) -> BackendInstance:
        seconds = time_limits.execute_seconds(self.context.config, self.context.name)
        if kind == "GPU" and seconds is None:
            seconds = BUILD_SECONDS if onnx_providers.builds_engines(self.context.config) else EXECUTE_SECONDS
        if self.own_processes:
            from neptrio.backends.own_process.instance import own_process_instance

            return own_process_instance(self, name, kind, device_id, 1, seconds)
        native = onnx_options.is_native(self.context, kind)
        shared = self._shared if native and onnx_options.shares_session(self.context) else None
        if native and not needs_python(self.context.config):
            return NativeInstance(self.context, name, kind, device_id, shared)
        if kind == "GPU":
            from neptrio.backends.onnx.device_instance import DeviceInstance

            assert seconds is not None
            return DeviceInstance(self.context, name, kind, device_id, seconds)
        return OnnxInstance(self.context, name, kind, device_id, shared)
