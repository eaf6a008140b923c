"""Which tensor of a configuration is which argument or result of a module: Triton's conventions.

Rules:
 1. INPUT__0, INPUT__1: the number is the argument's place. All names of a side have numbers, each once, from 0, or none has.
 2. Names of forward's arguments are taken as such, where all inputs are named so.
 3. Names that are neither are keys, where forward takes one dictionary of tensors. Else the order of the configuration counts.
"""

from __future__ import annotations

import re

NUMBERED = re.compile(r".+__(\d+)")


def places(names: list[str], kind: str) -> list[int] | None:
    """The place of each name by its number; None where they have none. Raises ValueError when only some have."""
    found = [NUMBERED.fullmatch(name) for name in names]
    numbers = [int(match[1]) for match in found if match is not None]
    if not numbers:
        return None
    if sorted(numbers) != list(range(len(names))):
        raise ValueError(
            f"the {kind}s {', '.join(names)} must be numbered NAME__0 to NAME__{len(names) - 1}, each once, or none of them"
        )
    return numbers


def argument_places(names: list[str], arguments: list[tuple[str, str]]) -> list[int] | None:
    """The place of each input among forward's arguments; None: they are keys of its one dictionary. Raises ValueError."""
    known = [name for name, _ in arguments]
    if arguments and all(name in known for name in names):
        return [known.index(name) for name in names]
    numbered = places(names, "input")
    if numbered is not None:
        return numbered
    if len(arguments) == 1 and arguments[0][1].startswith("Dict[str, Tensor]"):
        return None
    return list(range(len(names)))
