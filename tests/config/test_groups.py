"""What a change of instance groups means: which instances stay, which come, which go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from neptrio.config import groups
from neptrio.config.groups import Placement
from neptrio.config.model_config import parse_text


@dataclass
class Made:
    name: str
    placement: Placement | None


def config(text: str) -> Any:
    return parse_text(text, "test")


def made(text: str) -> list[Made]:
    places = list(groups.placements(config(text)))
    return [Made(name, place) for name, place in zip(groups.names(places, ()), places, strict=True)]


def change(before: str, after: str) -> tuple[list[str], list[str]]:
    """Names of the instances that come, and of those that go."""
    current = made(before)
    missing, retired = groups.plan(current, groups.placements(config(after)))
    return groups.names(missing, [m.name for m in current]), [r.name for r in retired]


def test_more_and_fewer() -> None:
    three = 'instance_group { name: "g" kind: KIND_CPU count: 3 }'
    one = three.replace("3", "1")
    assert change(one, three) == (["g_1", "g_2"], [])
    assert change(three, one) == ([], ["g_1", "g_2"])
    assert change(three, three) == ([], [])


def test_names_and_the_order_of_groups_do_not_matter() -> None:
    a = 'instance_group { name: "a" kind: KIND_CPU count: 2 }'
    b = 'instance_group { name: "b" kind: KIND_CPU count: 1 rate_limiter { priority: 2 } }'
    assert change(a + b, b + a) == ([], [])
    assert change(a + b, (b + a).replace('"a"', '"new"')) == ([], [])
    assert change(
        a,
        'instance_group { name: "x" kind: KIND_CPU count: 1 } instance_group { name: "y" kind: KIND_CPU count: 1 }',
    ) == (
        [],
        [],
    )


def test_anything_else_does() -> None:
    plain = 'instance_group { name: "g" kind: KIND_CPU count: 2 }'
    for other in ("rate_limiter { priority: 2 }", 'profile: "p"', 'host_policy: "h"'):
        assert change(plain, plain.replace("count", f"{other} count")) == (["g_2", "g_3"], ["g_0", "g_1"])
    passive = plain.replace("count", "passive: true count")
    assert change(plain, passive) == (["g_2", "g_3"], ["g_0", "g_1"])


def test_devices() -> None:
    both = 'instance_group { name: "g" kind: KIND_GPU count: 2 gpus: [ 0, 1 ] }'
    assert [m.name for m in made(both)] == ["g_0", "g_1", "g_2", "g_3"]
    first = both.replace("0, 1", "0")
    assert change(both, first) == ([], ["g_2", "g_3"])
    assert change(first, both) == (["g_2", "g_3"], [])


def test_a_name_that_is_taken_is_not_given_again() -> None:
    places = list(groups.placements(config('instance_group { name: "g" kind: KIND_CPU count: 2 }')))
    assert groups.names(places, ["g_0", "g_2"]) == ["g_1", "g_3"]
