"""Runs a server as a process: its signals, what it prints once it serves, and how the process ends.

What a program does that hosts a server is in neptrio.embedded.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import NoReturn

import trio

from neptrio import logs, process_parts, startup
from neptrio.loop import collector, open_files
from neptrio.loop.busy_poll import BusyPoll, granted_ns
from neptrio.loop.interpreter_lock import serve_soon
from neptrio.server import Server
from neptrio.service.reopened import reopen_elsewhere
from neptrio.settings import Settings
from neptrio.transport.http2.session import implementation

log = logging.getLogger("neptrio.server")


async def _signals(server: Server) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        async with trio.open_nursery() as nursery:
            async for number in signals:
                if number == signal.SIGHUP:
                    nursery.start_soon(_hang_up, server)
                    continue
                # from now on the kernel ends the process at a second signal, even if the loop hangs
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                server.stop()


async def _hang_up(server: Server) -> None:
    """SIGHUP: opens again the files that can be reopened. A closed terminal does not end the server."""
    if server.front_ends is not None:
        server.front_ends.reopen()
    found = await reopen_elsewhere(*server.services.logs())
    log.info("SIGHUP: %s", "the log file was opened again" if found else "there is nothing to read again")


def run(settings: Settings, first_steps: bool = False) -> int:
    """Runs a server in this process until a signal; returns the exit status. `first_steps`: it says what to type."""
    server: Server | None = None
    open_files.raise_limit()
    serve_soon()

    async def main() -> None:
        nonlocal server
        server = Server(settings)

        def started() -> None:
            collector.set_up()
            _look_before_sleeping(server)
            log.debug(
                "sockets are waited for: %s; HTTP/2 session: %s", server.loop.poller.way, implementation()
            )
            text = [
                startup.describe(server),
                *([startup.first_steps(server)] if first_steps else []),
                "serving\n",
            ]
            sys.stderr.write("\n".join(text))  # in one piece: front ends may write, too
            sys.stderr.flush()
            nursery.start_soon(settle)

        async def settle() -> None:
            assert server is not None
            await server.settled()
            collector.settled()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(_signals, server)
            await server.serve(started)
            nursery.cancel_scope.cancel()

    try:
        trio.run(main)
    except BaseExceptionGroup as group:
        if server is not None and server.failed_start:
            print(server.failed_start, file=sys.stderr)
        raise _first(group) from None
    if server is not None and server.timed_out:
        print("error: exit timeout expired, exiting immediately", file=sys.stderr, flush=True)
        _leave(1)  # instances' threads may hang in a model
    if server is not None and server.device_failed:
        _leave(1)  # the driver may hang too
    if server is not None and server.abandoned:
        _leave(0)  # those threads may hang in a model or a driver
    return 0


def _leave(status: int) -> NoReturn:
    """Ends the process without waiting for its threads. Processes of isolated models end too."""
    logs.settle()
    for kill in process_parts.kill:
        kill()
    os._exit(status)


def _look_before_sleeping(server: Server) -> None:
    """Has the loop look for the next request before it sleeps. With front ends, engine and front ends look for each other's
    messages instead. A loop that shares the process with other code of its embedder does not."""
    looks_ns = granted_ns(server.settings.busy_poll_us)
    if looks_ns and server.front_ends is None:
        server.loop.poller.busy_poll = BusyPoll(looks_ns, lambda: True, sockets=True)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error in a nursery's group that is no cancellation: the command reports it."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
