"""The next token of scores, and pieces of text of tokens. What one sequence is given does not depend on others.

Rules:
 1. A sequence has a generator of random numbers of its own, so that a seed gives the same text in any company.
 2. A piece of text is told when it is known: not in the middle of a character of several tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

FIRST = 1024  # the best tokens, among which those of top_p are looked for first
CONTEXT = 5  # tokens before a piece that it is read with: whether it begins with a space depends on them
HELD = 4  # tokens that are kept back for the rest of a character
BROKEN = "�"


@dataclass
class Sampling:
    """How tokens are chosen. temperature 0 takes the best; top_k 0 takes any."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    penalty: float = 1.0  # for what stands there already
    seed: int | None = None


class Chooser:
    """Chooses the tokens of one sequence."""

    def __init__(self, how: Sampling) -> None:
        self._how = how
        self._random = np.random.default_rng(how.seed)

    def choose(self, scores: np.ndarray, before: list[int]) -> int:
        """The next token. `scores`: one for each token; `before`: the tokens that stand there."""
        how = self._how
        scores = scores.astype(np.float64)
        if how.penalty != 1.0 and before:
            seen = np.unique(before)
            known = scores[seen]
            scores[seen] = np.where(known < 0, known * how.penalty, known / how.penalty)
        if not how.temperature:
            return int(scores.argmax())
        scores = scores / how.temperature
        if how.top_k and how.top_k < len(scores):
            places = np.argpartition(-scores, how.top_k - 1)[: how.top_k]
        elif how.top_p < 1 and len(scores) > FIRST:
            places = np.argpartition(-scores, FIRST - 1)[:FIRST]
        else:
            places = np.arange(len(scores))
        weights = np.exp(scores - scores.max())
        # before it is cut by top_p, the sum is that of all that top_k leaves
        total = float(weights[places].sum() if how.top_k else weights.sum())
        if how.top_p < 1:
            places = places[np.argsort(-scores[places], kind="stable")]
            if weights[places].sum() < how.top_p * total:
                places = np.argsort(-scores, kind="stable")
            reached = np.cumsum(weights[places])
            places = places[: int(np.searchsorted(reached, how.top_p * total)) + 1]
        reached = np.cumsum(weights[places])
        found = int(np.searchsorted(reached, self._random.random() * reached[-1], "right"))
        return int(places[min(found, len(places) - 1)])


class Pieces:
    """Makes pieces of text of tokens that come one after the other."""

    def __init__(self, decode: Callable[[list[int]], str], before: list[int]) -> None:
        self._decode = decode
        self._ids = before[-CONTEXT:]
        self._told = len(self._ids)  # tokens whose text was told

    def add(self, token: int, last: bool = False) -> str:
        """The text that a token ends; "" while it may be the middle of a character."""
        self._ids.append(token)
        return self._piece(last)

    def rest(self) -> str:
        """What was kept back."""
        return self._piece(True) if self._told < len(self._ids) else ""

    def _piece(self, last: bool) -> str:
        before = self._decode(self._ids[: self._told]).rstrip(BROKEN)
        now = self._decode(self._ids)
        if now.endswith(BROKEN) and not last and len(self._ids) - self._told < HELD:
            return ""
        piece = now[len(before) :] if now.startswith(before) else self._decode(self._ids[self._told :])
        self._ids = self._ids[self._told :][-CONTEXT:] if piece else self._ids
        self._told = len(self._ids)
        return piece
