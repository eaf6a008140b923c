"""What the connections of one HTTP port have in common: who answers, who may ask, and their limits."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from neptrio.service import Services
from neptrio.service.access_log import AccessLog
from neptrio.service.request_limits import RequestLimits
from neptrio.transport.header_policy import HeaderPolicy
from neptrio.transport.origin_policy import OriginPolicy
from neptrio.transport.rest.app_call import App, AppCalls


@dataclass
class Port:
    """Is the same for all connections of a port.

    `only_app`: the app answers every request, whatever its path, and the limits of the REST port on clients do not hold; for
    the metrics port and the admin listener.
    """

    services: Services
    app: App
    policy: HeaderPolicy | None = None
    origins: OriginPolicy = field(default_factory=OriginPolicy)
    only_app: bool = False
    counted: bool = True  # large bodies are taken from the budget of all connections
    max_body: int = 0  # bytes that any body may have; 0: as --http-max-input-size says
    body_limit: Callable[[bytes], int] | None = None  # of a URL's body; None: the largest of all
    on_call: Callable[[socket.socket], object] | None = (
        None  # told of each call of the app, by its connection
    )
    calls: AppCalls = field(default_factory=AppCalls)
    logged: bool = True  # its requests are in the access log, if there is one

    def __post_init__(self) -> None:
        self.max_body = self.max_body or self.services.settings.http_max_input_size
        limits = self.services.request_limits
        self.access: AccessLog | None = self.services.access if self.logged else None
        self.limits: RequestLimits | None = limits if limits.on and not self.only_app else None

    @property
    def plain_tokens(self) -> bool:
        """Whether infer requests need nothing of their head but a token, if any: the fast path may take them."""
        plain = self.policy is None or self.policy.infers_by_token_alone()
        return plain and not self.only_app and self.limits is None
