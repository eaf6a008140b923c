"""The health service grpc.health.v1. The state of every service is the readiness of the whole server, like in a Triton
server (docs/protocol/observed.md 2)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from neptrio._proto.grpc.health import v1
from neptrio.service import Verbs


class HealthHandlers(v1.HealthBase):
    """Check returns the state now. Watch sends it now and after each change, until the client or the server ends it."""

    def __init__(self, verbs: Verbs) -> None:
        self._verbs = verbs

    def _status(self) -> Any:
        states = v1.HealthCheckResponseServingStatus
        return states.SERVING if self._verbs.metadata.ready() else states.NOT_SERVING

    async def check(self, message: Any) -> v1.HealthCheckResponse:
        return v1.HealthCheckResponse(status=self._status())

    async def watch(self, message: Any) -> AsyncIterator[v1.HealthCheckResponse]:
        told = None
        notifier = self._verbs.metadata.readiness
        while True:
            seen = notifier.notified
            status = self._status()
            if status != told:
                told = status
                yield v1.HealthCheckResponse(status=status)
            await notifier.wait(seen)
