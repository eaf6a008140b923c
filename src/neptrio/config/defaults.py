"""What a configuration leaves open, filled in as a Triton server does (docs/protocol/features.md A4).

Two steps: identify() settles name and backend, before the backend is loaded; fill() comes after the backend's
own auto-completion, when inputs and outputs are known.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Protocol

from neptrio.config import accelerators
from neptrio.config.misplaced import hinted
from neptrio.config.model_config import ConfigSource
from neptrio.errors import InvalidArgument, Unavailable

OTHER_BYTES = re.compile("[\ud800-\udfff]")  # how Python has what is not UTF-8 in a file's name
AUTO, GPU, CPU = 0, 1, 2  # inference.ModelInstanceGroup.Kind

# Platforms that Triton's own backends have, whether they are here or not: backends.elsewhere says what to do then. Beside
# another backend they are a mistake that a Triton server takes.
OWNERS = {
    "onnxruntime_onnx": "onnxruntime",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
    "pytorch_libtorch": "pytorch",
    "torch_aoti": "pytorch",
    "tensorrt_plan": "tensorrt",
}
_BACKEND_OF_PLATFORM = {**OWNERS, "python": "python", "identity": "identity"}
# a file or folder in a version folder, or the end of a file's name -> backend
_BACKEND_OF_FILE = {
    "model.onnx": "onnxruntime",
    "model.py": "python",
    "model.pt": "pytorch",
    "model.pt2": "pytorch",
    "model.xml": "openvino",
    "model.plan": "tensorrt",
    "model.savedmodel": "tensorflow",
    "model.graphdef": "tensorflow",
}
_BACKEND_OF_SUFFIX = {Path(file).suffix: backend for file, backend in _BACKEND_OF_FILE.items()}
# weights of a Hugging Face folder, which is known by its config.json beside them
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_PLATFORM_OF_BACKEND = {
    "onnxruntime": "onnxruntime_onnx",
    "pytorch": "pytorch_libtorch",
    "tensorrt": "tensorrt_plan",
}


def is_ensemble(config: Any) -> bool:
    """True when the model is an ensemble: a graph of other models."""
    return config.platform == "ensemble" or config.WhichOneof("scheduling_choice") == "ensemble_scheduling"


def identify(source: ConfigSource, name: str, model_dir: Path, auto_complete: bool) -> None:
    """Sets name and backend in `source.config` where they are empty. Raises InvalidArgument, and Unavailable for a folder whose
    name no message of the protocol can hold."""
    config = source.config
    if OTHER_BYTES.search(name):
        raise Unavailable(
            f"{model_dir}: the name of this folder is not UTF-8, as names of models are: rename it"
        )
    if config.name and config.name != name:
        raise InvalidArgument(
            f"{source.where(('name',))}: unexpected directory name '{name}' for model '{config.name}', directory "
            "name must equal model name"
        )
    config.name = name
    if is_ensemble(config):
        config.platform = config.platform or "ensemble"
        return
    if not config.backend:
        config.backend = _BACKEND_OF_PLATFORM.get(config.platform, "")
    if not config.backend and not config.platform and auto_complete:
        config.backend = _backend_of_files(config, model_dir) or _backend_of_name(name)
    if not config.platform and auto_complete:
        config.platform = _PLATFORM_OF_BACKEND.get(config.backend, "")
    if not config.backend:
        raise _no_backend(source, name, model_dir, auto_complete)


def _no_backend(source: ConfigSource, name: str, model_dir: Path, auto_complete: bool) -> InvalidArgument:
    """The error for a model whose backend nothing tells."""
    platform = source.config.platform
    at = ("platform",) if platform else ("backend",)
    text = f"{source.where(at)}: must specify 'backend' (or 'platform') for model '{name}': "
    if platform:
        platforms = ", ".join(sorted(_BACKEND_OF_PLATFORM))
        text += f"the platform '{platform}' names none, expected one of {platforms}; without it the model's file decides"
    elif not auto_complete:
        text += "neither is given, and with --disable-auto-complete-config the model's file does not decide"
    else:
        known = ", ".join(sorted(_BACKEND_OF_FILE))
        text += f"neither is given, and no version folder holds a file that tells it ({known}), nor is the folder's name NAME.BACKEND"
    return InvalidArgument(hinted(text, model_dir))


def asking(source: ConfigSource) -> tuple[str]:
    """The field that names the model's backend: its platform may do so instead."""
    return (
        ("platform",)
        if source.config.platform and not source.problem(("backend",), "").line
        else ("backend",)
    )


