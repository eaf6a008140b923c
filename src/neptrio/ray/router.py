"""Which replica a request goes to: that of its sequence where Ray's proxy can see the sequence, else a free one.

What the proxy sees: a gRPC message whole, of an HTTP request the headers only. A client that names its session there
(x-session-id, or what RAY_SERVE_SESSION_ID_HEADER_KEY says) is sent to one replica too.

Every proxy has a router of its own, and they share nothing, so the choice is made by rendezvous hashing: of all replicas
the one with the highest hash of its id and the key. When replicas come or go, a few keys change their place; their
sequences do not: the replica that is asked passes the request on (forward.py). The router saves that detour.
"""

from __future__ import annotations

import pickle
import random
from hashlib import blake2b
from typing import Any

from ray.serve.request_router import LocalityMixin, PendingRequest, RequestRouter, RunningReplica

from neptrio.ray import sequence_key

ON_REQUEST = "_neptrio_key"  # attribute of a pending request: its key, once it is known


def weight(replica: str, key: str) -> bytes:
    """The replica with the highest weight has the key."""
    return blake2b(f"{replica}\0{key}".encode(), digest_size=8).digest()


class SequenceRouter(LocalityMixin, RequestRouter):
    """Keeps sequences together; spreads all other requests by the queue lengths of two random replicas."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas to try, best first."""
        if pending_request is not None:
            # without that Ray asks again at once when no replica has room, and the loop does nothing else
            pending_request.routing_context.should_backoff = True
        if len(candidate_replicas) < 2:
            return [candidate_replicas] if candidate_replicas else []
        if pending_request is not None:
            key = key_of(pending_request)
            if key:
                ranked = sorted(
                    candidate_replicas, key=lambda r: weight(r.replica_id.unique_id, key), reverse=True
                )
                return [[replica] for replica in ranked]
            near = self.apply_locality_routing(pending_request=pending_request)
            candidate_replicas = [r for r in candidate_replicas if r.replica_id in near] or candidate_replicas
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]


def key_of(request: PendingRequest) -> str:
    """What a request is routed by, "" for nothing."""
    known: str | None = getattr(request, ON_REQUEST, None)
    if known is None:
        known = request.metadata.session_id or _key_of_message(request)
        setattr(request, ON_REQUEST, known)
    return known


def _key_of_message(request: PendingRequest) -> str:
    if not request.metadata.is_grpc_request or request.metadata.call_method != "ModelInfer":
        return ""
    packed: Any = request.args[0] if request.args else None
    if not isinstance(packed, bytes) or sequence_key.NAME not in packed:
        return ""
    # Ray's own proxy, which this is a part of, has packed it
    message = getattr(pickle.loads(packed), "user_request_proto", None)
    return sequence_key.of_message(message) if isinstance(message, bytes) else ""
