"""Encodes headers for the sessions that use h2.

The problem: a peer's SETTINGS say how large the table of headers may be that both sides keep. An encoder that takes a
new size must announce it in the next headers, or both tables differ from then on and the peer cannot read any more
headers. hpack's encoder forgets to announce a change if SETTINGS with the same size come again before the next headers.
The choice: it is not told of a size that it has already.
"""

from __future__ import annotations

import hpack


class HeaderEncoder(hpack.Encoder):
    """hpack's encoder, which announces every change of its table's size."""

    @property
    def header_table_size(self) -> int:
        """Bytes of the table of headers, as the peer's SETTINGS say."""
        return int(self.header_table.maxsize)

    @header_table_size.setter
    def header_table_size(self, value: int) -> None:
        if value != self.header_table.maxsize:
            self.header_table.maxsize = value
            self.table_size_changes.append(value)
