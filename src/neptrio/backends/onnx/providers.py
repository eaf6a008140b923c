"""Execution providers: which ones a session is asked to run on, with which options, and whether it does.

The problem: ONNX Runtime takes a provider that it cannot load (a library of CUDA or cuDNN is missing, of another version,
or the driver is too old) as a wish. It prints a line, runs the model on the CPU, and serves it ten times slower for as
long as nobody looks. The choices:

 1. CUDA's libraries are loaded beforehand from the packages that have them (preload_dlls), as users expect of pip.
 2. ONNX Runtime's own fallback is off, and a session that lacks a provider it was asked for makes the load fail, with the
    loader's reason. The CPU's provider stands behind the others, since single operators may have no other, unless
    the model says session.disable_cpu_ep_fallback.
 3. Options are written as in Triton's configurations and translated here. Unknown ones are refused: a misspelt
    precision would be served as another one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from neptrio.backends.onnx import library as onnx_library
from neptrio.config import accelerators, paths
from neptrio.config.code_fields import leads_to_files
from neptrio.errors import InvalidArgument
from neptrio.execution.backend import LoadContext

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
GPU_LIBRARIES = {CUDA: "libonnxruntime_providers_cuda.so", TENSORRT: "libonnxruntime_providers_tensorrt.so"}
ACCELERATORS = {"cuda": CUDA, "tensorrt": TENSORRT, "openvino": "OpenVINOExecutionProvider"}
# Triton's name of an option -> TensorRT's in ONNX Runtime; those that begin with trt_ have the same name in both
TENSORRT_NAMES = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
TENSORRT_SWITCHES = {
    "trt_int8_use_native_calibration_table", "trt_dla_enable", "trt_engine_cache_enable", "trt_dump_subgraphs",
    "trt_force_sequential_engine_build", "trt_context_memory_sharing_enable", "trt_layer_norm_fp32_fallback",
    "trt_timing_cache_enable", "trt_force_timing_cache", "trt_detailed_build_log", "trt_build_heuristics_enable",
    "trt_sparsity_enable", "trt_cuda_graph_enable", "trt_dump_ep_context_model",
}  # fmt: skip
TENSORRT_NUMBERS = {
    "trt_max_workspace_size", "trt_max_partition_iterations", "trt_min_subgraph_size", "trt_dla_core",
    "trt_builder_optimization_level", "trt_auxiliary_streams", "trt_ep_context_embed_mode",
}  # fmt: skip
PRECISIONS: dict[str, dict[str, str]] = {
    "FP32": {},
    "FP16": {"trt_fp16_enable": "True"},
    "INT8": {"trt_int8_enable": "True"},
}
# options of CUDA that Triton also reads among a model's parameters, and the words for the numbers that they take there
CUDA_CHOICES = {
    "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
}
CUDA_NUMBERS = {
    "gpu_mem_limit"
}  # ONNX Runtime's text for one that is none names another value than the one given
CUDA_PARAMETERS = (*CUDA_CHOICES, *sorted(CUDA_NUMBERS), "do_copy_in_default_stream")
# an entry of a session: operators that only the CPU's provider has fail the load
NO_CPU = "session.disable_cpu_ep_fallback"
# options that are read as addresses of memory or functions
ADDRESSES = {
    "user_compute_stream", "has_user_compute_stream", "gpu_external_alloc", "gpu_external_free",
    "gpu_external_empty_cache", "trt_onnx_bytestream", "trt_onnx_bytestream_size", "trt_user_compute_stream", "context",
}  # fmt: skip
# names of files in a folder that another option gives
FILE_NAMES = {"trt_int8_calibration_table_name", "trt_engine_cache_prefix"}
_SWITCH = {"1": "True", "true": "True", "0": "False", "false": "False"}


@cache
def available() -> tuple[str, ...]:
    """The execution providers that can be used here; those of GPUs only where there is one."""
    names = onnx_library.module().get_available_providers()
    if not accelerators.gpus():
        names = [name for name in names if name not in GPU_LIBRARIES]
    return tuple(names)


def chosen(context: LoadContext, kind: str, device_id: int, parameters: Mapping[str, str]) -> list[Any]:
    """The providers of a session for instances of this kind, in ONNX Runtime's form. Raises InvalidArgument.

    `parameters` are the model's, among which options of CUDA may be.
    """
    found: list[Any] = []
    on_gpu = kind == "GPU"
    for accelerator in _listed(context.config, kind):
        name = ACCELERATORS.get(accelerator.name)
        if name is None or name not in available():
            raise InvalidArgument(
                f"execution accelerator '{accelerator.name}' of model '{context.name}' is not available; this "
                f"onnxruntime has {', '.join(available())}"
            )
        found.append(
            (name, _kept_inside(context, accelerator, _options(name, accelerator.parameters, context.name)))
        )
    if on_gpu and not any(name == CUDA for name, _ in found):
        if CUDA not in available():
            raise InvalidArgument(
                f"model '{context.name}' has an instance group of KIND_GPU, but this onnxruntime has no CUDA provider "
                f"(it has {', '.join(available())}); {_remedy()}"
            )
        found.append((CUDA, {}))
    for name, options in found:
        if name == CUDA:
            given = {key: parameters[key] for key in CUDA_PARAMETERS if parameters.get(key)}
            options.update(_options(CUDA, {**given, **options}, context.name))
        if on_gpu:
            options["device_id"] = str(device_id)
    # with that entry ONNX Runtime takes no CPU provider from us, and has one of its own
    return found if on_gpu and parameters.get(NO_CPU) == "1" else [*found, CPU]


def examine(context: LoadContext, kind: str) -> None:
    """Raises InvalidArgument for options of accelerators that a session could not be made with."""
    for accelerator in _listed(context.config, kind):
        name = ACCELERATORS.get(accelerator.name)
        if name is not None:
            _kept_inside(context, accelerator, _options(name, accelerator.parameters, context.name))


def _listed(config: Any, kind: str) -> Any:
    listed = config.optimization.execution_accelerators
    return listed.gpu_execution_accelerator if kind == "GPU" else listed.cpu_execution_accelerator


def _kept_inside(context: LoadContext, accelerator: Any, options: dict[str, str]) -> dict[str, str]:
    """The options, paths in them absolute. Raises InvalidArgument for one that leads elsewhere, or is an address."""
    made = dict(options)
    for key, value in options.items():
        where = f"parameter '{key}' of execution accelerator '{accelerator.name}' of model '{context.name}'"
        if key in ADDRESSES:
            raise InvalidArgument(f"{where} is an address in memory, which no configuration may give")
        if key in FILE_NAMES:
            if "/" in value or "\0" in value:
                raise InvalidArgument(f"{where} must be a name without folders, got '{value}'")
        elif value and key not in TENSORRT_SWITCHES and leads_to_files(key):
            settings = context.settings.backend_settings("onnxruntime")
            made[key] = ";".join(
                str(paths.allowed(part, context.model_dir, context.model_dir, settings, where, "onnxruntime"))
                for part in value.split(";")
            )
    return made


def builds_engines(config: Any) -> bool:
    """True when instances on a GPU run on TensorRT."""
    listed = config.optimization.execution_accelerators.gpu_execution_accelerator
    return any(ACCELERATORS.get(accelerator.name) == TENSORRT for accelerator in listed)


def _options(provider: str, given: Mapping[str, str], model: str) -> dict[str, str]:
    """An accelerator's parameters as the options of its provider. Raises InvalidArgument."""
    if provider == CUDA:
        return {key: _cuda_option(key, value, model) for key, value in given.items()}
    if provider != TENSORRT:
        return dict(given)
    made: dict[str, str] = {}
    for key, value in given.items():
        where = f"parameter '{key}' of execution accelerator 'tensorrt' of model '{model}'"
        name = TENSORRT_NAMES.get(key, key)
        if key == "precision_mode":
            if value not in PRECISIONS:
                raise InvalidArgument(f"{where} must be one of {', '.join(PRECISIONS)}, got '{value}'")
            made.update(PRECISIONS[value])
        elif name in TENSORRT_SWITCHES:
            if value.lower() not in _SWITCH:
                raise InvalidArgument(f"{where} must be 1 or true, 0 or false, got '{value}'")
            made[name] = _SWITCH[value.lower()]
        elif name in TENSORRT_NUMBERS:
            try:
                made[name] = str(int(value))
            except ValueError:
                raise InvalidArgument(f"{where} must be an integer, got '{value}'") from None
        elif name.startswith("trt_"):
            made[name] = value
        else:
            known = ", ".join(sorted(["precision_mode", *TENSORRT_NAMES]))
            raise InvalidArgument(f"{where} is unknown; known are {known} and ONNX Runtime's trt_...")
    return made


