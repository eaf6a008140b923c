"""What a load is expected to take of the host's memory at its height, by the model's files and by what it held before. Nothing
here waits or reads a file."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from neptrio.config import defaults, groups, session_sharing

if TYPE_CHECKING:
    from neptrio.repository.model_builder import Found

CODE_BYTES = 16 << 20  # that an instance of a model with code is expected to take beside its files
# of the file's size, for each session: ONNX Runtime parses the file, copies the weights and packs them (measured: 1.1 to 2.1)
ONNX_PARTS = 2.1
ONNX_SESSIONS = 2  # of a model whose configuration leaves it open (backends.onnx.backend)
AUTO_ON_GPUS = ("kernel", "onnxruntime")  # backends whose instances of KIND_AUTO run on all GPUs
AUTO_GROUP = SimpleNamespace(kind=0, count=1, gpus=())  # where the configuration has no group
NATIVE = (
    "identity",
    "sequence",
    "kernel",
)  # backends whose models bring no code that allocates


def files_of(found: Found) -> int:
    """The bytes of the files of all versions."""
    heads = tuple(f"{version}/" for version in found.versions)
    return sum(size for name, (_, size) in found.fingerprint.items() if name.startswith(heads) and size > 0)


def estimate(found: Found, keeps: bool = False) -> int:
    """The bytes of the host that a load is expected to take at its height. `keeps`: optimised ONNX models are written for their
    next load, for which one session holds the weights once more."""
    config = found.source.config
    if defaults.is_ensemble(config):
        return 0
    files = files_of(found)
    if config.backend == "onnxruntime":
        sessions = _sessions(config)
        return int(files * (ONNX_PARTS * sessions + keeps))
    if config.backend in NATIVE:
        return files + files // 2
    instances = sum(max(group.count, 1) for group in config.instance_group) or 1
    return files + CODE_BYTES * instances * len(found.versions)


def _sessions(config: Any) -> int:
    """How many sessions an ONNX model has in host memory, unless --backend-config says otherwise."""
    counts = [(group.kind, group.count or ONNX_SESSIONS) for group in config.instance_group]
    counts = counts or [(AUTO_GROUP.kind, ONNX_SESSIONS)]
    settings = {key: value.string_value for key, value in config.parameters.items()}
    shared = session_sharing.shared(settings, bool(config.model_operations.op_library_filename))
    if not shared or settings.get("isolation") == "process":
        return sum(count for _, count in counts)
    on_gpus = [count for kind, count in counts if groups.KINDS.get(kind) == "GPU"]
    return sum(on_gpus) + (len(on_gpus) < len(counts))


def need(found: Found, held: int, keeps: bool = False) -> int:
    """The bytes that a load is expected to take, of a model that held so many when it was last loaded; 0 where nobody knows.
    `keeps` as for estimate()."""
    config = found.source.config
    code = config.backend not in (*NATIVE, "onnxruntime") and not defaults.is_ensemble(config)
    if held and code:  # what code allocates its files do not say
        return held + held // 4
    return max(held, estimate(found, keeps))


def device_need(found: Found, device: int, held: int) -> int:
    """The bytes of a GPU that a load is expected to take, of a model that held so many when it was last loaded; 0 where
    nobody knows. Only what the configuration places there is expected: the model's files, for each instance."""
    config = found.source.config
    placed = 0
    for group in config.instance_group or [AUTO_GROUP]:
        kind = groups.KINDS.get(group.kind, "AUTO")
        chosen = kind == "GPU" or (kind == "AUTO" and (group.gpus or config.backend in AUTO_ON_GPUS))
        if chosen and (not group.gpus or device in group.gpus):
            placed += max(group.count, 1)
    return max(held, files_of(found) * placed)
