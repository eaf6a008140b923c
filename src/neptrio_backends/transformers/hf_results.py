"""What is made of scores: the JSON of a row, in the words of Hugging Face's pipelines."""

from __future__ import annotations

import json
from typing import Any

import numpy as np


def softmax(scores: np.ndarray) -> np.ndarray:
    """Chances of scores, along the last dimension."""
    raised = np.exp(scores - scores.max(-1, keepdims=True))
    found: np.ndarray = raised / raised.sum(-1, keepdims=True)
    return found


def chances(scores: np.ndarray, problem: str) -> np.ndarray:
    """What a classifier's scores say, by `problem_type` of its config.json."""
    if problem == "regression":
        return scores
    if problem == "multi_label_classification" or (not problem and scores.shape[-1] == 1):
        with np.errstate(over="ignore"):
            found: np.ndarray = 1 / (1 + np.exp(-scores))
        return found
    return softmax(scores)


def text(value: Any) -> bytes:
    """JSON as it is answered."""
    return json.dumps(value, ensure_ascii=False).encode()


def ranked(scores: np.ndarray, labels: list[str], most: int) -> list[dict[str, Any]]:
    """The labels with their scores, best first."""
    order = np.argsort(-scores, kind="stable")[:most]
    return [{"label": labels[i], "score": float(scores[i])} for i in order]


def words(
    scores: np.ndarray, labels: list[str], offsets: list[tuple[int, int]], special: list[int], source: str
) -> list[dict[str, Any]]:
    """What the tokens of a text are, without those that are nothing ("O") or not of the text."""
    found = []
    best = scores.argmax(-1)
    for i, (start, end) in enumerate(offsets):
        label = labels[best[i]]
        if special[i] or label == "O":
            continue
        score = float(scores[i, best[i]])
        word = source[start:end]
        found.append({"entity": label, "score": score, "index": i, "word": word, "start": start, "end": end})
    return found


def joined(tokens: list[dict[str, Any]], source: str) -> list[dict[str, Any]]:
    """Tokens that follow each other and are of one entity (B-, I-), as one; its score is their mean."""
    groups: list[list[dict[str, Any]]] = []
    for token in tokens:
        begins, _, kind = token["entity"].rpartition("-")
        last = groups[-1][-1] if groups else None
        follows = last is not None and last["index"] + 1 == token["index"]
        if last is None or not follows or begins == "B" or last["entity"].rpartition("-")[2] != kind:
            groups.append([])
        groups[-1].append(token)
    return [
        {
            "entity_group": group[0]["entity"].rpartition("-")[2],
            "score": sum(token["score"] for token in group) / len(group),
            "word": source[group[0]["start"] : group[-1]["end"]],
            "start": group[0]["start"],
            "end": group[-1]["end"],
        }
        for group in groups
    ]
