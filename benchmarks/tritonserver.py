"""The real tritonserver, out of the wheel that carries it: where it is, and how it is started.

`make bench-peers` installs it; NEPTRIO_TRITONSERVER names another environment that holds nvidia-pytriton.
The wheel keeps the server, its backends and the stubs of the Python backend apart: lay_out() puts
together what the server wants to find in one folder.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

PEERS = Path(__file__).resolve().parent / ".peers"


def home() -> Path | None:
    """The site-packages with the server in it, None where there is none."""
    environment = Path(os.environ.get("NEPTRIO_TRITONSERVER") or PEERS / "tritonserver")
    found = sorted(environment.glob("lib/python3*/site-packages/pytriton/tritonserver/bin/tritonserver"))
    return found[0].parents[3] if found else None


def lay_out(site: Path, folder: Path) -> None:
    """Fills `folder` with the Python backend for this interpreter, and the local response cache."""
    root = site / "pytriton" / "tritonserver"
    python = folder / "python"
    python.mkdir(parents=True)
    for file in ("libtriton_python.so", "triton_python_backend_utils.py"):
        shutil.copy(root / "backends" / "python" / file, python / file)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    stub = python / "triton_python_backend_stub"
    shutil.copy(root / "python_backend_stubs" / version / "triton_python_backend_stub", stub)
    stub.chmod(0o755)
    for name in ("numpy", "numpy.libs"):
        (python / name).symlink_to(site / name)
    if (root / "caches" / "local").exists():
        shutil.copytree(root / "caches" / "local", folder / "caches" / "local")


def command(site: Path, folder: Path, repository: Path, http: int, grpc: int, *flags: str) -> list[str]:
    """The server over `repository` with the backends in `folder`, on two ports of 127.0.0.1."""
    return [
        str(site / "pytriton" / "tritonserver" / "bin" / "tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={folder}",
        f"--cache-directory={folder}/caches",
        "--allow-gpu-metrics=false",
        "--http-address=127.0.0.1",
        f"--http-port={http}",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={grpc}",
        "--exit-timeout-secs=5",
        f"--backend-config=python,shm-region-prefix-name=neptrio-peer-{os.getpid()}",
        *flags,
    ]


def environment(site: Path) -> dict[str, str]:
    """Variables that the server needs besides those there are."""
    return {"LD_LIBRARY_PATH": str(site / "nvidia_pytriton.libs"), "PYTHONPATH": str(site)}
