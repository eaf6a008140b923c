"""What headers ask of tracing: W3C trace context, strictly, and the forced trace."""

from __future__ import annotations

import pytest

from neptrio.observe.propagation import asked, traceparent

TRACE, SPAN = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
PARENT = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_parent_with_its_state() -> None:
    found = asked(
        [(b"Host", b"x"), (b"TraceParent", PARENT), (b"tracestate", b"a=1"), (b"Tracestate", b"b=2")]
    )
    assert found is not None and (found.trace_id, found.span_id, found.sampled) == (TRACE, SPAN, True)
    assert found.tracestate == "a=1,b=2" and found.force == ""
    assert traceparent(TRACE, SPAN).encode() == PARENT


def test_a_parent_that_is_not_sampled() -> None:
    found = asked([(b"traceparent", PARENT[:-2] + b"02")])
    assert found is not None and found.trace_id == TRACE and not found.sampled


def test_versions_to_come_may_have_more() -> None:
    found = asked([(b"traceparent", b"cc" + PARENT[2:] + b"-what-comes")])
    assert found is not None and found.span_id == SPAN and found.sampled


@pytest.mark.parametrize(
    "value",
    [b"", PARENT[:-1], PARENT + b"-x", PARENT + b"0", PARENT.upper(), b"ff" + PARENT[2:], b"0g" + PARENT[2:],
     PARENT.replace(b"00f067aa0ba902b7", b"0" * 16), b"00-" + b"0" * 32 + PARENT[35:], b"cc" + PARENT[2:] + b".x"],
)  # fmt: skip
def test_a_malformed_parent_counts_as_absent(value: bytes) -> None:
    found = asked([(b"traceparent", value), (b"tracestate", b"a=1")])
    assert found is not None and (found.trace_id, found.span_id, found.tracestate) == (0, 0, "")


def test_two_parents_count_as_none() -> None:
    found = asked([(b"traceparent", PARENT)] * 2)
    assert found is not None and found.trace_id == 0


def test_nothing_asked() -> None:
    assert asked([(b"host", b"x"), (b"accept", b"*/*"), (b"traceparents", b"y")]) is None


def test_forced() -> None:
    found = asked([(b"Neptrio-Trace", b" TENSORS ")])
    assert found is not None and found.force == "TENSORS" and found.trace_id == 0
