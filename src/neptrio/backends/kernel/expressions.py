"""Arithmetic over input shapes: the language in which a configuration gives grids, sizes and scalars.

The grammar, by recursive descent; there is no eval and no attribute access:

    expression = term { ("+" | "-") term }
    term       = factor { ("*" | "/" | "//" | "%") factor }
    factor     = "-" factor | number | name | function "(" expression { "," expression } ")"
               | "(" expression ")"
    name       = "batch" | TENSOR ".shape[" integer "]" | TENSOR ".size" | TENSOR ".rank"
               | TENSOR ".bytes" | "parameter." NAME

`/` divides as in C: two integers give an integer (rounded down), otherwise the result is a float. `//` and `%` round
down. Axis -1 is the last one. Names are resolved while parsing, so an unknown tensor, an axis out of range or a
missing parameter is an error at load. A parsed expression is a postfix program; plans are cached by shape, so it
runs once per distinct shape.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from neptrio.errors import InvalidArgument

T = TypeVar("T")
Number = int | float
MAX_LENGTH = 2000  # characters; any real launch is far shorter
MAX_DEPTH = 50  # of parentheses and signs
LIMIT = 1 << 63


def _ceil_div(a: Number, b: Number) -> Number:
    return -(-a // b)


def _next_pow2(a: Number) -> Number:
    return 1 if a <= 1 else 1 << (int(a) - 1).bit_length()


# name -> (fewest arguments, most arguments, function)
FUNCTIONS: dict[str, tuple[int, int, Callable[..., Number]]] = {
    "min": (2, 16, min),
    "max": (2, 16, max),
    "ceil_div": (2, 2, _ceil_div),
    "next_pow2": (1, 1, _next_pow2),
    "int": (1, 1, int),
    "float": (1, 1, float),
    "sqrt": (1, 1, math.sqrt),
}


def _divide(a: Number, b: Number) -> Number:
    return a // b if isinstance(a, int) and isinstance(b, int) else a / b


OPERATORS: dict[str, Callable[[Number, Number], Number]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": _divide,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
}

TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<op><<<|>>>|//|[-+*/%(),.;=:\[\]]))"
)


class Tokens:
    """The tokens of a text with their positions. Errors quote the text and point at the place."""

    def __init__(self, text: str, where: str) -> None:
        if len(text) > 100 * MAX_LENGTH:
            raise InvalidArgument(f"{where} is too long: {len(text)} characters")
        self.text = text
        self.where = where
        self.items: list[tuple[str, str, int]] = []
        at = 0
        end = len(text.rstrip())
        while at < end:
            found = TOKEN.match(text, at)
            if found is None or found.end() > end:
                at += len(text[at:]) - len(text[at:].lstrip())
                raise self.error(f"unexpected character '{text[at]}'", at)
            kind = found.lastgroup or ""
            self.items.append((kind, found.group(kind), found.start(kind)))
            at = found.end()
        self.at = 0

    def error(self, message: str, position: int | None = None) -> InvalidArgument:
        """An error at `position`, or at the current token."""
        if position is None:
            position = self.items[self.at][2] if self.at < len(self.items) else len(self.text)
        line = self.text.count("\n", 0, position) + 1
        near = self.text[position : position + 20].split("\n")[0]
        return InvalidArgument(f"{self.where}, line {line}: {message}, at '{near or 'the end'}'")

    def peek(self) -> str:
        """The current token's text, '' at the end."""
        return self.items[self.at][1] if self.at < len(self.items) else ""

    def kind(self) -> str:
        """The current token's kind: number, name, op, or '' at the end."""
        return self.items[self.at][0] if self.at < len(self.items) else ""

    def position(self) -> int:
        """Where the current token starts."""
        return self.items[self.at][2] if self.at < len(self.items) else len(self.text)

    def next(self) -> str:
        """Takes the current token."""
        text = self.peek()
        self.at += 1
        return text

    def take(self, text: str) -> bool:
        """Takes the current token if it is `text`; returns whether it was."""
        if self.peek() == text and text:
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        """Takes `text` or raises."""
        if not self.take(text):
            raise self.error(f"expected '{text}', got '{self.peek() or 'the end'}'")

    def several(self, part: Callable[[], T], end: str) -> list[T]:
        """What `part` reads, any number of times with commas between, up to `end`."""
        found: list[T] = []
        if not self.take(end):
            found.append(part())
            while self.take(","):
                found.append(part())
            self.expect(end)
        return found

    def name(self, what: str) -> str:
        """Takes a name or raises."""
        if self.kind() != "name":
            raise self.error(f"expected {what}, got '{self.peek() or 'the end'}'")
        return self.next()


@dataclass(frozen=True)
class Scope:
    """The names that an expression may use: tensors with their ranks and element sizes, and numeric parameters."""

    ranks: Mapping[str, int]
    item_sizes: Mapping[str, int] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Values:
    """The values of names in one execution: shapes and the batch size."""

    batch: int
    shapes: Mapping[str, Sequence[int]]
    item_sizes: Mapping[str, int]


