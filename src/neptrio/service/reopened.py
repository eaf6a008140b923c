"""Log files that are opened again by their names, since they were moved (SIGHUP).

Opening a file waits for its disk, so the loop has it done by a thread.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from neptrio import logs
from neptrio.loop import threads

if TYPE_CHECKING:
    from neptrio.service.access_log import AccessLog
    from neptrio.service.audit import AuditLog

log = logging.getLogger("neptrio")


async def reopen_elsewhere(*files: AccessLog | AuditLog) -> bool:
    """Has a thread do what reopen() does. Whoever waits for it may be cancelled."""
    return await threads.run_surely(reopen, *files, abandon_on_cancel=True)


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
