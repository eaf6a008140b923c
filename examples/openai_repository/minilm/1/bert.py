"""BERT in numpy: reads safetensors, cuts texts into word pieces, and averages the last layer's vectors."""

import json
import unicodedata
from pathlib import Path

import numpy as np

MOST_TOKENS = 256  # what the model was trained with


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """name -> array. The file is a length, a JSON of shapes and offsets, and the numbers; only FP32 is read."""
    raw = np.memmap(path, np.uint8, "r")
    size = int.from_bytes(raw[:8].tobytes(), "little")
    head = json.loads(raw[8 : 8 + size].tobytes())
    found = {}
    for name, entry in head.items():
        if name != "__metadata__" and entry["dtype"] == "F32":
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            found[name] = raw[begin:end].view("<f4").reshape(entry["shape"])
    return found


def words(text: str) -> list[str]:
    """Lower case without accents; punctuation marks are words of their own."""
    plain = "".join(c for c in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(c) != "Mn")
    return "".join(
        f" {c} " if unicodedata.category(c)[0] == "P" or c in "$+<=>^`|~" else c for c in plain
    ).split()


class Tokenizer:
    """Greedy longest pieces from a vocabulary; what follows the first piece of a word begins with ##."""

    def __init__(self, vocabulary: Path) -> None:
        lines = vocabulary.read_text(encoding="utf-8").splitlines()
        self.ids = {piece: i for i, piece in enumerate(lines)}

    def __call__(self, text: str) -> list[int]:
        found = [self.ids["[CLS]"]]
        for word in words(text):
            found += self.pieces(word)
        return [*found[: MOST_TOKENS - 1], self.ids["[SEP]"]]

    def pieces(self, word: str) -> list[int]:
        found, at = [], 0
        while at < len(word):
            prefix = "##" if at else ""
            end = next(
                (e for e in range(min(len(word), at + 100), at, -1) if prefix + word[at:e] in self.ids), 0
            )
            if not end:
                return [self.ids["[UNK]"]]
            found.append(self.ids[prefix + word[at:end]])
            at = end
        return found


def gelu(x: np.ndarray) -> np.ndarray:
    """x * Phi(x); the error function by Abramowitz and Stegun 7.1.26, within 1.5e-7."""
    z = np.abs(x) / np.float32(np.sqrt(2))
    t = 1 / (1 + 0.3275911 * z)
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return 0.5 * x * (1 + np.sign(x) * (1 - tail * np.exp(-z * z)))


class Bert:
    """The encoder of a folder with config.json, model.safetensors and vocab.txt."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.layers, self.epsilon = config["num_hidden_layers"], config["layer_norm_eps"]
        self.heads = config["num_attention_heads"]
        self.weights = read_safetensors(folder / "model.safetensors")
        self.tokenize = Tokenizer(folder / "vocab.txt")

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon)
        return x * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def __call__(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Unit vectors [texts, size] and the numbers of tokens [texts]."""
        rows = [self.tokenize(text) for text in texts]
        counts = np.array([len(row) for row in rows], np.int32)
        ids = np.zeros((len(rows), counts.max()), np.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
        mask = np.arange(ids.shape[1]) < counts[:, None]
        w = self.weights
        x = w["embeddings.word_embeddings.weight"][ids]
        x = x + w["embeddings.position_embeddings.weight"][: ids.shape[1]]
        x = self.norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        for i in range(self.layers):
            x = self.layer(x, mask, f"encoder.layer.{i}")
        mean = (x * mask[..., None]).sum(1) / counts[:, None]
        return (mean / np.linalg.norm(mean, axis=1, keepdims=True)).astype(np.float32), counts

    def layer(self, x: np.ndarray, mask: np.ndarray, at: str) -> np.ndarray:
        n, length, size = x.shape

        def heads(name: str) -> np.ndarray:
            made = self.linear(x, f"{at}.attention.self.{name}")
            return made.reshape(n, length, self.heads, -1).transpose(0, 2, 1, 3)

        scores = heads("query") @ heads("key").transpose(0, 1, 3, 2) / np.sqrt(size // self.heads)
        scores = np.where(mask[:, None, None, :], scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        seen = (scores / scores.sum(-1, keepdims=True)) @ heads("value")
        seen = self.linear(
            seen.transpose(0, 2, 1, 3).reshape(n, length, size), f"{at}.attention.output.dense"
        )
        x = self.norm(x + seen, f"{at}.attention.output.LayerNorm")
        wide = gelu(self.linear(x, f"{at}.intermediate.dense"))
        return self.norm(x + self.linear(wide, f"{at}.output.dense"), f"{at}.output.LayerNorm")
