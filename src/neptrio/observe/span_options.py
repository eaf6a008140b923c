"""Options of mode opentelemetry: where spans are sent, and how they are batched."""

from __future__ import annotations

from dataclasses import dataclass

SERVICE_NAME = "triton-inference-server"  # the default of the resource attribute service.name


@dataclass(frozen=True)
class SpanOptions:
    """The options of --trace-config=opentelemetry,KEY=VALUE."""

    url: str = "http://localhost:4318/v1/traces"
    resource: tuple[tuple[str, str], ...] = ()
    max_queue_size: int = 2048  # spans waiting to be sent; beyond that, spans are dropped
    schedule_delay_ms: int = 5000
    max_export_batch_size: int = 512

    def attributes(self) -> dict[str, str]:
        """The attributes of the OpenTelemetry resource."""
        return {"service.name": SERVICE_NAME, **dict(self.resource)}

    def shown(self) -> dict[str, str]:
        """The options in the form of a trace/setting reply."""
        shown = {"url": self.url}
        if self.resource:
            shown["resource"] = ",".join(f"{key}={value}" for key, value in self.resource)
        return {
            **shown,
            "bsp_schedule_delay": str(self.schedule_delay_ms),
            "bsp_max_export_batch_size": str(self.max_export_batch_size),
            "bsp_max_queue_size": str(self.max_queue_size),
        }
