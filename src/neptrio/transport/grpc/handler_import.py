"""The handlers of all gRPC calls other than inference, whose modules are imported when the port already serves.

The problem: these modules take as long to import as the rest of the server, and nothing may open files meanwhile: clients
may have all descriptors. A lack of them passes, but it has two faces: files that cannot be opened, and packages that seem not to
be installed, because Python's search takes a folder that it could not read for an empty one, and remembers it.

Rules:
 1. A try that fails for either reason is made again, with what was remembered of folders forgotten.
 2. A package that is missing while descriptors are there, LASTING times, is missing: that ends the server.
"""

from __future__ import annotations

import importlib
import logging
from importlib.metadata import MetadataPathFinder
from typing import Any

import trio

from neptrio.loop import open_files, threads
from neptrio.service import Services, Verbs
from neptrio.transport.grpc.handlers import request_class

log = logging.getLogger("neptrio.grpc")

RETRY_S = 0.5  # between two tries
LASTING = 3


def all_handlers(services: Services, verbs: Verbs) -> dict[bytes, Any]:
    """The handlers by path. Imports their modules."""
    from neptrio.transport.grpc.service import servicers

    found = {
        path.encode(): handler
        for servicer in servicers(services, verbs)
        for path, handler in servicer.__mapping__().items()
    }
    # the first message of a class costs up to 0.2 s, which would otherwise stop the loop at the first calls
    for path, handler in found.items():
        request_class(path)
        handler.request_type.parse(b"")
        bytes(handler.reply_type())
    return found


async def imported(services: Services, verbs: Verbs) -> dict[bytes, Any]:
    """all_handlers() on a thread, tried until it works. Raises ImportError (rule 2)."""
    missing = 0
    while True:
        try:
            return await threads.run_surely(all_handlers, services, verbs, abandon_on_cancel=True)
        except (OSError, ImportError) as error:
            if isinstance(error, ImportError) and open_files.some_left():
                missing += 1
                if missing == LASTING:
                    raise
            log.warning("the control calls wait, their modules cannot be read: %s", error)
        await trio.sleep(RETRY_S)
        importlib.invalidate_caches()
        MetadataPathFinder().invalidate_caches()  # which that does from Python 3.12 on
