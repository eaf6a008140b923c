"""Log files that are opened again by their names, since they were moved (SIGHUP)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from neptrio import logs

if TYPE_CHECKING:
    from neptrio.service.access_log import AccessLog
    from neptrio.service.audit import AuditLog

log = logging.getLogger("neptrio")


def reopen(*files: AccessLog | AuditLog) -> bool:
    """Opens the server's log and these again, and returns whether there is any. One that cannot be opened is told in the log, and goes on as it
    was; the others do not depend on it."""
    found = False
    for one in (logs.reopen, *(file.reopen for file in files)):
        try:
            found = one() is not False or found
        except OSError as error:
            found = True
            log.error("SIGHUP: a log file cannot be opened again, it goes on as it was: %s", error)
    return found
