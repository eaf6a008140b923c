"""Tensors that lie in memory which another process can still write to.

The problem: a large output of a model in a process of its own is looked at where it lies. Its elements may change at any
moment, also between the check of an index and its use, and the code of a model in the server's process then reads or
writes anywhere. The choice: such a tensor is copied when it becomes the input of a model that runs in the server's process.
Answers to clients are not copied: nobody computes an address from them.

Rules:
 1. Who makes an owner of such memory declares its type here.
 2. Whatever hands tensors of one model to another, the steps of ensembles and the calls of models, does so through
    execution.foreign_inputs, which copies them.
"""

from __future__ import annotations

from typing import Any

from neptrio.request.infer_request import Tensor

_owners: set[type] = set()


def declare(*kinds: type) -> None:
    """Says that tensors whose `owner` has one of these types lie in memory that another process can write to."""
    _owners.update(kinds)


def is_foreign(tensor: Tensor) -> bool:
    """Whether another process can write to the tensor's elements."""
    owner: Any = tensor.owner
    while isinstance(owner, (Tensor, memoryview)):
        owner = owner.owner if isinstance(owner, Tensor) else owner.obj
    return type(owner) in _owners


def among(tensors: list[Tensor]) -> bool:
    """Whether another process can write to any of them."""
    return any([is_foreign(tensor) for tensor in tensors])


def runs_here(model: Any) -> bool:
    """Whether code of the model runs in this process: not if its instances have processes, or (ensembles) it has none."""
    pool = getattr(model, "pool", None)
    return pool is None or any([i.backend.in_process for i in pool.instances])
