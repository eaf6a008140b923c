"""neptrio on Ray Serve: a deployment whose every replica hosts an engine (docs/ray.md).

    from ray import serve
    import neptrio.ray

    serve.run(neptrio.ray.app("models", num_replicas=3))

Needs the extra `ray`.
"""

from __future__ import annotations

try:
    from ray import serve as _serve  # noqa: F401
except ImportError as error:
    from neptrio import extras as _extras

    raise ImportError(f"neptrio.ray needs Ray Serve: {_extras.install('ray')}") from error

from neptrio.ray.app import GRPC_SERVICERS, app, build
from neptrio.ray.autoscaling import QueueDepthPolicy
from neptrio.ray.grpc_proxy import add_servicers
from neptrio.ray.replica import Replica
from neptrio.ray.router import SequenceRouter

__all__ = [
    "GRPC_SERVICERS",
    "QueueDepthPolicy",
    "Replica",
    "SequenceRouter",
    "add_servicers",
    "app",
    "build",
]