def _backend_of_name(name: str) -> str:
    """BACKEND of a folder NAME.BACKEND, "" for a name without a dot."""
    head, _, backend = name.rpartition(".")
    return backend if head else ""


def _backend_of_files(config: Any, model_dir: Path) -> str:
    if config.default_model_filename:
        return _BACKEND_OF_SUFFIX.get(Path(config.default_model_filename).suffix, "")
    for version in sorted(model_dir.iterdir()):
        if version.name.isdigit() and version.is_dir():
            for file, backend in _BACKEND_OF_FILE.items():
                if (version / file).exists():
                    return backend
            if (version / "config.json").exists() and any((version / file).exists() for file in _WEIGHTS):
                return "transformers"
    return ""


class BackendDefaults(Protocol):
    """The defaults that a backend gives for its models (execution.backend.Backend is one)."""

    default_model_filename: str
    default_cpu_instances: int

    def runs_on_gpu(self) -> bool:
        """True when models run on GPUs unless their instance groups say otherwise."""


def fill(config: Any, backend: BackendDefaults | None) -> None:
    """Fills in version policy, optimization, batching, instance groups and default file name, in place."""
    version_policy(config)
    if is_ensemble(config):
        config.model_transaction_policy.SetInParent()
        return
    optimization = config.optimization
    if not optimization.HasField("input_pinned_memory"):
        optimization.input_pinned_memory.enable = True
    if not optimization.HasField("output_pinned_memory"):
        optimization.output_pinned_memory.enable = True
    _batching(config)
    instance_groups(config, backend)
    if not config.default_model_filename and backend is not None:
        config.default_model_filename = backend.default_model_filename


def _batching(config: Any) -> None:
    choice = config.WhichOneof("scheduling_choice")
    if choice == "dynamic_batching" and config.max_batch_size > 0:
        if not config.dynamic_batching.preferred_batch_size:
            config.dynamic_batching.preferred_batch_size.append(config.max_batch_size)
    elif choice == "sequence_batching":
        sequences = config.sequence_batching
        sequences.max_sequence_idle_microseconds = sequences.max_sequence_idle_microseconds or 1_000_000
        strategy = sequences.WhichOneof("strategy_choice")
        if strategy is None:
            sequences.direct.SetInParent()
        elif strategy == "oldest" and config.max_batch_size > 0 and not sequences.oldest.preferred_batch_size:
            sequences.oldest.preferred_batch_size.append(config.max_batch_size)


def version_policy(config: Any) -> None:
    """Sets the version policy to the latest version alone unless the configuration has one; in place."""
    if config.version_policy.WhichOneof("policy_choice") is None:
        config.version_policy.latest.num_versions = 1


def instance_groups(config: Any, backend: BackendDefaults | None) -> None:
    """Makes sure there is a group, and that each has a name, a kind, devices and a count; in place."""
    if not config.instance_group:
        config.instance_group.add(name=config.name)
    for i, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{i}"
        if group.kind == AUTO:
            gpus = accelerators.gpus()
            on_gpu = bool(group.gpus) or (bool(gpus) and backend is not None and backend.runs_on_gpu())
            group.kind = GPU if on_gpu else CPU
        if group.kind == GPU and not group.gpus:
            group.gpus.extend(gpu.index for gpu in accelerators.gpus())
        if group.count == 0:
            group.count = backend.default_cpu_instances if backend is not None and group.kind == CPU else 1
