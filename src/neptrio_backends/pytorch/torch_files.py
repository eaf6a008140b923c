"""Finds and loads files of PyTorch, and tells what they say of their inputs and outputs.

Rules:
 1. A file that torch.save() made of a module is a pickle: it is refused, with the two commands that convert it. Beside the
    source of its class (torch_source) it holds weights alone, and is read as such.
 2. What a file says of its tensors is read from it; the model is not run for that (torch_probe runs it for what files do not
    say). Reading is PyTorch's, in a process of the
    model's own: a file is as trusted as code.
"""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import torch_names
from torch_names import Argument
from torch_trees import Trees

NAMES = ("model.pt", "model.pt2")
AOTI = "torch_aoti"  # the platform of packages of AOTInductor in a Triton server
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


def _named(result: Any) -> list[tuple[str, Any]]:
    """The results of a module that is code, each with what a configuration may call it."""
    if isinstance(result, dict):
        return [(str(key), value) for key, value in result.items()]
    several = isinstance(result, tuple) or (
        isinstance(result, list) and not (result and isinstance(result[0], str))
    )
    return [(f"OUTPUT__{i}", value) for i, value in enumerate(result if several else [result])]


@dataclass
class Loaded:
    """A file's module: what to call, what makes its arguments of the values of named inputs, and the values of named outputs
    of its result. Both of the latter raise ValueError for names that do not fit the file."""

    call: Any
    arrange: Callable[[list[str]], Callable[[list[Any]], tuple[Any, Any]]]
    pick: Callable[[list[str]], Callable[[Any], list[Any]]]
    device: Any = None  # where it lies, where nobody said where to
    named: Callable[[Any], list[tuple[str, Any]]] = _named  # all results, with names
    takes: str = ""  # what is known of its arguments, for messages


def find(folder: str, filename: str = "", platform: str = "") -> str:
    """The path of a version's file. Raises ValueError."""
    there = [filename] if filename else [name for name in NAMES if os.path.isfile(os.path.join(folder, name))]
    if len(there) == 2:  # as in a Triton server, where the platform decides
        there = ["model.pt2" if platform == AOTI else "model.pt"]
    if not there or not os.path.isfile(os.path.join(folder, there[0])):
        raise ValueError(
            f"{folder} must hold one of {', '.join(NAMES)}, or a file that default_model_filename names; there is none"
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
    what = ", and it begins like an archive that was cut off" if start == b"PK" else ""
    raise ValueError(f"{path} is no file of TorchScript, torch.export or AOTInductor{what}")


def load(path: str, device: str | None = "cpu") -> Loaded:
    """The module in a file, on a device; None: where the file has it. Raises ValueError."""
    what = kind(path)
    try:
        if what == "script":
            return _script(path, device)
        if what == "inductor":
            from torch._inductor import aoti_load_package

            package = aoti_load_package(path)
            trees = _call_spec(package)
            if trees is None:
                return Loaded(package, *code([]))
            return Loaded(package, trees.arrange, trees.pick, named=trees.named, takes=trees.words)
        program = torch.export.load(path)
        if device not in ("cpu", None):
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, device)
        trees = trees_of(program)
        return Loaded(program.module(), trees.arrange, trees.pick, named=trees.named, takes=trees.words)
    except (RuntimeError, ValueError, OSError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error


def _script(path: str, device: str | None) -> Loaded:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is deprecated is told to whoever writes such files
        module = torch.jit.load(path, map_location=device).eval()
    schema = module.forward.schema
    arguments = [
        Argument(one.name, str(one.type), not one.has_default_value()) for one in schema.arguments[1:]
    ]  # without self
    given = schema.returns[0].type
    types = [str(one) for one in given.elements()] if isinstance(given, torch.TupleType) else []
    first = next(iter([*module.parameters(), *module.buffers()]), None)
    words = ", ".join(f"{one.name}: {one.type}" for one in arguments)
    return Loaded(module, *code(arguments, types), None if first is None else first.device, takes=words)


def code(arguments: list[Argument], types: list[str] | None = None) -> tuple[Any, Any]:
    """The two functions of Loaded for a module that is code. `types`: of its results, where they are known."""
    return (
        lambda names: torch_names.arrange(names, arguments),
        lambda names: torch_names.pick(names, types or []),
    )


def _call_spec(package: Any) -> Trees | None:
    """How a package of AOTInductor is called, None where the release cannot tell."""
    from torch.utils._pytree import treespec_loads

    told = getattr(getattr(package, "loader", None), "get_call_spec", None)
    if told is None:
        return None
    takes, gives = told()
    return Trees(treespec_loads(takes), treespec_loads(gives))


def trees_of(program: Any) -> Trees:
    """The structures of an exported program, with the graph's names and what in them is no tensor."""
    spec, wanted = program.call_spec, program.graph_signature
    trees = Trees(spec.in_spec, spec.out_spec)
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    for leaves, told in ((trees.arguments, wanted.user_inputs), (trees.results, wanted.user_outputs)):
        for leaf, name in zip(leaves, told, strict=True):
            leaf.tensor = isinstance(name, str) and isinstance(values.get(name), torch.Tensor)
            if leaf.tensor and leaves is trees.arguments:
                leaf.names.append(name)
            elif not isinstance(name, str):
                leaf.constant = name
    graph = {str(name) for name in wanted.user_inputs}
    for leaf, name in zip(trees.arguments, wanted.user_inputs, strict=True):
        leaf.names = [one for one in leaf.names if one == name or one not in graph]
    return trees


def signature(path: str) -> Signature | None:
    """What the file says of its tensors, None where it says too little."""
    if kind(path) != "export":
        return None
    program = torch.export.load(path)
    trees = trees_of(program)
    wanted = program.graph_signature
    values: dict[str, Any] = {node.name: node.meta.get("val") for node in program.graph.nodes}
    inputs, outputs = [], []
    for leaf, name in zip(trees.arguments, wanted.user_inputs, strict=True):
        if leaf.tensor:
            inputs.append((leaf.key or name, values[name]))
        elif isinstance(name, str):  # a number that was left open
            return None
    for name, leaf, node in zip(trees.result_names(), trees.results, wanted.user_outputs, strict=True):
        if leaf.tensor:  # results have names of the graph's own, which say nothing
            outputs.append((name, values[node]))
    if not inputs or not outputs or any(value.dtype not in DATATYPES for _, value in (*inputs, *outputs)):
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

    return Signature([row(*one) for one in inputs], [row(*one) for one in outputs], rows)
