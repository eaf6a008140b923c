"""Finds and loads files of PyTorch, and tells what they say of their inputs and outputs.

Rules:
 1. A file that torch.save() made of a module is a pickle: it is refused, with the two commands that convert it.
 2. What a file says of its tensors is read from it; the model is not run for that. Reading is PyTorch's, in a process of the
    model's own: a file is as trusted as code.
"""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass, field
from typing import Any

import torch

NAMES = ("model.pt", "model.pt2")
DATATYPES = {
    torch.bool: "TYPE_BOOL", torch.uint8: "TYPE_UINT8", torch.int8: "TYPE_INT8", torch.int16: "TYPE_INT16",
    torch.int32: "TYPE_INT32", torch.int64: "TYPE_INT64", torch.float16: "TYPE_FP16", torch.float32: "TYPE_FP32",
    torch.float64: "TYPE_FP64", torch.bfloat16: "TYPE_BF16",
}  # fmt: skip


@dataclass
class Signature:
    """What a file says of its tensors: (name, data_type, dims), the dims with -1; and whether the first one is a batch."""

    inputs: list[tuple[str, str, list[int]]] = field(default_factory=list)
    outputs: list[tuple[str, str, list[int]]] = field(default_factory=list)
    rows: int = 0  # the most rows of a batch, 0 where it has none


@dataclass
class Loaded:
    """A file's module, to be called."""

    call: Any
    arguments: list[tuple[str, str]] = field(
        default_factory=list
    )  # (name, TorchScript's type) of forward, if known


def find(folder: str, filename: str = "") -> str:
    """The path of a version's file. Raises ValueError."""
    there = [filename] if filename else [name for name in NAMES if os.path.isfile(os.path.join(folder, name))]
    if len(there) != 1 or not os.path.isfile(os.path.join(folder, there[0])):
        raise ValueError(
            f"{folder} must hold one of {', '.join(NAMES)}, or a file that default_model_filename names; "
            f"there is {' and '.join(there) if len(there) > 1 else 'none'}"
        )
    return os.path.join(folder, there[0])


def kind(path: str) -> str:
    """ "script", "export" or "inductor". Raises ValueError for anything else."""
    names = []
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    if any("/data/aotinductor/" in name and name.endswith(".so") for name in names):
        return "inductor"
    if any("/models/" in name or "serialized_exported_program" in name for name in names):
        return "export"
    if any("/code/" in name for name in names):
        return "script"
    with open(path, "rb") as file:
        start = file.read(2)
    if any(name.endswith("data.pkl") for name in names) or start[:1] == b"\x80":
        raise ValueError(
            f"{path} was made by torch.save(): it is a pickle, which runs whatever code is in it and needs the classes of "
            "whoever wrote it. Where the model was trained, write another file: "
            "torch.export.save(torch.export.export(model.eval(), (example,)), 'model.pt2') or "
            "torch.jit.script(model.eval()).save('model.pt')"
        )
    raise ValueError(f"{path} is no file of TorchScript, torch.export or AOTInductor")


def load(path: str, device: str = "cpu") -> Loaded:
    """The module in a file. Raises ValueError."""
    what = kind(path)
    try:
        if what == "script":
            module = torch.jit.load(path, map_location=device).eval()
            schema = module.forward.schema.arguments[1:]  # without self
            return Loaded(module, [(argument.name, str(argument.type)) for argument in schema])
        if what == "inductor":
            from torch._inductor import aoti_load_package

            return Loaded(aoti_load_package(path))
        program = torch.export.load(path)
        if device != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, device)
        names = [(name, "Tensor") for name in program.graph_signature.user_inputs]
        return Loaded(program.module(), names)
    except (RuntimeError, ValueError, OSError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error


def signature(path: str) -> Signature | None:
    """What the file says of its tensors, None where it says too little."""
    if kind(path) != "export":
        return None
    program = torch.export.load(path)
    values: dict[str, Any] = {node.name: node.meta.get("val") for node in program.graph.nodes}
    wanted = program.graph_signature
    inputs: list[tuple[str, Any]] = [(name, values.get(name)) for name in wanted.user_inputs]
    outputs: list[tuple[str, Any]] = [(name, values.get(name)) for name in wanted.user_outputs]
    for _, value in (*inputs, *outputs):
        if not isinstance(value, torch.Tensor) or value.dtype not in DATATYPES:
            return None
    firsts = {str(value.shape[0]) if value.dim() else "" for _, value in (*inputs, *outputs)}
    (first,) = firsts if len(firsts) == 1 else ("",)
    rows = 0
    for symbol, limits in program.range_constraints.items():
        if str(symbol) == first:
            rows = int(limits.upper) if limits.upper < 1 << 31 else 1 << 31
    skip = 1 if rows else 0

    def row(name: str, value: Any) -> tuple[str, str, list[int]]:
        dims = [size if isinstance(size, int) else -1 for size in value.shape[skip:]]
        return name, DATATYPES[value.dtype], dims

    # results have names of the graph's own, which say nothing
    named = [row(f"OUTPUT__{i}", value) for i, (_, value) in enumerate(outputs)]
    return Signature([row(name, value) for name, value in inputs], named, rows)
