"""Which tensor of a configuration is which argument or result of a module: Triton's conventions.

Rules:
 1. Names that the file knows are taken as such, where all of a side are known.
 2. INPUT__0, INPUT__1: the number is the place. All names of a side have numbers, each once, or none has.
 3. Names that are neither are keys, where forward takes one dictionary of tensors. Else the order of the configuration counts.
 4. All arguments are needed; of the results a configuration may leave out what nobody asks for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NUMBERED = re.compile(r".+__(\d+)")


def numbers(names: list[str], kind: str) -> list[int] | None:
    """The number of each name; None where they have none. Raises ValueError when only some have."""
    found = [NUMBERED.fullmatch(name) for name in names]
    given = [int(match[1]) for match in found if match is not None]
    if not given:
        return None
    if len(given) != len(names) or len(set(given)) != len(given):
        raise ValueError(
            f"the {kind}s {', '.join(names)} must be numbered NAME__0, NAME__1, each once, or none of them"
        )
    return given


def chosen(names: list[str], known: list[list[str]], kind: str) -> list[int]:
    """The place of each name among those that a file knows. Raises ValueError."""
    table = {name: place for place, several in enumerate(known) for name in several}
    if all(name in table for name in names):
        places = [table[name] for name in names]
    else:
        places = numbers(names, kind) or list(range(len(names)))
    listed = ", ".join(several[0] for several in known)
    if len(set(places)) != len(places):
        raise ValueError(f"the {kind}s {', '.join(names)} name the same tensor twice; the file has {listed}")
    for name, place in zip(names, places, strict=True):
        if place >= len(known):
            raise ValueError(f"{kind} '{name}' is none of the file's {len(known)}: {listed}")
    return places


@dataclass
class Argument:
    """An argument of forward, as a module that is code says it."""

    name: str
    type: str = "Tensor"  # in the words of TorchScript
    needed: bool = True


def arrange(names: list[str], arguments: list[Argument]) -> Callable[[list[Any]], tuple[Any, Any]]:
    """A function that makes (args, kwargs) of the values of these inputs. Raises ValueError."""
    known = [argument.name for argument in arguments]
    if len(arguments) == 1 and names != known:
        kind = arguments[0].type
        places = numbers(names, "input")
        if kind.startswith("Dict[str, Tensor]") and places is None:
            return lambda values: ((dict(zip(names, values, strict=True)),), {})
        if kind == "List[Tensor]" or kind.startswith("Tuple[Tensor"):
            order = _inverse(places or list(range(len(names))), names)
            make: Any = list if kind.startswith("List") else tuple
            return lambda values: ((make([values[i] for i in order]),), {})
    if arguments and all(name in known for name in names):
        missing = [one.name for one in arguments if one.needed and one.name not in names]
        if missing:
            raise ValueError(f"forward needs '{missing[0]}', which the configuration has no input for")
        places = [known.index(name) for name in names]
        if max(places) >= len(names):  # one with a default is left out between others
            return lambda values: ((), dict(zip(names, values, strict=True)))
    else:
        places = numbers(names, "input") or list(range(len(names)))
    order = _inverse(places, names)
    least = sum(argument.needed for argument in arguments)
    if arguments and not least <= len(names) <= len(arguments):
        raise ValueError(
            f"forward takes {len(arguments)} arguments ({', '.join(known)}), the configuration has {len(names)} inputs"
        )
    return lambda values: ([values[i] for i in order], {})


def _inverse(places: list[int], names: list[str]) -> list[int]:
    """Which value comes first, which second. Raises ValueError when a place is left open."""
    if sorted(places) != list(range(len(names))):
        raise ValueError(
            f"the inputs {', '.join(names)} must be numbered NAME__0 to NAME__{len(names) - 1}, each once, or none of them"
        )
    return [places.index(i) for i in range(len(places))]


def pick(names: list[str], types: list[str]) -> Callable[[Any], list[Any]]:
    """A function that makes the values of these outputs of a result. `types`: what forward gives, in the words of
    TorchScript, [] where that is not known before. Raises ValueError."""
    places = numbers(names, "output") or list(range(len(names)))

    def check(there: int) -> None:
        if max(places) >= there:
            name = names[places.index(max(places))]
            raise ValueError(f"output '{name}' is none of the module's results: it gives {there}")

    if types:
        check(len(types))
        for name, place in zip(names, places, strict=True):
            if types[place] in ("int", "float", "bool", "str", "NoneType"):
                raise ValueError(f"output '{name}' is no tensor: the module gives {types[place]}")

    def picked(result: Any) -> list[Any]:
        if isinstance(result, dict):
            missing = [name for name in names if name not in result]
            if missing:
                raise ValueError(f"the module gives {', '.join(map(str, result))} and no '{missing[0]}'")
            return [result[name] for name in names]
        several = isinstance(result, tuple) or (
            isinstance(result, list) and not (result and isinstance(result[0], str))
        )
        listed = list(result) if several else [result]
        check(len(listed))
        return [listed[place] for place in places]

    return picked
