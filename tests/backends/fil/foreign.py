"""A class that a file of skops may name and that is no part of scikit-learn."""

from __future__ import annotations


class Foreign:
    """Nothing of scikit-learn's."""

    def __init__(self) -> None:
        self.value = 1
