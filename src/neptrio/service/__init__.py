"""One module per protocol verb group, shared by REST and gRPC. Transports only convert."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from neptrio.observe.custom_metrics import CustomMetrics

if TYPE_CHECKING:
    from neptrio.scheduling.base import LoopServices
    from neptrio.service.inference import InferenceService
    from neptrio.service.metadata import MetadataService
    from neptrio.service.repository import RepositoryService
    from neptrio.service.sequences import SequencesService
    from neptrio.service.statistics import StatisticsService
    from neptrio.settings import Settings


@dataclass
class Services:
    """Everything a transport may call."""

    settings: Settings
    loop: LoopServices
    inference: InferenceService
    metadata: MetadataService
    statistics: StatisticsService
    repository: RepositoryService
    sequences: SequencesService
    completions: Any = None  # the CompletionQueue: model threads reach the trio thread through it
    shared_memory: Any = None
    trace: Any = None
    logging: Any = None
    cache: Any = None
    custom_metrics: CustomMetrics = field(default_factory=CustomMetrics)
