"""What dynamic_batching means: defaults, levels, and the values that are refused, at their edges."""

from __future__ import annotations

import pytest

from neptrio.config.model_config import parse_text
from neptrio.errors import InvalidArgument
from neptrio.scheduling.policy import BatchingPolicy, QueuePolicy, batching_policy


def policy(batching: str, size: int = 8, rest: str = "") -> BatchingPolicy:
    text = f'name: "m" max_batch_size: {size} {rest} dynamic_batching {{ {batching} }}'
    return batching_policy(parse_text(text, "m/config.pbtxt"))


def test_nothing_configured_prefers_the_largest_batch_without_delay() -> None:
    assert policy("") == BatchingPolicy(8, (8,))
    assert policy("", size=0) == BatchingPolicy(1, (1,))
    assert not policy("").exact


def test_preferred_sizes_are_sorted_and_single() -> None:
    assert policy("preferred_batch_size: [ 8, 1, 4, 4 ]").preferred == (1, 4, 8)


def test_the_delay_is_in_microseconds() -> None:
    assert policy("max_queue_delay_microseconds: 7").delay_ns == 7_000
    assert policy("max_queue_delay_microseconds: 18446744073709551615").delay_ns == 10**18


@pytest.mark.parametrize(("levels", "default"), [(3, 1), (3, 3), (1, 1), (0, 0)])
def test_levels_and_the_default_level(levels: int, default: int) -> None:
    made = policy(f"priority_levels: {levels} default_priority_level: {default}")
    assert (len(made.levels), made.default_level) == (max(levels, 1), max(default, 1))
    assert made.exact == (levels > 1)


def test_without_levels_what_is_said_of_them_counts_for_nothing() -> None:
    rules = "default_priority_level: 5 priority_queue_policy { key: 1 value { max_queue_size: 1 } }"
    assert policy(rules) == policy("")


def test_a_hundred_thousand_levels_and_no_more() -> None:
    assert len(policy("priority_levels: 100000 default_priority_level: 100000").levels) == 100_000
    with pytest.raises(InvalidArgument, match="must be at most 100000 for m, got 100001"):
        policy("priority_levels: 100001 default_priority_level: 1")


def test_a_level_has_its_own_policy_or_the_usual_one() -> None:
    made = policy(
        "priority_levels: 3 default_priority_level: 2 default_queue_policy { max_queue_size: 9 } "
        "priority_queue_policy { key: 1 value { timeout_action: DELAY default_timeout_microseconds: 5 "
        "allow_timeout_override: true } } priority_queue_policy { key: 3 value { max_queue_size: 1 } }"
    )
    assert made.levels == (QueuePolicy(0, 5, True, True), QueuePolicy(9), QueuePolicy(1))


@pytest.mark.parametrize(
    ("rules", "exact"),
    [
        ("", False),
        ("allow_timeout_override: true", False),
        ("timeout_action: DELAY", False),
        ("max_queue_size: 1", True),
        ("default_timeout_microseconds: 1", True),
    ],
)
def test_limits_and_timeouts_make_a_policy_exact(rules: str, exact: bool) -> None:
    assert policy(f"default_queue_policy {{ {rules} }}").exact is exact


def test_one_level_among_others_makes_the_policy_exact() -> None:
    assert BatchingPolicy(8, (8,), levels=(QueuePolicy(), QueuePolicy())).exact, "priorities alone do"
    made = policy(
        "priority_levels: 1 default_priority_level: 1 priority_queue_policy { key: 1 value { max_queue_size: 3 } }"
    )
    assert made.exact and made.levels == (QueuePolicy(3),)


def test_order_can_be_kept() -> None:
    assert policy("preserve_ordering: true priority_levels: 1 default_priority_level: 1").preserve_ordering
    assert not policy("").preserve_ordering


def test_shape_tensors_are_the_inputs_that_say_so() -> None:
    rest = (
        'input { name: "A" data_type: TYPE_INT32 dims: [ 2 ] is_shape_tensor: true } '
        'input { name: "B" data_type: TYPE_INT32 dims: [ 2 ] }'
    )
    assert policy("", rest=rest).shape_tensors == ("A",)
