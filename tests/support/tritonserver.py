"""The real tritonserver, where somebody has installed it.

`make bench-peers` does, or NEPTRIO_TRITONSERVER names an environment that holds nvidia-pytriton.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from benchmarks.peers import PEERS, free_port
from tests.support.waiting import until


def home() -> Path | None:
    """The site-packages with the server in it, None where there is none."""
    environment = Path(os.environ.get("NEPTRIO_TRITONSERVER") or PEERS / "tritonserver")
    found = sorted(environment.glob("lib/python3*/site-packages/pytriton/tritonserver/bin/tritonserver"))
    return found[0].parents[3] if found else None


class Tritonserver:
    """A running server with the Python backend; `http`, `grpc` and `metrics` are HOST:PORT."""

    def __init__(self, repository: Path, folder: Path, *flags: str) -> None:
        site = home()
        assert site is not None
        root = site / "pytriton" / "tritonserver"
        self._folder = tempfile.mkdtemp(prefix="backends-")
        python = Path(self._folder, "python")
        python.mkdir()
        for file in ("libtriton_python.so", "triton_python_backend_utils.py"):
            shutil.copy(root / "backends" / "python" / file, python / file)
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        stub = python / "triton_python_backend_stub"
        shutil.copy(root / "python_backend_stubs" / version / "triton_python_backend_stub", stub)
        stub.chmod(0o755)
        for name in ("numpy", "numpy.libs"):
            (python / name).symlink_to(site / name)
        if (root / "caches" / "local").exists():
            shutil.copytree(root / "caches" / "local", Path(self._folder, "caches", "local"))
        ports = [free_port() for _ in range(3)]
        self.http, self.grpc, self.metrics = (f"127.0.0.1:{port}" for port in ports)
        self._log = folder / "tritonserver.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    str(root / "bin" / "tritonserver"),
                    f"--model-repository={repository}",
                    f"--backend-directory={self._folder}",
                    "--allow-gpu-metrics=false",
                    "--metrics-interval-ms=100",
                    "--http-address=127.0.0.1",
                    "--grpc-address=127.0.0.1",
                    "--metrics-address=127.0.0.1",
                    f"--http-port={ports[0]}",
                    f"--grpc-port={ports[1]}",
                    f"--metrics-port={ports[2]}",
                    f"--cache-directory={self._folder}/caches",
                    "--exit-timeout-secs=5",
                    f"--backend-config=python,shm-region-prefix-name=test{os.getpid()}",
                    *flags,
                ],
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "LD_LIBRARY_PATH": str(site / "nvidia_pytriton.libs"),
                    "PYTHONPATH": str(site),
                },
                start_new_session=True,
            )
        try:
            until(self._ready, lambda: self._log.read_text(errors="replace")[-3000:])
        except BaseException:
            self.stop()
            raise

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.http}/v2/health/ready", timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            assert self._process.poll() is None, self._log.read_text(errors="replace")[-3000:]
            return False

    def stop(self) -> None:
        """Ends the server; trace files are written when this returns."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Tritonserver:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
