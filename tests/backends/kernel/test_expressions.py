"""The expression language: values, and errors that say what and where."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neptrio.backends.kernel.expressions import Scope, Values, parse
from neptrio.errors import InvalidArgument

SCOPE = Scope({"X": 3, "Y": 1}, {"X": 4, "Y": 2}, {"eps": "1e-5", "width": "0x10", "word": "abc"})
VALUES = Values(5, {"X": (5, 7, 9), "Y": (5,)}, {"X": 4, "Y": 2})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("7 / 2", 3),
        ("7 // 2", 3),
        ("7 % 4", 3),
        ("7.0 / 2", 3.5),
        ("-3 + --2", -1),
        ("batch", 5),
        ("X.shape[0]", 5),
        ("X.shape[-1]", 9),
        ("X.size", 315),
        ("X.bytes", 1260),
        ("Y.rank + X.rank", 4),
        ("ceil_div(X.size, 256)", 2),
        ("ceil_div(-7, 2)", -3),
        ("min(3, batch, 4) + max(1, 2)", 5),
        ("next_pow2(X.shape[2])", 16),
        ("next_pow2(0)", 1),
        ("parameter.width", 16),
        ("parameter.eps", 1e-5),
        ("int(2.9) + float(1)", 3.0),
        ("sqrt(X.shape[1] + 2)", 3.0),
        ("1.5e2", 150.0),
    ],
)
def test_values(text: str, value: float) -> None:
    got = parse(text, SCOPE, "here").evaluate(VALUES)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a value, got 'the end'"),
        ("1 +", "expected a value, got 'the end'"),
        ("(1", "expected ')', got 'the end'"),
        ("1 2", "expected the end, got '2'"),
        ("Z.size", "unknown name 'Z' (known: batch, X, Y, parameter.eps"),
        ("X", "expected '.', got 'the end'"),
        ("X.dtype", "expected shape, size, rank or bytes after 'X.', got 'dtype'"),
        ("X.shape[3]", "'X' has 3 dimensions, there is no axis 3"),
        ("X.shape[batch]", "expected an axis number, got 'batch'"),
        ("min(1)", "min() takes 2 to 16 arguments, got 1"),
        ("ceil_div(1, 2, 3)", "ceil_div() takes 2 arguments, got 3"),
        ("parameter.none", "the config has no parameter 'none' (it has: eps, width, word)"),
        ("parameter.word", "parameter 'word' must be a number, got 'abc'"),
        ("1 $ 2", "unexpected character '$'"),
        ("__import__('os')", "unexpected character '''"),
        ("open(1)", "unknown name 'open'"),
        ("9999999999999999999", "does not fit 64 bits"),
        ("(" * 60 + "1" + ")" * 60, "more than 50 levels of nesting"),
        ("1" + " + 1" * 600, "characters, at most 2000 are allowed"),
    ],
)
def test_errors(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as info:
        parse(text, SCOPE, "parameter 'kernels'")
    assert message in str(info.value) and str(info.value).startswith("parameter 'kernels', line 1: ")


@pytest.mark.parametrize(
    "text", ["1 / 0", "1 // (batch - 5)", "1 % 0", "sqrt(0 - 1)", "9000000000000000000 * 4"]
)
def test_values_that_do_not_exist(text: str) -> None:
    with pytest.raises(InvalidArgument, match="has no value for these shapes"):
        parse(text, SCOPE, "here").evaluate(VALUES)


LEAVES = st.one_of(st.integers(0, 1000).map(str), st.sampled_from(["batch", "X.size", "Y.shape[0]"]))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map(
            lambda t: f"({t[0]} {t[1]} {t[2]})"
        ),
        st.tuples(inner, inner).map(lambda t: f"min({t[0]}, {t[1]})"),
        inner.map(lambda t: f"-{t}"),
    ),
    max_leaves=12,
)


@pytest.mark.slow
@given(TREES)
def test_agrees_with_python(text: str) -> None:
    python = text.replace("X.size", "315").replace("Y.shape[0]", "5").replace("batch", "5")
    try:
        expected = eval(python, {"__builtins__": {}, "min": min})
    except ZeroDivisionError:
        expected = None
    if expected is None or not -(2**63) <= expected < 2**63:
        return
    try:
        assert parse(text, SCOPE, "here").evaluate(VALUES) == expected
    except InvalidArgument as error:
        assert "64 bits" in str(error)  # an intermediate value was too large


@pytest.mark.slow
@given(st.text(alphabet="()[].,+-*/%<>= abXY019\n", max_size=40))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        value = parse(text, SCOPE, "here").evaluate(VALUES)
    except InvalidArgument:
        return
    assert math.isfinite(value)
