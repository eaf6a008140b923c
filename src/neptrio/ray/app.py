"""Applications of Ray Serve: `app()` for programs, `build()` for configuration files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from neptrio.embedded.server import Server
from neptrio.ray.replica import Replica
from neptrio.ray.router import SequenceRouter

GRPC_SERVICERS = [
    "neptrio.ray.add_servicers"
]  # for serve.start(grpc_options={"grpc_servicer_functions": ...})
ENDING_SECONDS = 10.0  # of the graceful shutdown beside the drain: requests under way, unloading
MAX_ONGOING = 100

ServerSource = str | Path | Sequence[str | Path] | Callable[[], Server]


def app(
    server: ServerSource,
    *,
    settings: dict[str, Any] | None = None,
    drain_seconds: float = 20.0,
    share_sequences: bool = True,
    replica_control: bool = False,
    **deployment: Any,
) -> Any:
    """An application with one deployment, every replica of which hosts an engine. For serve.run().

    `server`: a model repository or several; or a function that returns a neptrio.Server, called in each replica; or
    "MODULE:NAME" of such a function or of a neptrio.Server.
    `settings`: of the engines, as for neptrio.Server; where they listen is decided here.
    `drain_seconds`: how long a replica that is taken away waits for its live sequences to end.
    `share_sequences`: replicas pass requests on to the one that has their sequence, over ports that their engines open
    on the node's address. False: only what Ray's router can see keeps a sequence together, and no port is open to
    other machines.
    `replica_control`: loading and unloading over the network is allowed. It changes the one replica that gets it.
    `deployment`: what serve.deployment() takes: name, num_replicas, autoscaling_config, ray_actor_options,
    max_ongoing_requests, user_config and so on.
    """
    options: dict[str, Any] = {
        "name": "neptrio",
        "max_ongoing_requests": MAX_ONGOING,
        "graceful_shutdown_timeout_s": drain_seconds + ENDING_SECONDS,
        "request_router_config": RequestRouterConfig(request_router_class=SequenceRouter),
    }
    if isinstance(server, Path):
        server = str(server)
    made = serve.deployment(**{**options, **deployment})(serve.ingress()(Replica))
    return made.bind(
        server if not isinstance(server, (list, tuple)) else [str(place) for place in server],
        settings=settings,
        drain_seconds=drain_seconds,
        share_sequences=share_sequences,
        replica_control=replica_control,
    )


def build(args: dict[str, Any]) -> Any:
    """The same for a Serve configuration file: `import_path: neptrio.ray:build`, `args`: the arguments of app()."""
    given = dict(args)
    if "server" not in given:
        raise ValueError("args.server is missing: a model repository, or MODULE:NAME of a neptrio.Server")
    return app(given.pop("server"), **given)
