"""A real server process for tests."""

from __future__ import annotations

import itertools
import os
import re
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support import server_template

# how many front ends servers have whose test does not say; `make test-frontends`
FRONTENDS = int(os.environ.get("NEPTRIO_TEST_FRONTENDS", "0"))
# for tests of what docs/frontends.md says is otherwise with front ends
without_front_ends = pytest.mark.skipif(FRONTENDS > 0, reason="with front ends it is otherwise")
# how a record begins in the log, in either format
RECORD = re.compile(r"^(?:[DIWEC]\d{4} \d\d:|\d{4}-\d\d-\d\dT)", re.M)


def tracebacks(log: str) -> list[str]:
    """Those records of a log that contain a traceback, each with the lines up to the next record."""
    begins = [0, *(found.start() for found in RECORD.finditer(log)), len(log)]
    records = [log[a:b] for a, b in itertools.pairwise(begins)]
    return [record for record in records if "Traceback (most recent call last)" in record]


def is_front_end(pid: int) -> bool:
    """Whether a process is a front end, or what those are forked from; False when it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith("neptrio:front")
    except OSError:
        return False


class ServerProcess:
    """Starts `neptrio` on free ports, waits for its start-up text, stops it with SIGTERM.

    `http` and `grpc` are "127.0.0.1:PORT", `admin` too or "unix:PATH", "" without --admin-address; `log()` is everything written to stderr so far. `stop()` fails when the
    log contains a traceback that does not match the regular expression `failures`: a test names the failures that
    it causes, all others are defects. So is a front end that the engine kills, unless `failures` has "is killed". `limits` is a shell command that is run first in the process, such as
    `ulimit -n 128`. `command` stands before the flags: a subcommand that serves. `python` has neptrio.
    """

    def __init__(
        self,
        repository: Path | None,
        *flags: str,
        env: dict[str, str] | None = None,
        failures: str | None = None,
        limits: str = "",
        command: tuple[str, ...] = (),
        python: str = sys.executable,
    ) -> None:
        self._failures = failures
        self._lines: list[str] = []
        self._rest = b""  # of a line whose end has not come
        self._open = True  # its end of the pipe
        self._news = threading.Condition()
        self._started = threading.Event()
        arguments = [
            *command,
            *([f"--model-repository={repository}"] if repository is not None else []),
            "--http-address=127.0.0.1",
            "--http-port=0",
            "--grpc-address=127.0.0.1",
            "--grpc-port=0",
            "--metrics-port=0",
            *([f"--frontends={FRONTENDS}"] if FRONTENDS else []),
            *flags,
        ]
        ordinary = bool(limits) or python != sys.executable
        self.process = (None if ordinary else server_template.start(arguments, env)) or subprocess.Popen(
            [
                *(["sh", "-c", f'{limits}; exec "$@"', "sh"] if limits else []),
                *(python, "-W", "error", "-m", "neptrio", *arguments),
            ],
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._started.wait(120) or "serving\n" not in self._lines:
            self.process.kill()
            self.process.wait()
            self._close(5)
            raise AssertionError(f"the server did not start:\n{self.log()}")
        self.http = self._address(r"REST +on https?://(\S+)")
        self.grpc = self._address(r"gRPC +on (\S+)")
        self.metrics = self._address(r"metrics +on https?://(\S+)/metrics")
        self.admin = self._address(r"admin +on (?:https://)?(\S+)")

    def _read(self) -> None:
        news = self._poll()
        while self._open:
            news.poll()
            self._take()
            if not self._started.is_set() and "serving\n" in self._lines:
                self._started.set()
        self._started.set()

    def _poll(self) -> select.poll:
        assert self.process.stderr is not None
        made = select.poll()
        made.register(self.process.stderr, select.POLLIN)
        return made

    def _take(self) -> None:
        """Takes what the server has written so far."""
        assert self.process.stderr is not None
        with self._news:
            while self._open and self._poll().poll(0):
                data = os.read(self.process.stderr.fileno(), 1 << 16)
                self._open = bool(data)
                *lines, self._rest = (self._rest + data).split(b"\n")
                if not data and self._rest:
                    lines, self._rest = [self._rest], b""
                self._lines += [line.decode("utf-8") + "\n" for line in lines]
                self._news.notify_all()

    def _address(self, pattern: str) -> str:
        found = re.search(pattern, self.log())
        return found.group(1) if found else ""

    def log(self) -> str:
        """The server's stderr so far: also what it wrote a moment ago, such as before an answer that the test has."""
        self._take()
        return "".join(self._lines)

    def until_logged(self, text: str, times: int = 1, seconds: float = 60) -> None:
        """Waits until the log contains `text` `times` times; AssertionError after `seconds`."""
        with self._news:
            if not self._news.wait_for(lambda: self.log().count(text) >= times, seconds):
                raise AssertionError(f"{text!r} is not {times} times in the log:\n{self.log()}")

    def stop(self, sig: int = signal.SIGTERM, timeout: float = 60) -> int:
        """Signals the server and waits for its end; returns the exit status.

        AssertionError when it does not end, and for a traceback that `failures` does not match.
        """
        if self.process.poll() is None:
            self.process.send_signal(sig)
        return self.ended(timeout)

    def ended(self, timeout: float = 60) -> int:
        """Waits for a server that is ending; returns the exit status. AssertionError as in stop()."""
        status = self._end(timeout)
        strange = [
            text
            for text in tracebacks(self.log())
            if not (self._failures and re.search(self._failures, text))
        ]
        if not re.search("is killed", self._failures or ""):
            # neither what clients send nor a test that kills one makes a front end write what cannot be
            strange += re.findall(r"front end \d+ \(process \d+\) is killed: .*", self.log())
        assert not strange, "the server logged what no test provoked:\n" + "\n".join(strange)
        return status

    def _end(self, timeout: float) -> int:
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not stop within {timeout} s:\n{self.log()}") from None
        finally:
            self._close(10)
        return status

    def _close(self, seconds: float) -> None:
        """Reads the rest of the log, unless another process goes on writing."""
        self._reader.join(seconds)
        assert self.process.stderr is not None
        with self._news:
            self._open = False
            self.process.stderr.close()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        ended = self.process.poll() is not None
        if kind is not None:  # the test has failed already, and its error should be the one shown
            if not ended:
                self.process.terminate()
            with suppress(AssertionError):  # what the test waits for may hold it up
                self._end(60)
            return
        status = self.stop()
        assert ended or status == 0, f"the server ended with status {status}:\n{self.log()}"
