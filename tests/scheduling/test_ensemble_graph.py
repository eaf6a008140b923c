"""The ensemble's graph is checked against the models it names, with texts that say what is wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from neptrio.config.model_config import parse_text
from neptrio.errors import InvalidArgument
from neptrio.scheduling.ensemble_graph import build, examine
from neptrio.scheduling.waits import Waits


def io(inputs: str, outputs: str, extra: str = "") -> Any:
    """A config from `NAME:TYPE:dims` words."""

    def tensors(field: str, words: str) -> str:
        rows = []
        for word in words.split():
            name, kind, dims = word.split(":")
            rows.append(f'{field} {{ name: "{name}" data_type: TYPE_{kind} dims: [ {dims} ] }}')
        return "\n".join(rows)

    return parse_text(f"{tensors('input', inputs)}\n{tensors('output', outputs)}\n{extra}", "test")


def step(model: str, inputs: str, outputs: str) -> str:
    """A step from `own=tensor` words."""

    def pairs(field: str, words: str) -> str:
        return " ".join('{} {{ key: "{}" value: "{}" }}'.format(field, *w.split("=")) for w in words.split())

    return f'step {{ model_name: "{model}" {pairs("input_map", inputs)} {pairs("output_map", outputs)} }}'


MODELS = {
    "double": io("X:INT32:4", "Y:INT32:4"),
    "text": io("X:STRING:4", "Y:STRING:4"),
    "join": io("A:INT32:4 B:INT32:4", "Y:INT32:4"),
    "repeat": io("X:INT32:4", "Y:INT32:4", "model_transaction_policy { decoupled: true }"),
    "again": io("X:INT32:4", "Y:INT32:4", "model_transaction_policy { decoupled: true }"),
}


def graph(steps: list[str], inputs: str = "IN:INT32:4", outputs: str = "OUT:INT32:4") -> Any:
    config = io(inputs, outputs, f'name: "e" ensemble_scheduling {{ {" ".join(steps)} }}')
    return build(config, lambda name, version: SimpleNamespace(config=MODELS[name]))


def test_levels_and_needs() -> None:
    made = graph(
        [
            step("double", "X=IN", "Y=A"),
            step("repeat", "X=A", "Y=B"),
            step("join", "A=A B=B", "Y=C"),
            step("repeat", "X=C", "Y=OUT"),
        ]
    )
    assert made.level == (0, 0, 1, 1)
    assert made.decoupled
    assert made.needed_for(["OUT"]) == {0, 1, 2, 3}
    assert made.depth(made.needed_for(["OUT"])) == 2


LICENCE = 'instance_group { rate_limiter { resources { name: "licence" count: 1 } } }'
SHARED = {
    **MODELS,
    "licensed": io("X:INT32:4", "Y:INT32:4", f"{LICENCE} model_transaction_policy {{ decoupled: true }}"),
    "waits": io("X:INT32:4", "Y:INT32:4", LICENCE),
    "inner": io("X:INT32:4", "Y:INT32:4", f"ensemble_scheduling {{ {step('repeat', 'X=X', 'Y=Y')} }}"),
}


@pytest.mark.parametrize(
    ("models", "unheld"),
    [
        ("repeat double", set()),
        ("double repeat", set()),
        ("repeat again", set()),
        ("repeat repeat", {0}),
        ("repeat double repeat", {0}),
        ("repeat inner", {0}),
        ("licensed double", set()),
        ("licensed double waits", {0}),
    ],
)
def test_a_step_that_later_ones_wait_for_does_not_wait_for_them(models: str, unheld: set[int]) -> None:
    names = models.split()
    steps = [
        step(name, f"X={'IN' if i == 0 else f'T{i}'}", f"Y={'OUT' if i == len(names) - 1 else f'T{i + 1}'}")
        for i, name in enumerate(names)
    ]
    config = io("IN:INT32:4", "OUT:INT32:4", f'name: "e" ensemble_scheduling {{ {" ".join(steps)} }}')
    assert waits_for_itself(config) == unheld


def waits_for_itself(config: Any) -> set[int]:
    """The steps whose senders must not wait for others, whatever else is under way."""
    waits = build(config, lambda name, version: SimpleNamespace(config=SHARED[name])).waits
    return {index for index, wait in waits.items() if not Waits().begin(wait)}


@pytest.mark.parametrize(("beside", "found"), [("waits", {0}), ("double", set())])
def test_a_step_does_not_wait_for_one_beside_it_that_needs_what_it_has(beside: str, found: set[int]) -> None:
    """Nothing is answered before the outputs of both are there."""
    steps = f"{step('licensed', 'X=IN', 'Y=A')} {step(beside, 'X=IN', 'Y=B')}"
    outputs = "A:INT32:4 B:INT32:4"
    assert waits_for_itself(io("IN:INT32:4", outputs, f"ensemble_scheduling {{ {steps} }}")) == found


def test_what_nobody_makes_is_missing_where_it_is_needed() -> None:
    steps = [step("double", "X=NOPE", "Y=A"), step("double", "X=A", "Y=OUT")]
    config = io("IN:INT32:4", "OUT:INT32:4", f'name: "e" ensemble_scheduling {{ {" ".join(steps)} }}')
    found: list[Any] = []
    examine(
        config,
        lambda name, version: SimpleNamespace(config=MODELS[name]),
        lambda path, _: found.append(tuple(path)),
    )
    assert found == [("ensemble_scheduling", "step", 0, "input_map")]


def test_only_the_steps_of_the_requested_outputs_are_needed() -> None:
    made = graph(
        [step("double", "X=IN", "Y=A"), step("double", "X=IN", "Y=B")], outputs="A:INT32:4 B:INT32:4"
    )
    assert made.needed_for(["B"]) == {1}


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "must specify 'step' for ensemble 'e', got none"),
        ([step("double", "Z=IN", "Y=OUT")], "has no such input; it has ['X']"),
        ([step("double", "X=IN", "Z=OUT")], "has no such output; it has ['Y']"),
        ([step("join", "A=IN", "Y=OUT")], "leaves required input(s) ['B'] of its model unmapped"),
        ([step("double", "X=NOPE", "Y=OUT")], "which is neither an ensemble input nor made by a step"),
        ([step("double", "X=IN", "Y=A")], "output 'OUT' of ensemble 'e' is made by no step"),
        ([step("double", "X=IN", "Y=OUT"), step("double", "X=IN", "Y=OUT")], "which is step 0's already"),
        ([step("double", "X=IN", "Y=IN")], "which is an ensemble input's already"),
        ([step("text", "X=IN", "Y=OUT")], "tensor 'IN' is TYPE_INT32 in an ensemble input and TYPE_STRING"),
        ([step("double", "X=B", "Y=A"), step("join", "A=A B=IN", "Y=B"), step("double", "X=IN", "Y=OUT")],
         "has a cycle: 'double' -> 'join' -> 'double'"),
        ([step("repeat", "X=IN", "Y=A"), step("repeat", "X=IN", "Y=B"), step("join", "A=A B=B", "Y=OUT")],
         "two decoupled steps that do not follow each other"),
    ],
)  # fmt: skip
def test_refusals(steps: list[str], message: str) -> None:
    with pytest.raises(InvalidArgument) as info:
        graph(steps)
    assert message in str(info.value)


def test_shapes_must_agree() -> None:
    with pytest.raises(InvalidArgument, match=r"tensor 'IN' has shape \[5\].*and \[4\]"):
        graph([step("double", "X=IN", "Y=OUT")], inputs="IN:INT32:5")
