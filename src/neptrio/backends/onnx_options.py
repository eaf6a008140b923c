"""Sessions: providers, threads and the other options a model's configuration can set.

Parameters are those of Triton's backend (docs/onnx.md lists them). A value that cannot be used
fails the load; a key that is not known is left to whoever reads the same configuration.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from neptrio import accelerators
from neptrio.backends.base import LoadContext
from neptrio.errors import InvalidArgument, TritonError

# parameter -> attribute of SessionOptions
_COUNTS = {"intra_op_thread_count": "intra_op_num_threads", "inter_op_thread_count": "inter_op_num_threads"}
_SWITCHES = {"enable_mem_arena": "enable_cpu_mem_arena", "enable_mem_pattern": "enable_mem_pattern"}
_SPINNING = ("session.intra_op.allow_spinning", "session.inter_op.allow_spinning")
_ACCELERATORS = {
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
}


@cache
def providers() -> tuple[str, ...]:
    """The execution providers that can run here; CUDA only where there is a device."""
    import onnxruntime

    names = onnxruntime.get_available_providers()
    if not accelerators.gpus():
        names = [name for name in names if name not in ("CUDAExecutionProvider", "TensorrtExecutionProvider")]
    return tuple(names)


def model_path(context: LoadContext) -> Path:
    """The model's file (or the one inside a folder of that name). Raises InvalidArgument."""
    path = context.version_dir / (context.config.default_model_filename or "model.onnx")
    if path.is_dir():
        path = path / "model.onnx"
    if not path.is_file():
        raise InvalidArgument(f"unable to find '{path}' for model '{context.name}'")
    return path


def light_session(context: LoadContext) -> Any:
    """A session only good for looking at the model: no optimization, one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    _custom_operators(context, options)
    return _open(context, options, ["CPUExecutionProvider"])


def session(context: LoadContext, kind: str, device_id: int) -> Any:
    """The session of one instance. Raises InvalidArgument."""
    return _open(context, _options(context), _provider_list(context, kind, device_id))


def _open(context: LoadContext, options: Any, provider_list: list[Any]) -> Any:
    import onnxruntime

    path = model_path(context)
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=provider_list)
    except TritonError:
        raise
    except Exception as error:
        raise InvalidArgument(
            f"onnx runtime cannot load '{path}' of model '{context.name}': {error}"
        ) from error


def _options(context: LoadContext) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    parameters = {key: value.string_value for key, value in context.config.parameters.items()}
    settings = {**context.settings.backend_settings("onnxruntime"), **parameters}
    for key in _SPINNING:
        options.add_session_config_entry(key, "0")
    for key, attribute in _COUNTS.items():
        if key in settings:
            setattr(options, attribute, _integer(context, key, settings[key], 0))
    for key, attribute in _SWITCHES.items():
        if key in settings:
            setattr(options, attribute, bool(_integer(context, key, settings[key], 0, 1)))
    if "execution_mode" in settings:
        mode = _integer(context, "execution_mode", settings["execution_mode"], 0, 1)
        modes = onnxruntime.ExecutionMode
        options.execution_mode = modes.ORT_PARALLEL if mode else modes.ORT_SEQUENTIAL
    for key, value in settings.items():
        if key.startswith(("session.", "ep.", "mlas.", "optimization.")):
            options.add_session_config_entry(key, value)
    levels = onnxruntime.GraphOptimizationLevel
    level = context.config.optimization.graph.level
    chosen = {-1: levels.ORT_ENABLE_BASIC, 0: levels.ORT_ENABLE_ALL, 1: levels.ORT_ENABLE_EXTENDED}.get(level)
    if chosen is None:
        raise InvalidArgument(
            f"optimization.graph.level of model '{context.name}' must be -1 (basic), 0 (all) or 1 (extended), got {level}"
        )
    options.graph_optimization_level = chosen
    _custom_operators(context, options)
    return options


def _custom_operators(context: LoadContext, options: Any) -> None:
    for library in context.config.model_operations.op_library_filename:
        path = Path(library)
        path = path if path.is_absolute() else context.model_dir / path
        try:
            options.register_custom_ops_library(str(path))
        except Exception as error:
            raise InvalidArgument(
                f"model_operations of model '{context.name}': cannot load '{path}': {error}"
            ) from None


def _integer(context: LoadContext, key: str, text: str, low: int, high: int = 1 << 20) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise InvalidArgument(
            f"parameter '{key}' of model '{context.name}' must be an integer from {low} to {high}, got '{text}'"
        )
    return value


def _provider_list(context: LoadContext, kind: str, device_id: int) -> list[Any]:
    config = context.config
    accelerated = config.optimization.execution_accelerators
    chosen: list[Any] = []
    listed = accelerated.gpu_execution_accelerator if kind == "GPU" else accelerated.cpu_execution_accelerator
    for accelerator in listed:
        name = _ACCELERATORS.get(accelerator.name)
        if name is None or name not in providers():
            raise InvalidArgument(
                f"execution accelerator '{accelerator.name}' of model '{context.name}' is not available; this "
                f"onnxruntime has {', '.join(providers())}"
            )
        options = dict(accelerator.parameters)
        if kind == "GPU":
            options["device_id"] = str(device_id)
        chosen.append((name, options))
    if kind == "GPU" and not any(name == "CUDAExecutionProvider" for name, _ in chosen):
        if "CUDAExecutionProvider" not in providers():
            raise InvalidArgument(
                f"model '{context.name}' has an instance group of KIND_GPU, but this onnxruntime has no CUDA provider "
                f"(it has {', '.join(providers())}); install onnxruntime-gpu or use KIND_CPU"
            )
        chosen.append(("CUDAExecutionProvider", {"device_id": str(device_id)}))
    chosen.append("CPUExecutionProvider")
    return chosen
