"""Libraries of backends, built for the tests, and folders for them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def compiled(library: Path, *sources: Path) -> Path:
    """A library built of C files, without anything of this server's."""
    compiler = (os.environ.get("CC") or "cc").split()
    flags = ["-shared", "-fPIC", "-g", "-Werror", "-Wall"]
    subprocess.run([*compiler, *flags, "-o", library, *sources, "-lpthread"], check=True)
    return library


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """libtriton_probe.so, built of the .c files here that are not a cache's."""
    sources = sorted(path for path in HERE.glob("*.c") if not path.name.startswith("cache_"))
    return compiled(tmp_path_factory.mktemp("probe") / "libtriton_probe.so", *sources)


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A --cache-directory with the cache `probe`, built of cache_probe.c."""
    folder = tmp_path_factory.mktemp("caches")
    (folder / "probe").mkdir()
    compiled(folder / "probe" / "libtritoncache_probe.so", HERE / "cache_probe.c")
    return folder


@pytest.fixture(scope="session")
def backends(probe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A --backend-directory with the backend `probe`."""
    folder = tmp_path_factory.mktemp("backends")
    (folder / "probe").mkdir()
    shutil.copy(probe, folder / "probe" / probe.name)
    return folder
