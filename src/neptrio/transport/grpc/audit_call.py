"""What the audit log is told of a gRPC call."""

from __future__ import annotations

from typing import Any

from neptrio.errors import TritonError
from neptrio.service.audit import AuditLog
from neptrio.service.certificates import Certificate
from neptrio.transport.header_policy import MODEL_FIELDS, HeaderPolicy


def audit_call(
    audit: AuditLog,
    policy: HeaderPolicy | None,
    path: str,
    headers: list[tuple[bytes, bytes]],
    client: str,
    certificate: Certificate | None,
    message: Any,
    error: TritonError | None,
    model: str = "",
) -> None:
    """Tells the audit log what a call changed or why it was refused. `message` is its request, None if it has not come."""
    method = path.rpartition("/")[2]
    if error is None and hasattr(message, "settings") and not message.settings:
        return  # settings were only read
    field = MODEL_FIELDS.get(method)
    if field is not None and message is not None:
        model = getattr(message, field)
    audit.record(
        method,
        "grpc",
        client,
        "" if policy is None else policy.who(headers, certificate),
        certificate="" if certificate is None else certificate.subject,
        model=model,
        target=getattr(message, "name", "") if "SharedMemory" in method else "",
        error=error,
    )
