"""A real server process for tests."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path


class ServerProcess:
    """Starts `neptrio` on free ports, waits for its start-up text, stops it with SIGTERM.

    `http` and `grpc` are "127.0.0.1:PORT"; `log()` is everything written to stderr so far.
    """

    def __init__(self, repository: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        self._lines: list[str] = []
        self._started = threading.Event()
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-W",
                "error",
                "-m",
                "neptrio",
                f"--model-repository={repository}",
                "--http-address=127.0.0.1",
                "--http-port=0",
                "--grpc-address=127.0.0.1",
                "--grpc-port=0",
                "--metrics-port=0",
                *flags,
            ],
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._started.wait(60) or "serving\n" not in self._lines:
            self.process.kill()
            self.process.wait()
            self._reader.join(5)
            assert self.process.stderr is not None
            self.process.stderr.close()
            raise AssertionError(f"the server did not start:\n{self.log()}")
        self.http = self._address(r"REST +on https?://(\S+)")
        self.grpc = self._address(r"gRPC +on (\S+)")
        self.metrics = self._address(r"metrics +on http://(\S+)/metrics")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)
            if line == "serving\n":
                self._started.set()
        self._started.set()

    def _address(self, pattern: str) -> str:
        found = re.search(pattern, self.log())
        return found.group(1) if found else ""

    def log(self) -> str:
        """The server's stderr so far."""
        return "".join(self._lines)

    def stop(self, sig: int = signal.SIGTERM, timeout: float = 30) -> int:
        """Signals the server and waits for its end; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the server did not stop within {timeout} s:\n{self.log()}") from None
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
