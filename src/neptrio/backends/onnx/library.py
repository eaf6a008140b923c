"""Chooses which of ONNX Runtime's two interfaces a model uses: the C library or the Python module.

Rules:
 1. The C library is used where possible: it needs no Python object per run, and the server starts faster without
    importing the module.
 2. The module is used for what cannot be done with the library here: execution providers other than the CPU's, and
    an onnxruntime without a usable library (on systems other than Linux, or built without it).
 3. The model's parameter `session_api` ("c" or "python") overrides this; "c" makes the load fail where it is
    impossible, with the reason.

The library is looked for beside the module, without importing the module.

ONNX Runtime is published in packages that install the same files (PACKAGES): what one brings the next overwrites, and
nothing tells but the packages' own records. They are looked at when the first model is loaded.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from neptrio import extras
from neptrio.backends.onnx.api import Unusable, load, messages
from neptrio.errors import InvalidArgument
from neptrio.execution.backend import LoadContext

log = logging.getLogger("neptrio.onnx")
KEY = "session_api"
PACKAGES = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-openvino",
    "onnxruntime-rocm",
    "onnxruntime-migraphx",
)
_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)


def stay_silent() -> None:
    """To be called before ONNX Runtime is loaded. Recent builds for Linux (1.31.1, for one) report use and failures to
    their publisher: a file in the user's home, a thread, and 4 KB of memory for each failed run until they are sent.
    Whoever has set the variable decides."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def module() -> Any:
    """The Python module. Raises InvalidArgument that says what to install where there is none."""
    stay_silent()
    try:
        import onnxruntime
    except ImportError as error:
        raise InvalidArgument(
            f"ONNX models need ONNX Runtime: {extras.install('onnx')}, or for GPUs: {extras.install('onnx-gpu')} ({error})"
        ) from None
    return onnxruntime


@cache
def doubled() -> str:
    """What is wrong with the installed packages of ONNX Runtime, "" when there is one at most. Logs it."""
    folders: dict[
        str, list[str]
    ] = {}  # where the module would be -> the packages; the path may have several folders
    for name in PACKAGES:
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        folders.setdefault(str(package.locate_file("onnxruntime")), []).append(f"{name} {package.version}")
    found = next((packages for packages in folders.values() if len(packages) > 1), [])
    if not found:
        return ""
    said = (
        f"{' and '.join(found)} are both installed and have overwritten each other's files: uninstall all of them, then "
        "install one"
    )
    log.warning("%s", said)
    return said


@cache
def unusable() -> str:
    """Loads the C library. Returns why it cannot be used here, "" when it can. Any thread."""
    stay_silent()
    doubled()
    path = find()
    if path is None:
        return "there is no onnxruntime package with a libonnxruntime.so"
    try:
        version = load(str(path))
    except Unusable as error:
        log.warning("%s cannot be used, ONNX models run through Python instead: %s", path, error)
        return f"{path}: {error}"
    tell()
    log.debug("onnxruntime %s through its C library", version)
    return ""


def version() -> str:
    """The version of the C library, which can be used. Raises Unusable."""
    return str(load(str(find())))


def find() -> Path | None:
    """The path of the installed onnxruntime's C library, None when there is none."""
    try:
        spec = importlib.util.find_spec("onnxruntime")
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(folder, "capi").glob("libonnxruntime.so*")):
            return path
    return None


def is_chosen(context: LoadContext, settings: dict[str, str], kind: str, accelerators: Any = ()) -> bool:
    """True when sessions for instances of this kind are made with the C library. Raises InvalidArgument."""
    wanted = settings.get(KEY, "")
    if wanted not in ("", "c", "python"):
        raise InvalidArgument(
            f"parameter '{KEY}' of model '{context.name}' must be 'c' or 'python', got '{wanted}'"
        )
    if wanted == "python":
        return False
    reason = "its instances or accelerators need another provider than the CPU's"
    if kind != "GPU" and not accelerators:
        reason = unusable()
    if reason and wanted == "c":
        raise InvalidArgument(f"model '{context.name}' asks for {KEY} 'c', which is not possible: {reason}")
    return not reason


def tell(most: int = 4) -> None:
    """Logs the messages that the library has collected, none as more severe than `most` (0 = verbose to 4 = fatal)."""
    for severity, category, where, text in messages():
        log.log(_LEVELS[min(severity, most, 4)], "onnxruntime %s: %s (%s)", category, text, where)
