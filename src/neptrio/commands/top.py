"""A live view of a server's models: rates, latencies by stage, queues, batch sizes, failures.

Works with every server that has the statistics extension. Our server also gives percentiles of the interval,
what is queued now, and why batches were closed; for other servers the averages of the interval are shown
(columns `avg`). Keys: q quits.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import select
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from neptrio import terminal
from neptrio.addresses import model_in_path, parts_of
from neptrio.flags import authorization
from neptrio.observe.top_view import Sample, render

HELP = "watch a server's models in the terminal"
KEYS = 1024  # bytes that are read at once
LONGEST_INTERVAL = 1e6  # seconds; sleep() takes no number of them
QUERY = "?percentiles=50,99&histograms=true&live=true"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `neptrio top`."""
    parser.add_argument(
        "url", nargs="?", default="localhost:8000", help="the server's HTTP address (default: localhost:8000)"
    )
    parser.add_argument("--model", default="", help="only this model")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between two looks (default: 2)")
    parser.add_argument("--once", action="store_true", help="print one interval and exit")


def run(options: argparse.Namespace) -> int:
    """Runs until q, Ctrl-C or (with --once) one interval has passed; 1 when the server cannot be asked."""
    if not 0 < options.interval <= LONGEST_INTERVAL:
        print(
            f"error: --interval must be above 0 and at most {LONGEST_INTERVAL:g}, got {options.interval:g}",
            file=sys.stderr,
        )
        return 2
    try:
        with closing(Server(options.url, options.model)) as server:
            if options.once:
                before = server.sample()
                time.sleep(options.interval)
                print("\n".join(render(options.url, before, server.sample())))
                return 0
            return _watch(server, options) if sys.stdout.isatty() else _follow(server, options)
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


class ServerError(Exception):
    """The server's statistics could not be read; the message says why."""


class Server:
    """Reads a server's statistics over one HTTP connection, which is opened again after it was lost."""

    def __init__(self, url: str, model: str) -> None:
        try:
            parts = parts_of(url)
            if parts.scheme not in ("", "http", "https"):
                raise ValueError
            secure = parts.scheme == "https"
            connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
            self._connection = connect(
                parts.hostname or "", parts.port or (443 if secure else 8000), timeout=10
            )
        except (ValueError, http.client.InvalidURL):
            raise ServerError(
                f"'{url}' is not an address: expected host:port or http(s)://host:port"
            ) from None
        try:
            self._headers = authorization()
        except ValueError as error:
            raise ServerError(str(error)) from None
        self._url = url
        prefix = parts.path.rstrip("/")
        self._only = bool(model)
        self._index = prefix + "/v2/repository/index"
        self._path = (
            prefix + (f"/v2/models/{model_in_path(model)}/stats" if model else "/v2/models/stats") + QUERY
        )

    def _down(self) -> list[dict[str, str]]:
        """The rows of the repository index that are not ready; [] where the server does not say."""
        if self._only:
            return []
        try:
            self._connection.request("POST", self._index, headers=self._headers)
            response = self._connection.getresponse()
            rows = json.loads(response.read())
            return [
                row
                for row in rows
                if row.get("state", "READY") != "READY" and not _rests(row.get("reason", ""))
            ]
        except (OSError, http.client.HTTPException, ValueError, TypeError, AttributeError, RecursionError):
            self._connection.close()
            return []

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def sample(self) -> Sample:
        """The statistics at this moment. Raises ServerError."""
        try:
            self._connection.request("GET", self._path, headers=self._headers)
            response = self._connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ServerError(f"no answer from a server at {self._url}: {error}") from None
        taken = time.monotonic()
        try:
            document: Mapping[str, Any] = json.loads(body)
            if response.status != 200:
                raise ServerError(f"{self._url} answered {response.status}: {document.get('error', '')}")
            models = {
                (m["name"], m.get("version", "")): m for m in document["model_stats"] if m["inference_stats"]
            }
            return Sample(
                taken,
                models,
                document.get("loop_lag"),
                document.get("front_ends", ()),
                self._down(),
                document.get("on_demand"),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            said = body[:200].decode(errors="replace").strip()
            if response.status != 400 or not said.isprintable() or not said:
                said = "is this the HTTP port of an inference server?"
            # a port that speaks something else says in 400 what that is
            raise ServerError(f"{self._url} answered {response.status} without statistics: {said}") from None


def _rests(reason: str) -> bool:
    """Whether a model does not serve and nothing is wrong: it was unloaded, or is loaded when it is asked for."""
    return reason in ("unloaded", "on demand") or reason.startswith("put away")


@contextmanager
def _screen() -> Iterator[None]:
    """Uses the terminal's alternate screen, without a cursor and with unbuffered keys; restores it all at the end."""
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    saved = termios.tcgetattr(descriptor) if sys.stdin.isatty() else None
    if saved is not None:
        tty.setcbreak(descriptor)
    terminal.command("\x1b[?1049h\x1b[?25l")
    try:
        yield
    finally:
        terminal.command("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
        if saved is not None:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, saved)


def _follow(server: Server, options: argparse.Namespace) -> int:
    """Prints one interval after the other: the output is no terminal. Ends with Ctrl-C, or when nobody reads it."""
    before = server.sample()
    while True:
        time.sleep(options.interval)
        now = server.sample()
        print("\n".join([*render(options.url, before, now), ""]), flush=True)
        before = now


def _watch(server: Server, options: argparse.Namespace) -> int:
    import shutil

    before = server.sample()
    with _screen():
        lines = [f"{options.url}: first interval of {options.interval:g} s ..."]
        while True:
            columns, rows = shutil.get_terminal_size()
            text = "\r\n".join(terminal.shown(line)[:columns] for line in lines[:rows])
            terminal.command("\x1b[H\x1b[2J" + text)
            sys.stdout.flush()
            if _quit_within(options.interval):
                return 0
            try:
                now = server.sample()
            except ServerError as error:
                lines = [str(error), "trying again ..."]
                continue
            lines, before = render(options.url, before, now, columns), now


def _quit_within(seconds: float) -> bool:
    """Waits that long for a key; True for q. Bytes, since sys.stdin waits for the end of a character, and keeps what comes with the
    first: a key like an arrow is several."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if not sys.stdin.isatty():
            time.sleep(left)
        elif select.select([sys.stdin], [], [], left)[0]:
            keys = os.read(sys.stdin.fileno(), KEYS)
            if not keys or b"q" in keys.lower():  # none: the terminal is gone
                return True
    return False
