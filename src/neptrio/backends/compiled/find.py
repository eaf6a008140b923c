"""Finds libtriton_NAME.so, the library of a compiled backend, and libtritoncache_NAME.so, that of a cache, where a Triton
server looks for them.

Rules:
 1. The order: the version's folder, the model's folder, then folders with a folder NAME for each backend. The field `runtime`
    may give the file another name, never a path.
 2. The names that are built in are served by this server, also where `runtime` names the file of Triton's, which tritonserver
    fills in by itself: `compiled` of --backend-config=NAME, or the model's parameter of that name, asks for the library.
 3. A folder that --backend-directory names is more of a decision than an installed package of the same name, and that more
    than a folder that merely happens to be there (DEFAULTS).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from neptrio.config.isolation import parameter
from neptrio.errors import InvalidArgument
from neptrio.settings import Settings

STRATEGY = "batchstrategy.so"
DEFAULTS = ("/opt/tritonserver/backends",)
CACHES = Path("/opt/tritonserver/caches")


def file_name(config: Any) -> str:
    """The name of the library's file: `runtime`, or what Triton calls it."""
    runtime = str(config.runtime)
    return runtime if runtime.endswith(".so") else f"libtriton_{config.backend}.so"


def asked_for(config: Any, settings: Settings) -> bool:
    """Whether the compiled library of a backend is asked for in so many words. Raises InvalidArgument."""
    own = parameter(config, "compiled")
    value = own or settings.backend_settings(config.backend).get("compiled", "")
    if value.lower() not in ("", "true", "false"):
        where = "parameter 'compiled'" if own else f"--backend-config={config.backend},compiled"
        raise InvalidArgument(f"{where} must be 'true' or 'false', got '{value}'")
    return value.lower() == "true"


def named(config: Any, folders: Sequence[Path], settings: Settings) -> Path | None:
    """The library in the folders of the model or of --backend-directory."""
    directory = settings.backend_directory
    return _first(config, [*folders, *([] if directory is None else [directory / str(config.backend)])])


def by_default(config: Any) -> Path | None:
    """The library in the folders that need no flag: Triton's, and that of the package beside this server's."""
    beside = find_spec("neptrio_backends")
    places = [*DEFAULTS, *(beside.submodule_search_locations or () if beside is not None else ())]
    return _first(config, [Path(place) / str(config.backend) for place in places])


def cache(name: str, settings: Settings) -> Path:
    """The library of a response cache. Raises InvalidArgument."""
    folder = CACHES if settings.cache_directory is None else settings.cache_directory
    library = folder / name / f"libtritoncache_{name}.so"
    if name in (".", "..") or Path(name).name != name or not library.is_file():
        also = "" if settings.cache_directory is not None else "; --cache-directory names another folder"
        raise InvalidArgument(
            f"--cache-config: there is no cache '{name}': looked for '{library}'{also}. The server's own is called 'local'"
        )
    return library


def strategy(config: Any, folders: Iterable[Path]) -> Path | None:
    """The library that decides which requests a dynamic batcher puts together: what the model's parameter
    TRITON_BATCH_STRATEGY_PATH names, or batchstrategy.so in the first of the folders that has one. Raises InvalidArgument."""
    path = parameter(config, "TRITON_BATCH_STRATEGY_PATH")
    scheduler = config.WhichOneof("scheduling_choice")
    if scheduler == "sequence_batching":
        if path:
            raise InvalidArgument(
                "TRITON_BATCH_STRATEGY_PATH cannot be specified with sequence batcher, using default batching strategy"
            )
        return None
    if path:
        if not Path(path).is_file():
            raise InvalidArgument(f"Batching library path not found: {path}")
        return Path(path) if scheduler == "dynamic_batching" else None
    if scheduler != "dynamic_batching":
        return None
    return next((folder / STRATEGY for folder in folders if (folder / STRATEGY).is_file()), None)


def _first(config: Any, folders: Iterable[Path]) -> Path | None:
    name = file_name(config)
    if any(part in ("", "..") or Path(part).name != part for part in (name, str(config.backend))):
        return None
    return next((folder / name for folder in folders if (folder / name).is_file()), None)
