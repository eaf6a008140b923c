"""The options of a session: threads, optimization and whatever else a model's configuration sets. What it runs on is in
providers.py.

Parameters are those of Triton's backend (docs/onnx.md lists them). A value that cannot be used makes the load fail;
unknown parameters are ignored, as they may be for other readers of the configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neptrio.backends.onnx import entries as session_entries
from neptrio.backends.onnx import kept_models, signature
from neptrio.backends.onnx import library as onnx_library
from neptrio.backends.onnx import providers as onnx_providers
from neptrio.backends.onnx import python_session as onnx_python
from neptrio.backends.onnx.session import OnnxSession
from neptrio.config import paths, session_sharing
from neptrio.errors import InvalidArgument, TritonError
from neptrio.execution.backend import LoadContext

_COUNTS = {"intra_op_thread_count": "intra_threads", "inter_op_thread_count": "inter_threads"}
_SWITCHES = {"enable_mem_arena": "arena", "enable_mem_pattern": "pattern"}
_SPINNING = ("session.intra_op.allow_spinning", "session.inter_op.allow_spinning")
_LEVELS = {-1: 1, 0: 99, 1: 2}  # level in the configuration -> in ONNX Runtime: basic, all, extended


@dataclass(frozen=True)
class Options:
    """The options that a session is made with, for both interfaces; None leaves ONNX Runtime's default."""

    model: str  # the model's name, for error messages
    level: int = 0  # of optimization: 0 none, 1 basic, 2 extended, 99 all
    intra_threads: int | None = None
    inter_threads: int | None = None
    arena: bool | None = None
    pattern: bool | None = None
    parallel: bool | None = None
    entries: tuple[tuple[str, str], ...] = ()  # configuration entries of the session
    libraries: tuple[Path, ...] = ()  # with custom operators
    saved_as: Path | None = None  # where the optimised model is written; of the C library only

    def library_failure(self, library: Path, error: Exception) -> InvalidArgument:
        """The error for a library of custom operators that cannot be loaded."""
        return InvalidArgument(f"model_operations of model '{self.model}': cannot load '{library}': {error}")


def model_path(context: LoadContext) -> Path:
    """The path of the model's file (in a folder of that name, the file in it). Raises InvalidArgument."""
    path = context.version_dir / (context.config.default_model_filename or "model.onnx")
    if path.is_dir():
        path = path / "model.onnx"
    if not path.is_file():
        raise InvalidArgument(f"unable to find '{path}' for model '{context.name}'")
    return path


def settings(context: LoadContext) -> dict[str, str]:
    """The model's parameters; those it does not set are taken from --backend-config."""
    return {**_of_server(context), **_of_model(context)}


def _of_model(context: LoadContext) -> dict[str, str]:
    return {key: value.string_value for key, value in context.config.parameters.items()}


def _of_server(context: LoadContext) -> dict[str, str]:
    return context.settings.backend_settings("onnxruntime")


def is_native(context: LoadContext, kind: str) -> bool:
    """True when sessions for instances of this kind are made with the C library. Raises InvalidArgument."""
    accelerators = context.config.optimization.execution_accelerators.cpu_execution_accelerator
    return onnx_library.is_chosen(context, settings(context), kind, accelerators)


def light_session(context: LoadContext) -> Any:
    """A session for looking at the model's inputs and outputs: no optimization, one thread."""
    options = Options(context.name, level=0, intra_threads=1, libraries=_custom_operators(context))
    return _open(
        context, options, ["CPUExecutionProvider"], onnx_library.is_chosen(context, settings(context), "CPU")
    )


def session(context: LoadContext, kind: str, device_id: int) -> Any:
    """Makes the session of one instance, or of several on the CPU. Raises InvalidArgument."""
    if is_native(context, kind):
        options = _options(context)
        return _kept(context, options) or _open(context, options, [], True)
    chosen = onnx_providers.chosen(context, kind, device_id, settings(context))
    return _open(context, _options(context), chosen, False)


def shares_session(context: LoadContext) -> bool:
    """Whether instances on the CPU run one session together. Raises InvalidArgument."""
    found = settings(context)
    if session_sharing.KEY in found and _integer(
        context, session_sharing.KEY, found[session_sharing.KEY], 0, 1
    ):
        obstacle = session_sharing.obstacle(found)
        if obstacle:
            raise InvalidArgument(
                f"model '{context.name}' asks for {session_sharing.KEY} 1, which is not possible with {obstacle} 1: that holds "
                "for the thread that makes a session"
            )
    return session_sharing.shared(found, bool(context.config.model_operations.op_library_filename))


def examine(context: LoadContext) -> None:
    """Raises InvalidArgument for options that a session could not be made with."""
    _options(context)
    shares_session(context)
    for kind in ("CPU", "GPU"):
        onnx_providers.examine(context, kind)


def _kept(context: LoadContext, options: Options) -> Any:
    """A session made of what is kept of the model, None where nothing is (--model-cache-directory)."""
    directory = context.settings.model_cache_directory
    if directory is None:
        return None
    try:
        return kept_models.session(directory, onnx_library.version(), model_path(context), options)
    finally:
        onnx_library.tell()


def _open(context: LoadContext, options: Options, provider_list: list[Any], native: bool) -> Any:
    path = model_path(context)
    try:
        if native:
            return OnnxSession(path, options)
        return onnx_python.open_session(path, options, provider_list)
    except TritonError:
        raise
    except Exception as error:
        if "INVALID_PROTOBUF" in str(error) or signature.mistaken(path):
            signature.read(path)  # says what is wrong with it, as `neptrio check` does
        raise InvalidArgument(
            f"onnx runtime cannot load '{path}' of model '{context.name}': {error}"
        ) from error
    finally:
        if native:
            onnx_library.tell()


def _options(context: LoadContext) -> Options:
    found = settings(context)
    chosen: dict[str, Any] = {}
    for key, field in _COUNTS.items():
        if key in found:
            chosen[field] = _integer(context, key, found[key], 0)
    for key, field in _SWITCHES.items():
        if key in found:
            chosen[field] = bool(_integer(context, key, found[key], 0, 1))
    if context.settings.host_memory_budget:  # what an arena keeps between runs nobody would see
        chosen.setdefault("arena", False)
    if "execution_mode" in found:
        chosen["parallel"] = bool(_integer(context, "execution_mode", found["execution_mode"], 0, 1))
    entries = dict.fromkeys(_SPINNING, "0")
    entries.update(session_entries.chosen(_of_model(context), _of_server(context), context.name))
    level = context.config.optimization.graph.level
    if level not in _LEVELS:
        raise InvalidArgument(
            f"optimization.graph.level of model '{context.name}' must be -1 (basic), 0 (all) or 1 (extended), got {level}"
        )
    return Options(
        context.name,
        _LEVELS[level],
        entries=tuple(entries.items()),
        libraries=_custom_operators(context),
        **chosen,
    )


def _custom_operators(context: LoadContext) -> tuple[Path, ...]:
    what = f"model_operations of model '{context.name}'"
    return tuple(
        paths.allowed(library, context.model_dir, context.model_dir, _of_server(context), what, "onnxruntime")
        for library in context.config.model_operations.op_library_filename
    )


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
