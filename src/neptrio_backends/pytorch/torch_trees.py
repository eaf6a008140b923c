"""Structures that modules of torch.export and AOTInductor take and give: nested lists, tuples and dictionaries of tensors.

The problem: a request has named tensors side by side, and the module wants them as it was exported with, in its own nesting.
The choice: the file says the nesting of both sides; each tensor in it has a number, in the order of the file, and names.

Rules:
 1. The names of a tensor: that of the graph (x, pair_0); its way as a Triton server writes it (ARGS[0], ARGS[0][key],
    KWARGS[key], RESULT, RESULT[1], RESULT[key]); and its key in a dictionary, where no other tensor has the same.
 2. What was no tensor when the module was exported is given again as it was then.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch.utils._pytree as pytree

from torch_names import chosen


@dataclass
class Leaf:
    """A tensor of a structure, or what stands for one."""

    names: list[str]  # the first one is for messages
    tensor: bool = True
    constant: Any = None  # what is no tensor
    key: str = ""  # of a dictionary that it alone has

    @property
    def name(self) -> str:
        """What to call it."""
        return self.names[0]


def _way(path: Any) -> tuple[str, str]:
    """([0][key], key) of a leaf; the key is empty where the last step is none."""
    steps = [getattr(step, "key", getattr(step, "name", getattr(step, "idx", None))) for step in path]
    key = steps[-1] if steps and isinstance(steps[-1], str) else ""
    return "".join(f"[{step}]" for step in steps), key


def _leaves(spec: Any) -> list[tuple[str, str]]:
    whole = spec.unflatten(list(range(spec.num_leaves)))
    found, _ = pytree.tree_flatten_with_path(whole)
    return [_way(path) for path, _ in found]


def _with_keys(leaves: list[Leaf], keys: list[str]) -> list[Leaf]:
    count = Counter(keys)
    taken = {name for leaf in leaves for name in leaf.names}
    for leaf, key in zip(leaves, keys, strict=True):
        if key and count[key] == 1:
            leaf.key = key
            if key not in taken:
                leaf.names.append(key)
    return leaves


def arguments_of(spec: Any) -> list[Leaf]:
    """The leaves of the structure (args, kwargs)."""
    leaves, keys = [], []
    for way, key in _leaves(spec):
        inside = way[3:]  # without [0] and [1]
        names = [f"ARGS{inside}"] if way.startswith("[0]") else [f"KWARGS{inside}"]
        if names[0].startswith("KWARGS") and inside.count("[") == 1:
            names.append(f"KWARGS{key}")  # the way of Triton's first release that had it
        leaves.append(Leaf(names))
        keys.append(key)
    return _with_keys(leaves, keys)


def results_of(spec: Any) -> list[Leaf]:
    """The leaves of a result."""
    found = _leaves(spec)
    return _with_keys([Leaf([f"RESULT{way}"]) for way, _ in found], [key for _, key in found])


@dataclass
class Trees:
    """Both sides of a module. See torch_files.Loaded for what the functions are for."""

    takes: Any  # TreeSpec of (args, kwargs)
    gives: Any  # TreeSpec of the result
    arguments: list[Leaf] = field(init=False)
    results: list[Leaf] = field(init=False)

    def __post_init__(self) -> None:
        self.arguments, self.results = arguments_of(self.takes), results_of(self.gives)

    def arrange(self, names: list[str]) -> Any:
        """A function that makes (args, kwargs) of the values of these inputs. Raises ValueError."""
        wanted = [i for i, leaf in enumerate(self.arguments) if leaf.tensor]
        places = chosen(names, [self.arguments[i].names for i in wanted], "input")
        if len(names) != len(wanted):
            listed = ", ".join(self.arguments[i].name for i in wanted)
            raise ValueError(
                f"the file takes {len(wanted)} tensors ({listed}), the configuration has {len(names)} inputs"
            )
        if all(leaf.tensor and leaf.name == f"ARGS[{i}]" for i, leaf in enumerate(self.arguments)):
            order = [places.index(i) for i in range(len(places))]  # nothing is nested
            return lambda values: ([values[i] for i in order], {})
        constants = [leaf.constant for leaf in self.arguments]
        where = [wanted[place] for place in places]

        def arranged(values: list[Any]) -> tuple[Any, Any]:
            flat = list(constants)
            for place, value in zip(where, values, strict=True):
                flat[place] = value
            args, kwargs = self.takes.unflatten(flat)
            return args, kwargs

        return arranged

    def pick(self, names: list[str]) -> Any:
        """A function that makes the values of these outputs of a result. Raises ValueError."""
        places = chosen(names, [leaf.names for leaf in self.results], "output")
        if self.results[0].name == "RESULT":
            return lambda result: [result]
        if (
            all(leaf.name == f"RESULT[{i}]" for i, leaf in enumerate(self.results))
            and not self.results[0].key
        ):
            return lambda result: [result[place] for place in places]

        def picked(result: Any) -> list[Any]:
            flat = pytree.tree_leaves(result)
            return [flat[place] for place in places]

        return picked

    @property
    def words(self) -> str:
        """The arguments, for messages."""
        return ", ".join(leaf.name for leaf in self.arguments if leaf.tensor)

    def result_names(self) -> list[str]:
        """What to call the results: their keys in a dictionary where all of them have one, else their numbers."""
        keyed = all(leaf.key for leaf in self.results if leaf.tensor)
        return [leaf.key if keyed and leaf.key else f"OUTPUT__{i}" for i, leaf in enumerate(self.results)]

    def named(self, result: Any) -> list[tuple[str, Any]]:
        """All tensors of a result, each with what to call it."""
        found = zip(self.result_names(), pytree.tree_leaves(result), strict=True)
        return [(name, value) for name, value in found if hasattr(value, "dtype")]
