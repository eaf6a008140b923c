"""Names of versions and further names of models: the parameters `version_labels` and `aliases` (docs/model-repository.md).

A Triton server's ModelConfig has no fields for them, so they are texts: `stable=3,canary=4` and `prod,main`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from neptrio.config.isolation import parameter
from neptrio.errors import InvalidArgument
from neptrio.limits import shown

LABELS = "version_labels"
ALIASES = "aliases"
MOST = 64  # labels, and aliases, of a model
LONGEST = 128  # characters of one
LABEL = r"[A-Za-z_][A-Za-z0-9_.-]*"  # so none can be taken for a number
_LABEL = re.compile(LABEL)
_ALIAS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_VERSION = re.compile(r"[0-9]{1,19}")
HIGHEST = 1 << 63  # the numbers of versions are below, as in a Triton server


def is_label(text: str) -> bool:
    """Whether a version that a request names is a label, and not meant to be a number."""
    return _LABEL.fullmatch(text) is not None


def check_label(label: str) -> None:
    """Raises InvalidArgument for a text that no label can be."""
    if len(label) > LONGEST or not is_label(label):
        raise InvalidArgument(
            f"a version label has letters, digits, '_', '-' and '.', does not begin with a digit and is no longer than "
            f"{LONGEST} characters, got '{shown(label)}'"
        )


def check_alias(alias: str) -> None:
    """Raises InvalidArgument for a text that no alias can be."""
    if len(alias) > LONGEST or not _ALIAS.fullmatch(alias):
        raise InvalidArgument(
            f"an alias of a model has letters, digits, '_', '-' and '.', begins with a letter, a digit or '_' and is no "
            f"longer than {LONGEST} characters, got '{shown(alias)}'"
        )


def check_count(what: str, names: Iterable[str]) -> None:
    """Raises InvalidArgument where one model has too many."""
    count = len(set(names))
    if count > MOST:
        raise InvalidArgument(f"a model has at most {MOST} {what}, got {count}")


def parse_labels(text: str, what: str, removing: bool = False) -> dict[str, int | None]:
    """The labels of a text like `stable=3,canary=4`; with `removing` one without a number is to be removed (None). `what` is
    where the text stands, for the error. Raises InvalidArgument."""
    found: dict[str, int | None] = {}
    for part in _parts(text):
        label, equals, number = (piece.strip() for piece in part.partition("="))
        check_label(label)
        if label in found:
            raise InvalidArgument(f"{what} has the label '{label}' twice")
        if removing and equals and not number:
            found[label] = None
            continue
        if not equals or not _VERSION.fullmatch(number) or not 0 < int(number) < HIGHEST:
            raise InvalidArgument(
                f"{what} is a list like 'stable=3,canary=4' with the numbers of versions, got '{shown(part)}'"
            )
        found[label] = int(number)
    check_count("version labels", found)
    return found


def labels(config: Any) -> dict[str, int]:
    """Label -> the number of the version that it names. Raises InvalidArgument."""
    found = parse_labels(parameter(config, LABELS), f"parameter '{LABELS}'")
    return {label: number for label, number in found.items() if number is not None}


def aliases(config: Any) -> tuple[str, ...]:
    """The model's further names. Raises InvalidArgument."""
    found = tuple(dict.fromkeys(_parts(parameter(config, ALIASES))))
    for alias in found:
        check_alias(alias)
    check_count("aliases", found)
    return found


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")] if text.strip() else []


def take_over(config: Any, other: Any) -> None:
    """Puts labels and aliases of `other` into `config`, which says the same otherwise."""
    for key in (LABELS, ALIASES):
        if key in other.parameters:
            config.parameters[key].CopyFrom(other.parameters[key])
        elif key in config.parameters:
            del config.parameters[key]
