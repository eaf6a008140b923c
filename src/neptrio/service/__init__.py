"""The logic of the protocol's verbs, one module per group, shared by REST and gRPC, which only convert messages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from neptrio.service.changes import Changes

if TYPE_CHECKING:
    from neptrio.codec.inflate_budget import InflateBudget
    from neptrio.execution.admission import Admission
    from neptrio.loop.workers import Workers
    from neptrio.observe.custom_metrics import CustomMetrics
    from neptrio.scheduling.base import LoopServices
    from neptrio.scheduling.response_cache import Cache
    from neptrio.service.access_log import AccessLog
    from neptrio.service.audit import AuditLog
    from neptrio.service.connections import Connections
    from neptrio.service.held_bytes import HeldBytes
    from neptrio.service.logging import LoggingService
    from neptrio.service.metadata import MetadataService
    from neptrio.service.recent_log import RecentLog
    from neptrio.service.repository import RepositoryService
    from neptrio.service.request_limits import RequestLimits
    from neptrio.service.sequences import SequencesService
    from neptrio.service.shared_memory import SharedMemoryService
    from neptrio.service.statistics import StatisticsService
    from neptrio.service.tokens import Clients
    from neptrio.service.trace import TraceService
    from neptrio.settings import Settings


@dataclass(frozen=True)
class Services:
    """What a request needs on its way from its bytes to admission and back. A front end has all of it."""

    settings: Settings
    loop: LoopServices
    admission: Admission
    workers: Workers
    inflating: InflateBudget
    connections: Connections
    request_limits: RequestLimits
    held: HeldBytes
    tokens: Clients | None
    audit: AuditLog | None
    shared_memory: SharedMemoryService
    access: AccessLog | None = None

    def logs(self) -> list[AccessLog | AuditLog]:
        """Those of requests and changes that there are: opened again on SIGHUP, closed at the end."""
        return [each for each in (self.access, self.audit) if each is not None]


@dataclass(frozen=True)
class Verbs:
    """What else clients can ask of a server. Front ends pass it on to the engine."""

    metadata: MetadataService
    statistics: StatisticsService
    repository: RepositoryService
    sequences: SequencesService
    trace: TraceService
    logging: LoggingService
    recent_log: RecentLog
    cache: Cache | None
    custom_metrics: CustomMetrics
    changes: Changes = field(default_factory=Changes)

    def at(self, host: str) -> Verbs:
        """The same for clients that come by a listener on `host`, "" for a Unix socket: what they may do depends on it."""
        return replace(self, repository=self.repository.at(host), recent_log=self.recent_log.at(host))