@dataclass(frozen=True)
class Expression:
    """A parsed expression: its text and its postfix program."""

    text: str
    program: tuple[tuple[str, Any], ...]

    def evaluate(self, values: Values) -> Number:
        """The value for these shapes. Raises InvalidArgument for division by zero and for overflow."""
        stack: list[Number] = []
        try:
            for op, what in self.program:
                if op == "number":
                    stack.append(what)
                elif op == "operator":
                    b = stack.pop()
                    stack[-1] = OPERATORS[what](stack[-1], b)
                elif op == "call":
                    name, count = what
                    arguments = stack[-count:]
                    del stack[-count:]
                    stack.append(FUNCTIONS[name][2](*arguments))
                elif op == "negate":
                    stack[-1] = -stack[-1]
                elif op == "batch":
                    stack.append(values.batch)
                elif op == "shape":
                    tensor, axis = what
                    shape = values.shapes[tensor]
                    stack.append(shape[axis] if shape else 0)
                elif op == "rank":
                    stack.append(len(values.shapes[what]))
                else:
                    n = math.prod(values.shapes[what])
                    stack.append(n * values.item_sizes[what] if op == "bytes" else n)
                if isinstance(stack[-1], int) and not -LIMIT <= stack[-1] < LIMIT:
                    raise OverflowError("the value does not fit 64 bits")
        except (ZeroDivisionError, OverflowError, ValueError) as error:
            raise InvalidArgument(f"'{self.text}' has no value for these shapes: {error}") from None
        return stack[0]

    def constant(self) -> bool:
        """True when its value depends on no shape and no batch size."""
        return all(op in ("number", "operator", "call", "negate") for op, _ in self.program)


def constant(value: Number) -> Expression:
    """A number as an expression."""
    return Expression(str(value), (("number", value),))


def parse(text: str, scope: Scope, where: str) -> Expression:
    """Parses a whole text as one expression. Raises InvalidArgument that says where."""
    tokens = Tokens(text, where)
    made = parse_expression(tokens, scope)
    if tokens.peek():
        raise tokens.error(f"expected the end, got '{tokens.peek()}'")
    return made


def parse_expression(tokens: Tokens, scope: Scope) -> Expression:
    """Parses the expression at the tokens' position and leaves the tokens after it."""
    program: list[tuple[str, Any]] = []
    start = tokens.position()
    _expression(tokens, scope, program, 0)
    end = tokens.position()
    text = tokens.text[start:end].strip()
    if len(text) > MAX_LENGTH:
        raise tokens.error(
            f"an expression has {len(text)} characters, at most {MAX_LENGTH} are allowed", start
        )
    return Expression(text, tuple(program))


def _expression(t: Tokens, scope: Scope, out: list[tuple[str, Any]], depth: int) -> None:
    _term(t, scope, out, depth)
    while t.peek() in ("+", "-"):
        op = t.next()
        _term(t, scope, out, depth)
        out.append(("operator", op))


def _term(t: Tokens, scope: Scope, out: list[tuple[str, Any]], depth: int) -> None:
    _factor(t, scope, out, depth)
    while t.peek() in ("*", "/", "//", "%"):
        op = t.next()
        _factor(t, scope, out, depth)
        out.append(("operator", op))


def _factor(t: Tokens, scope: Scope, out: list[tuple[str, Any]], depth: int) -> None:
    if depth > MAX_DEPTH:
        raise t.error(f"more than {MAX_DEPTH} levels of nesting")
    if t.take("-"):
        _factor(t, scope, out, depth + 1)
        out.append(("negate", None))
    elif t.take("("):
        _expression(t, scope, out, depth + 1)
        t.expect(")")
    elif t.kind() == "number":
        text = t.next()
        value: Number = int(text) if text.isdigit() else float(text)
        if isinstance(value, int) and value >= LIMIT:
            raise t.error(f"the number {text} does not fit 64 bits")
        out.append(("number", value))
    elif t.kind() == "name":
        _name(t, scope, out, depth)
    else:
        raise t.error(f"expected a value, got '{t.peek() or 'the end'}'")


def _name(t: Tokens, scope: Scope, out: list[tuple[str, Any]], depth: int) -> None:
    position = t.position()
    name = t.next()
    if name in FUNCTIONS and t.take("("):
        fewest, most, _ = FUNCTIONS[name]
        count = 0
        while True:
            _expression(t, scope, out, depth + 1)
            count += 1
            if not t.take(","):
                break
        t.expect(")")
        if not fewest <= count <= most:
            expected = str(fewest) if fewest == most else f"{fewest} to {most}"
            raise t.error(f"{name}() takes {expected} arguments, got {count}", position)
        out.append(("call", (name, count)))
    elif name == "batch":
        out.append(("batch", None))
    elif name == "parameter":
        t.expect(".")
        key = t.name("a parameter's name")
        out.append(("number", _parameter(t, scope, key, position)))
    elif name in scope.ranks:
        t.expect(".")
        what = t.name("shape, size, rank or bytes")
        if what == "shape":
            t.expect("[")
            negative = t.take("-")
            if t.kind() != "number" or not t.peek().isdigit():
                raise t.error(f"expected an axis number, got '{t.peek() or 'the end'}'")
            axis = int(t.next()) * (-1 if negative else 1)
            t.expect("]")
            rank = scope.ranks[name]
            if not -rank <= axis < rank:
                raise t.error(f"'{name}' has {rank} dimensions, there is no axis {axis}", position)
            out.append(("shape", (name, axis)))
        elif what in ("size", "rank", "bytes"):
            out.append((what, name))
        else:
            raise t.error(f"expected shape, size, rank or bytes after '{name}.', got '{what}'", position)
    else:
        known = ", ".join(["batch", *scope.ranks, *(f"parameter.{p}" for p in scope.parameters)])
        raise t.error(f"unknown name '{name}' (known: {known})", position)


def _parameter(t: Tokens, scope: Scope, key: str, position: int) -> Number:
    text = scope.parameters.get(key)
    if text is None:
        known = ", ".join(scope.parameters) or "none"
        raise t.error(f"the config has no parameter '{key}' (it has: {known})", position)
    try:
        return int(text, 0)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise t.error(f"parameter '{key}' must be a number, got '{text}'", position)
    return value
