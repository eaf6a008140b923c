"""Shapley values of an ensemble's answers: how much each feature of a row has contributed.

The problem: a tree's answer as a game of its features (what is not known is averaged over the rows that a node was trained
on) has as many coalitions as there are subsets of features. The choice: a leaf is a product game. It counts where all
conditions on its way hold, so its value to a feature is (holds - share) times the integral over t in 0..1 of the product of
what the other features give, t where they hold plus (1 - t) times their share; a polynomial, which few points give exactly.

Rules:
 1. Values add up to the margin: the last one of a row is what the ensemble gives on average, and all of them together what it
    gives before a link function.
 2. A feature that is asked several times on a way is one player: its conditions hold together, its shares are multiplied.
 3. Rows are taken in pieces, and ways of one length together: memory is bounded, and the work is numpy's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import treelite

EQUAL, LESS, AT_MOST, MORE, AT_LEAST = range(1, 6)  # treelite's comparisons
CATEGORIES = 2  # its type of node that asks for one
PIECE = 1 << 22  # numbers that one step works on


@dataclass
class _Ways:
    """Ways to leaves with the same number of features."""

    features: np.ndarray  # ways x features
    shares: np.ndarray  # ways x features: of the rows at the root, of those that hold these conditions
    nodes: np.ndarray  # of all conditions, one after the other
    sides: np.ndarray  # and whether each holds where the node goes left
    starts: np.ndarray  # where the conditions of a feature begin
    values: np.ndarray  # ways x answers


class Shapley:
    """The contributions of features to an ensemble's answers."""

    def __init__(self, model: treelite.Model, targets: int, classes: int) -> None:
        """Raises ValueError for an ensemble that does not say how many rows its nodes have seen."""
        header = model.get_header_accessor()
        self._features = model.num_feature
        self._answers = targets * classes
        self._type = np.dtype(model.input_type)
        nodes: dict[str, list[np.ndarray]] = {key: [] for key in ("feature", "threshold", "compare", "left")}
        self._categories: list[
            tuple[int, np.ndarray, bool]
        ] = []  # (node, its categories, whether they go right)
        found: dict[int, list[tuple[Any, ...]]] = {}
        first = 0
        per_answer = np.zeros(self._answers)  # trees, for averages
        of_target, of_class = header.get_field("target_id"), header.get_field("class_id")
        shape = [int(size) for size in header.get_field("leaf_vector_shape")]
        for i in range(model.num_tree):
            tree = _Tree(model.get_tree_accessor(i))
            places = _places(int(of_target[i]), int(of_class[i]), targets, classes, shape)
            per_answer[places] += 1
            nodes["feature"].append(np.maximum(tree.feature, 0))
            nodes["threshold"].append(tree.threshold)
            nodes["compare"].append(tree.compare)
            nodes["left"].append(tree.missing_left)
            self._categories += [(first + node, *what) for node, what in tree.categories.items()]
            for way, value in tree.ways(len(places)):
                whole = np.zeros(self._answers)
                whole[places] = value
                found.setdefault(len(way), []).append((way, whole, first))
            first += len(tree.feature)
        self._nodes = {key: np.concatenate(parts) for key, parts in nodes.items()}
        scale = 1 / per_answer if header.get_field("average_tree_output")[0] else np.ones(self._answers)
        base = np.asarray(header.get_field("base_scores"), np.float64)[: self._answers]
        self._mean = np.zeros(self._answers)
        self._ways = []
        for length, rows in sorted(found.items()):
            values = np.stack([value for _, value, _ in rows]) * scale
            shares = np.array([[share for share, _ in way.values()] for way, _, _ in rows])
            self._mean += (values * shares.reshape(len(rows), length).prod(1)[:, None]).sum(0)
            if length:
                self._ways.append(_joined(rows, shares, values))
        self._mean += base

    def values(self, rows: np.ndarray) -> np.ndarray:
        """The contributions: (rows, answers, features and the mean)."""
        made = np.zeros((len(rows), self._answers, self._features + 1))
        made[:, :, -1] = self._mean
        widest = max([len(self._nodes["feature"]), *(ways.shares.size for ways in self._ways)])
        step = max(1, PIECE // widest)
        for start in range(0, len(rows), step):
            piece = np.ascontiguousarray(rows[start : start + step], self._type)
            left = self._left(piece)
            for ways in self._ways:
                self._add(made[start : start + step], left, ways)
        return made

    def _left(self, rows: np.ndarray) -> np.ndarray:
        """Whether a row goes left at a node: (rows, nodes)."""
        nodes = self._nodes
        given = rows[:, nodes["feature"]]
        compare, threshold = nodes["compare"], nodes["threshold"]
        with np.errstate(invalid="ignore"):
            found: np.ndarray = np.select(
                [compare == LESS, compare == AT_MOST, compare == MORE, compare == AT_LEAST],
                [given < threshold, given <= threshold, given > threshold, given >= threshold],
                given == threshold,
            )
            for node, categories, right in self._categories:
                value = given[:, node]
                whole = np.where((value >= 0) & (value < 1 << 24), value, -1).astype(np.int64)
                found[:, node] = np.isin(whole, categories) != right
        return np.where(np.isnan(given), nodes["left"], found)

    def _add(self, made: np.ndarray, left: np.ndarray, ways: _Ways) -> None:
        held = np.logical_and.reduceat(left[:, ways.nodes] == ways.sides, ways.starts, axis=1)
        holds = held.reshape(len(left), *ways.shares.shape).astype(np.float64)
        length = ways.shares.shape[1]
        points, weights = np.polynomial.legendre.leggauss((length + 1) // 2)
        total = np.zeros_like(holds)
        for point, weight in zip((points + 1) / 2, weights / 2, strict=True):
            factors = holds * point + ways.shares * (1 - point)
            before = np.ones_like(factors)  # of all features but one, without dividing by what may be nothing
            after = np.ones_like(factors)
            np.cumprod(factors[..., :-1], axis=-1, out=before[..., 1:])
            np.cumprod(factors[..., :0:-1], axis=-1, out=after[..., -2::-1])
            total += weight * before * after
        total *= holds - ways.shares
        order = np.argsort(ways.features, axis=None, kind="stable")
        features = ways.features.ravel()[order]
        begins = np.flatnonzero(np.diff(features, prepend=-1))
        for answer in range(self._answers):
            parts = (total * ways.values[:, answer, None]).reshape(len(left), -1)[:, order]
            made[:, answer, features[begins]] += np.add.reduceat(parts, begins, axis=1)


class _Tree:
    """One tree, as treelite tells it."""

    def __init__(self, accessor: Any) -> None:
        field = accessor.get_field
        self.feature, self.compare = field("split_index"), field("cmp")
        self.threshold, self.missing_left = field("threshold"), field("default_left").astype(bool)
        self._children = field("cleft"), field("cright")
        self._value = field("leaf_value")
        self._vector = field("leaf_vector"), field("leaf_vector_begin"), field("leaf_vector_end")
        seen = field("sum_hess") if len(field("sum_hess")) else field("data_count")
        if len(seen) != len(self.feature):
            raise ValueError(
                "Shapley values need to know how many rows each node has seen, and the file does not say that"
            )
        self._seen = np.asarray(seen, np.float64)
        listed, begins, ends = (field(f"category_list{end}") for end in ("", "_begin", "_end"))
        right = field("category_list_right_child")
        self.categories = {
            int(node): (listed[int(begins[node]) : int(ends[node])].astype(np.int64), bool(right[node]))
            for node in np.flatnonzero(field("node_type") == CATEGORIES)
        }

    def ways(self, answers: int) -> Any:
        """({feature: (share, [(node, whether it goes left)])}, what the leaf gives) of each leaf."""
        waiting: list[tuple[int, dict[int, tuple[float, list[tuple[int, bool]]]]]] = [(0, {})]
        while waiting:
            node, way = waiting.pop()
            if self._children[0][node] < 0:
                vector, begins, ends = self._vector
                wide = len(vector) > 0
                value = (
                    vector[int(begins[node]) : int(ends[node])]
                    if wide
                    else np.full(answers, self._value[node])
                )
                yield way, value
                continue
            feature = int(self.feature[node])
            share, asked = way.get(feature, (1.0, []))
            for children, goes_left in zip(self._children, (True, False), strict=True):
                child = int(children[node])
                part = self._seen[child] / self._seen[node] if self._seen[node] else 0.0
                waiting.append((child, {**way, feature: (share * part, [*asked, (node, goes_left)])}))


def _places(target: int, number: int, targets: int, classes: int, shape: list[int]) -> np.ndarray:
    """Which answers a tree is about, in the order in which its leaves tell them."""
    every = np.arange(targets * classes).reshape(targets, classes)
    about = every if target < 0 else every[target : target + 1]
    about = about if number < 0 else about[:, number : number + 1]
    return about[: shape[0], : shape[1]].ravel() if shape != [1, 1] else about.ravel()


def _joined(rows: list[tuple[Any, ...]], shares: np.ndarray, values: np.ndarray) -> _Ways:
    nodes: list[int] = []
    sides: list[bool] = []
    starts: list[int] = []
    for way, _, first in rows:
        for _, asked in way.values():
            starts.append(len(nodes))
            nodes += [first + node for node, _ in asked]
            sides += [goes_left for _, goes_left in asked]
    features = np.array([list(way) for way, _, _ in rows])
    return _Ways(features, shares, np.array(nodes), np.array(sides), np.array(starts), values)
