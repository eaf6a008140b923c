"""Control verbs that a server with an admin listener (--admin-address) does not serve at its public ports.

They are the verbs for which a token needs the scope `operate` or `admin` (transport.header_policy): those that change
something, and recent traces, errors and lines of the log, which can hold what other clients sent. Reading settings stays where it was.
"""

from __future__ import annotations

from typing import Any

from neptrio.errors import Denied
from neptrio.service.auth_config import ADMIN, OPERATE, READ
from neptrio.transport.header_policy import METHOD_SCOPES, VERB_SCOPES, scope_of

CONTROL = (OPERATE, ADMIN)


def _refuse(what: str) -> None:
    raise Denied(f"{what} is served at the admin address only (--admin-address)")


def check_verb(verb: str, method: str) -> None:
    """Raises Denied if a REST verb (transport.rest.routes) with this HTTP method belongs to the admin listener."""
    scopes = VERB_SCOPES.get(verb, (READ,))
    if scope_of(scopes, method != "GET") in CONTROL:
        _refuse(verb.replace("_", " ") if len(scopes) == 1 else f"changing {verb.partition('_')[0]} settings")


def check_call(path: str, message: Any = None) -> None:
    """Raises Denied if a gRPC call belongs to the admin listener.

    `path` is /SERVICE/METHOD. Calls that read or change settings can be told apart only by their request `message`;
    without it they pass.
    """
    method = path.rpartition("/")[2]
    scopes = METHOD_SCOPES.get(method, (READ,))
    if scope_of(scopes, len(scopes) > 1 and message is not None and bool(message.settings)) in CONTROL:
        _refuse(method if len(scopes) == 1 else f"{method} with settings to change")
