"""The charts of a sweep: labels that can be read wherever the lines end."""

from __future__ import annotations

import itertools

import pytest

from neptrio.sweep.chart import GAP, chart, spread


@pytest.mark.parametrize(
    "wanted",
    [
        [100.0],
        [100.0, 101.0, 99.5, 160.0],
        [0.0, 1.0, 2.0],  # at the upper border
        [299.0, 300.0, 300.0],  # at the lower one
        [50.0, 61.0, 72.0, 60.0],  # pushed into those that were apart before
    ],
)
def test_labels_keep_their_distance_their_order_and_the_borders(wanted: list[float]) -> None:
    placed = spread({f"{number}": height for number, height in enumerate(wanted)}, 0, 300)
    heights = sorted(placed.values())
    assert all(b - a >= GAP - 1e-9 for a, b in itertools.pairwise(heights))
    assert heights[0] >= -1e-9 and heights[-1] <= 300 + 1e-9
    order = sorted(placed, key=lambda name: placed[name])
    assert [wanted[int(name)] for name in order] == sorted(wanted)


def test_labels_that_are_apart_stand_at_their_lines() -> None:
    assert spread({"a": 10.0, "b": 50.0, "c": 30.0}, 0, 300) == {"a": 10.0, "b": 50.0, "c": 30.0}


def test_more_labels_than_there_is_room_for_share_it() -> None:
    placed = spread({f"{number}": 5.0 for number in range(11)}, 0, 50)
    assert [placed[f"{number}"] for number in range(11)] == [5.0 * number for number in range(11)]


def test_lines_that_end_at_one_point_have_labels_at_different_heights() -> None:
    drawn = chart("t", "x", {"a": [(1, 5.0)], "b": [(1, 5.0)]})
    labels = [part for part in drawn.split("<text") if 'class="label"' in part]
    assert len(labels) == 2
    assert len({part.partition('y="')[2].partition('"')[0] for part in labels}) == 2
