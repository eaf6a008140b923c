"""What `neptrio explain` says about a configuration."""

from __future__ import annotations

from typing import Any

import pytest

from neptrio.config import defaults
from neptrio.config import model_config as model_config
from neptrio.scheduling.explain import explain

INPUT = 'input [ { name: "X" data_type: TYPE_FP32 dims: [ %s ] %s } ] '


def said(text: str) -> str:
    config: Any = model_config.parse_text(f'name: "m" backend: "identity" {text}', "test")
    defaults.fill(config, None)
    return " ".join(explain(config))


def test_a_model_without_batching_says_how_to_get_it() -> None:
    text = said("max_batch_size: 8 " + INPUT % ("4", ""))
    assert "Nothing batches: 'm' has no dynamic_batching" in text and "add `dynamic_batching { }`" in text


def test_without_a_batch_size_only_the_queue_remains() -> None:
    text = said("dynamic_batching { default_queue_policy { max_queue_size: 7 } }" + INPUT % ("4", ""))
    assert "max_batch_size of 'm' is 0" in text and "holds 7 waiting requests and refuses more" in text


@pytest.mark.parametrize(
    ("dims", "flag", "sentence"),
    [
        ("4", "", "Every request can batch with every other."),
        ("-1", "", "Inputs 'X' have variable dims: only requests with equal shapes"),
        ("-1", "allow_ragged_batch: true", "Inputs 'X' are ragged: they batch whatever their shape."),
        ("4", "optional: true", "Inputs 'X' are optional: only requests that bring the same ones batch."),
        (
            "4",
            "is_shape_tensor: true",
            "Inputs 'X' are shape tensors: only requests with equal values batch.",
        ),
    ],
)
def test_what_may_share_a_batch(dims: str, flag: str, sentence: str) -> None:
    assert sentence in said("max_batch_size: 8 dynamic_batching { } " + INPUT % (dims, flag))


def test_when_a_batch_leaves() -> None:
    text = said(
        "max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 100 "
        "preserve_ordering: true } instance_group [ { count: 3 } ]" + INPUT % ("4", "")
    )
    assert "a preferred one (2, 4) goes at once" in text
    assert "until its oldest request has waited 100 us" in text
    assert "3 instances execute side by side." in text
    assert "Responses leave in the order in which requests arrived." in text
    assert "is prepared while its instance still works" in text


def test_levels_and_their_policies() -> None:
    text = said(
        "max_batch_size: 8 dynamic_batching { priority_levels: 2 default_priority_level: 2 "
        "priority_queue_policy { key: 1 value { default_timeout_microseconds: 50 allow_timeout_override: true } } "
        "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 70 } }"
        + INPUT
        % ("4", "")
    )
    assert "requests without priority are of level 2" in text
    assert (
        "Level 1 has no size limit; requests that have waited 50 us are refused, sooner if they ask for it."
        in text
    )
    assert "Level 2 has no size limit; requests that have waited 70 us go behind the others." in text
    assert "No batch is prepared ahead" in text


def test_sequences_and_ensembles() -> None:
    text = said(
        "max_batch_size: 8 sequence_batching { oldest { max_candidate_sequences: 20 "
        "preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 70 } }"
    )
    assert "batches requests of different sequences (strategy oldest), up to 8" in text
    assert "An instance has 20 slot(s)" in text and "idle for 1000000 us" in text
    assert "a preferred one (2) goes at once" in text and "its oldest request has waited 70 us" in text
    text = said(
        "max_batch_size: 4 instance_group { count: 2 } sequence_batching { "
        "direct { max_queue_delay_microseconds: 50 minimum_slot_utilization: 0.5 } }"
    )
    assert "(strategy direct), up to 4" in text and "An instance has 4 slot(s)" in text
    assert "when 50 % of the slots have a request" in text and "its oldest request has waited 50 us" in text
    assert "2 instances execute side by side." in text
    assert "There is no delay" in said("max_batch_size: 4 sequence_batching { }")
    assert "each step batches as its model does" in said(
        'ensemble_scheduling { step [ { model_name: "a" } ] }'
    )


@pytest.mark.parametrize(("size", "slots"), [("0", 1), ("1", 1)])
def test_sequences_that_cannot_batch_are_not_said_to(size: str, slots: int) -> None:
    text = said(f"max_batch_size: {size} sequence_batching {{ oldest {{ }} }}")
    assert f"Nothing batches: max_batch_size of 'm' is {size}" in text and f"has {slots} slot(s)" in text
    assert "batches requests" not in text and "preferred" not in text


def test_one_is_not_many() -> None:
    text = said("dynamic_batching { default_queue_policy { max_queue_size: 1 } }" + INPUT % ("4", ""))
    assert "holds 1 waiting request and refuses more" in text