def _cuda_option(key: str, value: str, model: str) -> str:
    if key in CUDA_NUMBERS and not value.isdecimal():
        raise InvalidArgument(f"'{key}' of model '{model}' must be an integer, got '{value}'")
    words = CUDA_CHOICES.get(key, ())
    if not words or value in words:
        return value
    if value.isdecimal() and int(value) < len(words):
        return words[int(value)]
    raise InvalidArgument(
        f"'{key}' of model '{model}' must be "
        + ", ".join(f"{number} ({word})" for number, word in enumerate(words))
        + f", got '{value}'"
    )


def on_gpu(providers: Iterable[Any]) -> bool:
    """True when one of the providers (chosen()) is a GPU's."""
    return any(_name(provider) in GPU_LIBRARIES for provider in providers)


def _name(provider: Any) -> str:
    return provider if isinstance(provider, str) else provider[0]


@cache
def preload() -> None:
    """Loads the libraries of CUDA and cuDNN that ONNX Runtime needs from their packages, once."""
    load = getattr(onnx_library.module(), "preload_dlls", None)
    if load is not None:
        load()


def verify(session: Any, providers: list[Any], model: str) -> None:
    """Raises InvalidArgument unless a session has every provider that it was asked for, on the device asked for."""
    have = session.get_providers()
    options = session.get_provider_options()
    for provider in providers:
        name = _name(provider)
        if name not in have:
            raise InvalidArgument(
                f"model '{model}' asks for {name}, and ONNX Runtime made a session without it (it has "
                f"{', '.join(have)}): {_why(name)}"
            )
        wanted = None if isinstance(provider, str) else provider[1].get("device_id")
        got = options.get(name, {}).get("device_id", wanted)
        if str(got) != str(wanted):
            raise InvalidArgument(
                f"model '{model}' asks for {name} on GPU {wanted}, and it runs on GPU {got}"
            )


def _why(name: str) -> str:
    """Why a provider's library does not load: what the system's loader says of it, and what helps."""
    folder = Path(onnx_library.module().__file__).parent / "capi"
    file = folder / GPU_LIBRARIES.get(name, "")
    said = ""
    if name in GPU_LIBRARIES and file.is_file():
        try:
            ctypes.CDLL(str(folder / "libonnxruntime_providers_shared.so"), ctypes.RTLD_GLOBAL)
            ctypes.CDLL(str(file))
        except OSError as error:
            said = f"{error}; "
    return said + _remedy()


def _remedy() -> str:
    return (
        onnx_library.doubled()
        or "onnxruntime-gpu[cuda,cudnn] in the place of onnxruntime has CUDA's libraries and cuDNN; TensorRT's are another "
        "package; or use KIND_CPU"
    )
