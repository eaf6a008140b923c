"""The response cache: outputs of deterministic models, kept by a hash of the inputs. Cache is what all caches have in common.

ResponseCache is the server's own: when the byte budget is full, least recently used entries are dropped. Every byte of the
tensors counts, and a fixed overhead per entry and tensor, so `used_bytes` never exceeds `total_bytes`.
Errors are never cached (docs/protocol/rules.md E3.6 and docs/protocol/README.md, deviation 6).
"""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass

from neptrio.request.infer_request import InferRequest, Tensor

ENTRY_OVERHEAD_BYTES = 160  # the key, its place in the table and the entry itself
TENSOR_OVERHEAD_BYTES = 120


@dataclass(frozen=True)
class CacheStatistics:
    """Counts since the server started, and what the cache holds."""

    entries: int
    used_bytes: int
    total_bytes: int
    lookups: int
    hits: int
    misses: int
    evictions: int
    lookup_ns: int
    insertion_ns: int

    @property
    def utilization(self) -> float:
        """The used share of the budget, from 0 to 1."""
        return self.used_bytes / self.total_bytes if self.total_bytes else 0.0


def request_key(request: InferRequest, name: str, version: str) -> bytes:
    """The hash of model, version and inputs. Id, parameters and requested outputs are no part of it."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{len(name)}:{name}:{version}".encode())
    for tensor in sorted(request.inputs, key=_name):
        own = tensor.name.encode()
        rank = len(tensor.shape)
        head = struct.pack(f"<IIQI{rank}q", len(own), tensor.dtype, tensor.nbytes, rank, *tensor.shape)
        digest.update(head)
        digest.update(own)
        digest.update(tensor)
    return digest.digest()


def _name(tensor: Tensor) -> str:
    return tensor.name


class Cache(ABC):
    """Output tensors by request key."""

    def __init__(self, coalesce: bool) -> None:
        self.coalesce = coalesce  # identical requests in flight share one execution (see scheduling.caching)
        self._lookups = self._hits = 0
        self._lookup_ns = self._insertion_ns = 0

    @abstractmethod
    def insert(self, key: bytes, outputs: list[Tensor]) -> bool:
        """Stores copies of `outputs`. Whether they are stored now; the caller tells spent() how long that took."""

    @abstractmethod
    def statistics(self) -> CacheStatistics:
        """The current numbers."""

    def scope(self, version: str, load: int) -> str:
        """What keys of a model's version begin with, so that a load (each has a number) finds only answers that are its own."""
        return f"{version}/{load}"

    def spent(self, lookup_ns: int, insertion_ns: int) -> None:
        """Adds to the lookup and insertion times that the metrics report."""
        self._lookup_ns += lookup_ns
        self._insertion_ns += insertion_ns


class ResponseCache(Cache):
    """Keeps tensors up to a number of bytes; the least recently used go first."""

    def __init__(self, total_bytes: int, coalesce: bool = False) -> None:
        super().__init__(coalesce)
        self.total_bytes = total_bytes
        self._entries: OrderedDict[bytes, tuple[list[Tensor], int]] = OrderedDict()
        self._used = 0
        self._evictions = 0

    def lookup(self, key: bytes, wanted: frozenset[str]) -> list[Tensor] | None:
        """The outputs stored under `key`, if all `wanted` ones are among them, else None. A use of the entry."""
        self._lookups += 1
        entry = self._entries.get(key)
        if entry is None or not wanted <= {t.name for t in entry[0]}:
            return None
        self._entries.move_to_end(key)
        self._hits += 1
        return entry[0]

    def insert(self, key: bytes, outputs: list[Tensor]) -> bool:
        """Stores copies of `outputs`. Returns False when they were stored already or do not fit."""
        size = ENTRY_OVERHEAD_BYTES + sum(TENSOR_OVERHEAD_BYTES + t.nbytes for t in outputs)
        old = self._entries.get(key)
        if old is not None and {t.name for t in outputs} <= {t.name for t in old[0]}:
            return False
        if size > self.total_bytes:
            return False
        if old is not None:
            self._used -= old[1]
            del self._entries[key]
        while self._used + size > self.total_bytes:
            _key, (_outputs, freed) = self._entries.popitem(last=False)
            self._used -= freed
            self._evictions += 1
        # copied, because the originals may be views of a batch's large buffer or of the client's message
        kept = [Tensor(t.name, t.dtype, t.shape, t.tobytes()) for t in outputs]
        self._entries[key] = (kept, size)
        self._used += size
        return True

    def statistics(self) -> CacheStatistics:
        """The current numbers."""
        return CacheStatistics(
            entries=len(self._entries),
            used_bytes=self._used,
            total_bytes=self.total_bytes,
            lookups=self._lookups,
            hits=self._hits,
            misses=self._lookups - self._hits,
            evictions=self._evictions,
            lookup_ns=self._lookup_ns,
            insertion_ns=self._insertion_ns,
        )
