"""Libraries of backends, built for the tests, and folders for them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """libtriton_probe.so, built of the .c files here without anything of this server's."""
    library = tmp_path_factory.mktemp("probe") / "libtriton_probe.so"
    compiler = (os.environ.get("CC") or "cc").split()
    subprocess.run(
        [
            *compiler,
            "-shared",
            "-fPIC",
            "-g",
            "-Werror",
            "-Wall",
            "-o",
            library,
            *sorted(HERE.glob("*.c")),
            "-lpthread",
        ],
        check=True,
    )
    return library


@pytest.fixture(scope="session")
def backends(probe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A --backend-directory with the backend `probe`."""
    folder = tmp_path_factory.mktemp("backends")
    (folder / "probe").mkdir()
    shutil.copy(probe, folder / "probe" / probe.name)
    return folder
