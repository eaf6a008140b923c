"""Which rows of a batch are padded together.

The problem: rows of a batch have different lengths, and padding costs as much as text. The choice: rows are sorted by their
length and cut where the padding of one more row would cost more than another call of the model.

Rules:
 1. Every row is in exactly one group; the order of rows within and of groups is by length.
 2. A group has at most `most` places, padding included, unless it is one row.
 3. Rows that cannot be padded are with those of their own length alone.
"""

from __future__ import annotations

FREE = 256  # places of padding that cost less than another call
MOST = 1 << 14  # places of a group
SHARE = 4  # and one of so many, of a group's


def groups(lengths: list[int], most: int = MOST, pads: bool = True) -> list[list[int]]:
    """The places of rows that go through the model together."""
    made: list[list[int]] = []
    used = 0  # places of the last group that hold tokens
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[row]
        group = made[-1] if made else []
        places = length * (len(group) + 1)
        padding = places - used - length
        fits = places <= most and padding <= max(FREE, places // SHARE)
        if not group or not fits or (not pads and padding):
            made.append([])
            used = 0
        made[-1].append(row)
        used += length
    return made
