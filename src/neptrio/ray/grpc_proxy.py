"""The gRPC services of the protocol for Ray's gRPC proxy: `grpc_servicer_functions=["neptrio.ray.add_servicers"]`.

The proxy calls a replica's method of the RPC's name. Messages stay bytes all the way: the engine decodes them.

grpc.health.v1.Health/Watch is left out, which its clients expect of some servers. A watch never ends by itself, and Ray
ends a replica gently only when its last call has ended; besides, Ray's proxy does not always tell a replica that the
client of a stream from the server has gone.
"""

from __future__ import annotations

from typing import Any

import grpc

from neptrio.codec.descriptors import pool

SERVICES = ("inference.GRPCInferenceService", "grpc.health.v1.Health")
LEFT_OUT = ("Watch",)


def methods() -> dict[str, tuple[str, bool, bool]]:
    """Method name -> path of the RPC, and whether client and server stream."""
    found: dict[str, tuple[str, bool, bool]] = {}
    for name in SERVICES:
        for method in pool().FindServiceByName(name).methods:
            if method.name not in LEFT_OUT:
                path = f"/{name}/{method.name}"
                found[method.name] = (path, method.client_streaming, method.server_streaming)
    return found


def add_servicers(servicer: Any, server: Any) -> None:
    """Adds the services to a server of grpc.aio, as generated add_..._to_server functions do."""
    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    for service in SERVICES:
        handlers = {
            name: kinds[streams](getattr(servicer, name))
            for name, (path, *flags) in methods().items()
            if path.startswith(f"/{service}/") and (streams := (flags[0], flags[1]))
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


class Message:
    """A message that is bytes already, for Ray, which asks messages for their bytes."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def SerializeToString(self) -> bytes:
        """The bytes."""
        return self._content
