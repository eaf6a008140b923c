"""Text for several requests at once: one call of the model makes a token for each.

The problem: a sequence takes hundreds of calls of the model, and a call for eight sequences takes little longer than one for
one. The choice: sequences are under way together, whenever they came. One that comes is read alone and joined to the
others; one that has ended leaves. What the model remembers of each (its cache) lies in one tensor for all, with padding on
the left.

Rules:
 1. One thread calls the model and owns all that is under way; add() and close() may be called by others.
 2. A sequence's tokens do not depend on its company, but for rounding: padding is masked, and positions are its own.
 3. Sequences are joined only where the model's memory has one place for each token and its positions can be told to it.
    Elsewhere (sliding windows, states) each has its own calls, in turns, and no mask: nothing is padded, and models with
    states take a mask for one of the new tokens alone.
 4. A sequence ends with a token that ends texts, at its number of tokens, or when nobody wants it any more. It is told of
    each token and, once, of its end or of what went wrong, on the thread: whoever is told must not wait.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

import hf_lengths
from hf_sampling import Chooser


class Unwanted(Exception):
    """What a sequence is told that has ended because nobody wants it any more."""


@dataclass(eq=False)
class Sequence:
    """A text under way."""

    prompt: list[int]
    most: int  # tokens
    chooser: Chooser
    wanted: Callable[[], bool]
    told: Callable[[int, str], None]  # (token, why it is the last one or "")
    failed: Callable[[BaseException], None]
    made: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _Batch:
    """Sequences that are under way together."""

    rows: list[Sequence]
    cache: Any
    mask: torch.Tensor  # rows x places: 1 where the cache has a token

    def left_by(self, kept: list[int], config: Any) -> None:
        """Leaves these rows alone."""
        self.rows = [self.rows[i] for i in kept]
        index = torch.tensor(kept, device=self.mask.device)
        self.mask = self.mask[index]
        first = int(self.mask.argmax(1).min())  # places before it are padding everywhere
        self.mask = self.mask[:, first:]
        self.cache = _cache(
            [(keys[index, :, first:], values[index, :, first:]) for keys, values in _pairs(self.cache)],
            config,
        )

    def joined_by(self, other: _Batch, config: Any) -> None:
        """Takes the rows of another one."""
        length = max(self.mask.shape[1], other.mask.shape[1])

        def both(a: torch.Tensor, b: torch.Tensor, at: int) -> torch.Tensor:
            parts = []
            for part in (a, b):
                missing = list(part.shape)
                missing[at] = length - part.shape[at]
                parts.append(torch.cat((part.new_zeros(missing), part), at) if missing[at] else part)
            return torch.cat(parts)

        self.rows = [*self.rows, *other.rows]
        self.mask = both(self.mask, other.mask, 1)
        pairs = zip(_pairs(self.cache), _pairs(other.cache), strict=True)
        self.cache = _cache([(both(a[0], b[0], 2), both(a[1], b[1], 2)) for a, b in pairs], config)


def _pairs(cache: Any) -> list[tuple[Any, Any]]:
    return [(layer.keys, layer.values) for layer in cache.layers]


def _cache(pairs: list[tuple[Any, Any]], config: Any) -> Any:
    made = DynamicCache(config=config)
    for i, (keys, values) in enumerate(pairs):
        made.update(keys, values, i)
    return made


class Generator:
    """Makes the tokens of sequences, on a thread of its own."""

    def __init__(self, model: Any, ends: set[int], most: int) -> None:
        """`ends`: tokens that end texts; `most`: sequences that are under way together. Raises ValueError."""
        self._model = model
        self._config = model.config
        self._ends = ends
        self._most = most
        arguments = inspect.signature(model.forward).parameters
        # later releases have the shorter name
        names = [name for name in ("cache", "past_key_values") if name in arguments]
        if not names:
            raise ValueError(
                f"{type(model).__name__} keeps no keys and values of tokens, which is not served"
            )
        if any(hasattr(module, "recurrent_states") for module in model.modules()):
            raise ValueError(
                f"{type(model).__name__} keeps the state of one text in itself, which is not served: texts that are under way "
                "together would be mixed"
            )
        self._cache_name = names[0]
        self._one_of_many = "logits_to_keep" in arguments
        layers = DynamicCache(config=self._config).layers
        self.joins = "position_ids" in arguments and all(type(layer) is DynamicLayer for layer in layers)
        self._waiting: list[Sequence] = []
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="generator", daemon=True)
        self._thread.start()

    def add(self, sequence: Sequence) -> None:
        """Begins a sequence, at once or when one of those under way has ended."""
        with self._changed:
            self._waiting.append(sequence)
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread. What is under way is told nothing any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        batches: list[_Batch] = []
        while True:
            with self._changed:
                while not self._waiting and not batches and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                room = self._most - sum(len(batch.rows) for batch in batches)
                new, self._waiting = self._waiting[:room], self._waiting[room:]
            for batch in batches:
                self._guarded(batch.rows, partial(self._step, batch))
            batches = [batch for batch in batches if batch.rows]
            for batch in self._begun([new[i] for i in self._wanted(new)]):
                if self.joins and batches:
                    whole = batches[0]
                    rows = [*whole.rows, *batch.rows]
                    if not self._guarded(rows, partial(whole.joined_by, batch, self._config)):
                        batches.remove(whole)
                else:
                    batches.append(batch)

    @staticmethod
    def _wanted(rows: list[Sequence]) -> list[int]:
        """The places of those that somebody waits for. The others are told."""
        kept = []
        for i, row in enumerate(rows):
            if row.wanted():
                kept.append(i)
            else:
                row.failed(Unwanted())
        return kept

    @staticmethod
    def _guarded(rows: list[Sequence], function: Callable[[], None]) -> bool:
        """Whether it went well. The rows are told otherwise, and are under way no more."""
        try:
            with torch.inference_mode():
                function()
        except Exception as error:
            for row in list(rows):
                row.failed(error)
            rows.clear()
            return False
        return True

    def _begun(self, new: list[Sequence]) -> list[_Batch]:
        """Reads the prompts."""
        made: list[_Batch] = []
        lengths = [len(sequence.prompt) for sequence in new]
        groups = hf_lengths.groups(lengths) if self.joins else [[i] for i in range(len(new))]
        for group in groups:
            rows = [new[i] for i in group]

            def read(rows: list[Sequence] = rows) -> None:
                length = max(len(row.prompt) for row in rows)
                ids = [[0] * (length - len(row.prompt)) + row.prompt for row in rows]
                mask = [[0] * (length - len(row.prompt)) + [1] * len(row.prompt) for row in rows]
                batch = _Batch(rows, DynamicCache(config=self._config), self._tensor(mask))
                self._call(batch, self._tensor(ids), (batch.mask.cumsum(1) - 1).clamp(min=0))
                if batch.rows:
                    made.append(batch)

            self._guarded(rows, read)
        return made

    def _tensor(self, rows: list[list[int]]) -> torch.Tensor:
        return torch.tensor(rows, device=self._model.device)

    def _step(self, batch: _Batch) -> None:
        """One more token for each row."""
        self._leave(batch, self._wanted(batch.rows))
        if not batch.rows:
            return
        batch.mask = torch.cat((batch.mask, batch.mask.new_ones(len(batch.rows), 1)), 1)
        positions = batch.mask.sum(1, keepdim=True) - 1
        self._call(batch, self._tensor([[row.made[-1]] for row in batch.rows]), positions)

    def _call(self, batch: _Batch, ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Runs the model over new tokens, chooses the next ones, and lets those leave that have ended."""
        given: dict[str, Any] = {
            "input_ids": ids,
            self._cache_name: batch.cache,  # to which the model adds what it remembers of them
        }
        if self.joins:
            given |= {"attention_mask": batch.mask, "position_ids": positions}
        if self._one_of_many:
            given["logits_to_keep"] = 1
        found = self._model(**given, use_cache=True)
        scores = found.logits[:, -1].float().cpu().numpy()
        kept = []
        for i, row in enumerate(batch.rows):
            token = row.chooser.choose(scores[i], [*row.prompt, *row.made])
            row.made.append(token)
            why = "stop" if token in self._ends else "length" if len(row.made) >= row.most else ""
            row.told(token, why)
            if not why:
                kept.append(i)
        self._leave(batch, kept)

    def _leave(self, batch: _Batch, kept: list[int]) -> None:
        if not kept:
            batch.rows.clear()
        elif len(kept) < len(batch.rows):
            batch.left_by(kept, self._config)
