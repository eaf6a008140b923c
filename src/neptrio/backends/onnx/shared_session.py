"""The session that several instances of a model version run at the same time (config/session_sharing.py says which).

Rules:
 1. Who initializes first makes it, on the own thread, while the others wait. Where that fails the next one tries.
 2. The last that is finalized closes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class SharedSession:
    """The session of one model version. Any thread."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._session: Any = None
        self._users = 0

    def acquire(self) -> Any:
        """The session, to be released once. Raises what making it raises."""
        with self._lock:
            if self._session is None:
                self._session = self._make()
            self._users += 1
            return self._session

    def release(self) -> None:
        """Closes the session where nobody else has it."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            session, self._session = self._session, None
        session.close()
