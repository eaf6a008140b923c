"""Signatures for people: help(), inspect and editors at a prompt show each option with its type and default.

The problem: many methods take the same options, a server a hundred settings. Written out in each signature, they would differ
one day. The choice: type checkers read them from a TypedDict (Unpack), and what a program asks a function for is made of it here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_type_hints

Function = TypeVar("Function", bound=Callable[..., Any])


def spelled_out(options: Any, defaults: Mapping[str, Any]) -> Callable[[Function], Function]:
    """The decorator of a function whose last parameter is `**name: Unpack[options]`: its signature has one for each option."""
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=kind)
        for name, kind in get_type_hints(options).items()
    ]

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        *own, last = signature.parameters.values()
        if last.kind is not inspect.Parameter.VAR_KEYWORD:
            raise TypeError(f"{function.__qualname__} takes no options")
        made = signature.replace(parameters=[*own, *added])
        function.__signature__ = made  # type: ignore[attr-defined]
        return function

    return decorate
