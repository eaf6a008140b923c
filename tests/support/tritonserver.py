"""A real tritonserver for tests, where one is installed (benchmarks/tritonserver.py)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from benchmarks.peers import free_port
from benchmarks.tritonserver import command, environment, home, lay_out
from tests.support.waiting import until


class Tritonserver:
    """A running server with the Python backend; `http`, `grpc` and `metrics` are HOST:PORT."""

    def __init__(self, repository: Path, folder: Path, *flags: str) -> None:
        site = home()
        assert site is not None
        self._folder = tempfile.mkdtemp(prefix="backends-")
        lay_out(site, Path(self._folder))
        ports = [free_port() for _ in range(3)]
        self.http, self.grpc, self.metrics = (f"127.0.0.1:{port}" for port in ports)
        self._log = folder / "tritonserver.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command(
                    site,
                    Path(self._folder),
                    repository,
                    ports[0],
                    ports[1],
                    "--metrics-interval-ms=100",
                    "--metrics-address=127.0.0.1",
                    f"--metrics-port={ports[2]}",
                    *flags,
                ),
                stdout=log,
                stderr=log,
                env={**os.environ, **environment(site)},
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
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Tritonserver:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
