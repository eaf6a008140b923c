"""GET v2/logging/recent (our extension): the lines that the server logged last.

The problem: the log is where the answer is, and it may hold what nobody else should see: paths, addresses of clients, what
models print. REST is open to whoever reaches its port unless something was set up. The choice: the log is told only where
its reader is known in some way.

Rules:
 1. It is told on loopback addresses and Unix sockets, at the admin listener, to clients with a token (scope `operate`), and
    to those that send the header of a restricted category `logging`. Elsewhere it is refused.
 2. What a terminal would obey is shown as escapes; JSON and the console make neither markup nor commands of a line.
 3. A server inside another program has no log of its own: that program decides what becomes of the records.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl

from neptrio import logs, terminal
from neptrio.addresses import is_loopback
from neptrio.errors import Denied, InvalidArgument, Unsupported
from neptrio.limits import shown
from neptrio.observe.log_tail import LEVELS, MOST
from neptrio.settings import Settings


class RecentLog:
    """The lines for clients that come by one listener."""

    def __init__(self, settings: Settings, host: str | None = None) -> None:
        """`host`: what that listener listens on, "" for a Unix socket, None where nobody knows."""
        self._settings = settings
        self._known = (
            (host is not None and (not host or is_loopback(host)))
            or settings.auth_config is not None
            or any("logging" in restriction.categories for restriction in settings.http_restricted_api)
        )

    def at(self, host: str) -> RecentLog:
        """The same for another listener."""
        return RecentLog(self._settings, host)

    def told(self, admin: bool = False) -> bool:
        """Whether a client there gets lines; `admin`: at the admin listener."""
        return (self._known or admin) and logs.tail() is not None

    def lines(self, query: str, admin: bool = False) -> dict[str, Any]:
        """The last lines, oldest first, and the number of the last one, whatever its level: what to ask after the next time.

        `query` is the URL's query string: `count=N` lines at most, the last ones; `level=warning`, that and worse;
        `after=NUMBER`, what came after that line. Raises Denied (rule 1), Unsupported (rule 3) and InvalidArgument.
        """
        if not (self._known or admin):
            raise Denied(
                "the log is told on loopback addresses, at the admin address (--admin-address), and to clients with a "
                "token (--auth-config)"
            )
        tail = logs.tail()
        if tail is None:
            raise Unsupported("this server is part of a program, which has the log")
        count, level, after = MOST, 0, 0
        for key, value in parse_qsl(query, keep_blank_values=True):
            if key == "level":
                if value not in LEVELS:
                    raise InvalidArgument(
                        f"logging/recent: level must be one of {', '.join(LEVELS)}, got '{shown(value)}'"
                    )
                level = LEVELS.index(value)
            elif key in ("count", "after"):
                if not (
                    value.isascii() and value.isdigit() and len(value) < 19 and int(value) + (key == "after")
                ):
                    least = 1 if key == "count" else 0
                    raise InvalidArgument(
                        f"logging/recent: {key} must be a number from {least} on, got '{shown(value)}'"
                    )
                count, after = (int(value), after) if key == "count" else (count, int(value))
            else:
                raise InvalidArgument(
                    f"logging/recent: unknown parameter '{shown(key)}', expected count, level or after"
                )
        last = tail.last  # before the lines: what comes meanwhile is told the next time, or now
        found = [line for line in tail.since(after) if line.level >= level]
        return {
            "lines": [
                {
                    "number": line.number,
                    "time": line.time_ms,
                    "level": LEVELS[line.level],
                    "text": terminal.shown(line.text),
                }
                for line in found[-count:]
            ],
            "last": max([last, *(line.number for line in found[-1:])]),
        }
