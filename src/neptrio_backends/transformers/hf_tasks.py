"""A batch through a model that answers at once: texts, tokens or images in, scores or vectors out.

Rules:
 1. A request is refused alone: what is wrong in it costs the others of its batch nothing.
 2. All rows of a batch are sorted by length and padded in groups (hf_lengths); what is answered has no padding, but for the
    rows of one request, which have the length of its longest.
 3. Tokens of clients are checked: a number outside of the model's table would be read astray on a GPU.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import hf_lengths
import hf_results
import triton_python_backend_utils as pb_utils
from hf_folder import Folder, Parameters

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
MOST_PIXELS = 1 << 25  # of an image
STRETCHED = 50  # times as long as wide
MOST_LOGITS = 1 << 26  # numbers that one call of a fill-mask model makes


class Refused(Exception):
    """A request that cannot be answered, with the reason."""


@dataclass
class Row:
    """A text or an image, and what the model has made of it."""

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    types: list[int] | None = None
    offsets: list[tuple[int, int]] = field(default_factory=list)
    special: list[int] = field(default_factory=list)
    text: str = ""
    pixels: Any = None
    made: Any = None  # logits or hidden states, a tensor


def array(request: Any, name: str) -> np.ndarray | None:
    """An input, None where the request has it not."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    found: np.ndarray = tensor.as_numpy()
    return found


def texts(values: np.ndarray, name: str) -> list[str]:
    """The texts of an input. Raises Refused."""
    try:
        return [value.decode() for value in values.ravel().tolist()]
    except UnicodeDecodeError:
        raise Refused(f"input '{name}' is no UTF-8") from None


def one_of(request: Any, *names: str) -> tuple[str, np.ndarray]:
    """The one input of these that a request has. Raises Refused."""
    there = [(name, found) for name in names if (found := array(request, name)) is not None]
    if len(there) != 1:
        what = " or ".join(names)
        raise Refused(f"a request has one of the inputs {what}, got {len(there)} of them")
    return there[0]


def checked_ids(rows: list[list[int]], size: int, longest: int) -> None:
    """Raises Refused for tokens that the model does not know, and for too many or none."""
    for row in rows:
        if not row:
            raise Refused("a text without tokens has no answer")
        if longest and len(row) > longest:
            raise Refused(
                f"a text of {len(row)} tokens: the model takes {longest}; the parameter 'truncation' cuts what is longer"
            )
        if min(row) < 0 or max(row) >= size:
            raise Refused(f"tokens must be numbers from 0 to {size - 1}, got {min(row)} to {max(row)}")


class Answering:
    """A model with its tokenizer or image processor."""

    def __init__(
        self, folder: Folder, given: Parameters, batched: bool, device: str, model: Any, reader: Any
    ) -> None:
        """`reader`: a tokenizer or an image processor, None where there is neither."""
        self._folder = folder
        self._given = given
        self._batched = batched
        self._device = device
        self._model = model
        self._reader = reader
        arguments = inspect.signature(model.forward).parameters
        self._typed = "token_type_ids" in arguments
        self._words = folder.task == "token-classification"
        if folder.task == "image-classification":
            return
        self._size = int(model.get_input_embeddings().weight.shape[0])
        pad = getattr(model.config, "pad_token_id", None)
        # a classifier on a decoder finds the end of a text by the token that pads
        finds_end = folder.task == "text-classification" and pad is None
        self._pads = not (finds_end and str(folder.architecture).startswith(DECODERS))
        self._pad = int(pad or 0)

    def answer(self, requests: list[Any]) -> list[Any]:
        """One response for each request."""
        read: list[list[Row] | Refused] = []
        for request in requests:
            try:
                read.append(self._rows(request))
            except Refused as error:
                read.append(error)
        rows = [row for one in read if isinstance(one, list) for row in one]
        if self._folder.task == "image-classification":
            self._see(rows)
        else:
            self._run(rows)
        responses = []
        for request, one in zip(requests, read, strict=True):
            try:
                if isinstance(one, Refused):
                    raise one
                responses.append(self._response(request, one))
            except Refused as error:
                code = pb_utils.TritonError.INVALID_ARG
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code)))
        return responses

    # ------------------------------------------------------------ requests

    def _rows(self, request: Any) -> list[Row]:
        if self._folder.task == "image-classification":
            return self._images(request)
        names = ("TEXT", "INPUT_IDS") if self._folder.tokenizer else ("INPUT_IDS",)
        name, values = one_of(request, *names)
        if name == "TEXT":
            rows = self._tokens(texts(values, name), array(request, "TEXT_PAIR"))
        else:
            values = values if self._batched else values[None]
            mask = array(request, "ATTENTION_MASK")
            mask = np.ones_like(values) if mask is None else mask if self._batched else mask[None]
            if mask.shape != values.shape or not np.isin(mask, (0, 1)).all():
                raise Refused("ATTENTION_MASK must be 0 or 1 for each of INPUT_IDS")
            rows = [Row(ids, seen) for ids, seen in zip(values.tolist(), mask.tolist(), strict=True)]
        checked_ids([row.ids for row in rows], self._size, self._folder.longest)
        return rows

    def _tokens(self, given: list[str], pairs: np.ndarray | None) -> list[Row]:
        others = None if pairs is None else texts(pairs, "TEXT_PAIR")
        found = self._reader(
            given,
            others,
            truncation=self._folder.truncates and bool(self._folder.longest),
            max_length=self._folder.longest or None,
            return_attention_mask=False,
            return_special_tokens_mask=self._words,
            return_offsets_mapping=self._words,
        )
        rows = []
        for i, text in enumerate(given):
            row = Row(found["input_ids"][i], [1] * len(found["input_ids"][i]), text=text)
            if self._typed and "token_type_ids" in found:
                row.types = found["token_type_ids"][i]
            if self._words:
                row.offsets, row.special = found["offset_mapping"][i], found["special_tokens_mask"][i]
            rows.append(row)
        return rows

    def _images(self, request: Any) -> list[Row]:
        name, values = one_of(request, "IMAGE", "PIXEL_VALUES")
        if name == "PIXEL_VALUES":
            values = values if self._batched else values[None]
            return [Row(pixels=torch.tensor(one)) for one in values]
        import PIL.Image

        images = []
        for content in values.ravel().tolist():
            try:
                with PIL.Image.open(io.BytesIO(content), formats=FORMATS) as image:
                    # processors scale the shorter side up to some hundred pixels, and the longer one with it
                    if image.width * image.height > MOST_PIXELS or max(image.size) > STRETCHED * min(
                        image.size
                    ):
                        raise Refused(
                            f"an image of {image.width} x {image.height} pixels is too large or too thin"
                        )
                    images.append(image.convert("RGB"))
            except Refused:
                raise
            except Exception as error:  # of a dozen decoders
                raise Refused(f"input 'IMAGE' is no image of {', '.join(FORMATS)}: {error}") from None
        try:
            pixels = self._reader(images=images, return_tensors="pt")["pixel_values"]
        except Exception as error:
            raise Refused(f"input 'IMAGE' cannot be read: {type(error).__name__}: {error}") from None
        return [Row(pixels=one) for one in pixels]

    # ------------------------------------------------------------ the model

    def _called(self, **given: Any) -> Any:
        with torch.inference_mode():
            found = self._model(**{key: value.to(self._device) for key, value in given.items()})
        return found.last_hidden_state if self._folder.task == "feature-extraction" else found.logits

    def _run(self, rows: list[Row]) -> None:
        # a fill-mask model makes a number for each word of its vocabulary at every place
        most = max(1, MOST_LOGITS // self._size) if self._folder.task == "fill-mask" else hf_lengths.MOST
        for group in hf_lengths.groups([len(row.ids) for row in rows], most, self._pads):
            length = len(rows[group[-1]].ids)

            def padded(
                part: Callable[[Row], list[int]],
                fill: int,
                group: list[int] = group,
                length: int = length,
            ) -> torch.Tensor:
                lists = [part(rows[i]) for i in group]
                return torch.tensor([one + [fill] * (length - len(one)) for one in lists])

            given = {
                "input_ids": padded(lambda row: row.ids, self._pad),
                "attention_mask": padded(lambda row: row.mask, 0),
            }
            if self._typed and any(rows[i].types for i in group):
                given["token_type_ids"] = padded(lambda row: row.types or [0] * len(row.ids), 0)
            found = self._called(**given)
            for place, i in enumerate(group):
                made = found[place]
                rows[i].made = (
                    made if self._folder.task == "text-classification" else made[: len(rows[i].ids)]
                )

    def _see(self, rows: list[Row]) -> None:
        shapes: dict[Any, list[Row]] = {}
        for row in rows:
            shapes.setdefault(tuple(row.pixels.shape), []).append(row)
        for alike in shapes.values():
            pixels = torch.stack([row.pixels for row in alike]).to(self._model.dtype)
            for row, made in zip(alike, self._called(pixel_values=pixels), strict=True):
                row.made = made

    # ------------------------------------------------------------ responses

    def _response(self, request: Any, rows: list[Row]) -> Any:
        wanted = request.requested_output_names()
        made: dict[str, list[np.ndarray]] = {}
        for name in wanted:
            make = getattr(self, f"_{name.lower()}", None)
            if make is not None:
                made[name] = [make(row) for row in rows]
        tensors = []
        for name, parts in made.items():
            found = _stacked(parts) if self._batched else parts[0]
            tensors.append(pb_utils.Tensor(name, found))
        return pb_utils.InferenceResponse(tensors)

    def _logits(self, row: Row) -> np.ndarray:
        return _numpy(row.made)

    def _hidden_states(self, row: Row) -> np.ndarray:
        return _numpy(row.made)

    def _prompt_tokens(self, row: Row) -> np.ndarray:
        return np.array([len(row.ids)], np.int32)

    def _embedding(self, row: Row) -> np.ndarray:
        states, seen = _numpy(row.made), np.array(row.mask, bool)
        if not seen.any():
            raise Refused("ATTENTION_MASK hides all tokens")
        states = states[seen]
        way = self._folder.pooling
        found: np.ndarray = (
            states.mean(0)
            if way == "mean"
            else states.max(0)
            if way == "max"
            else states[0 if way == "cls" else -1]
        )
        if self._folder.normalizes:
            found = found / max(float(np.linalg.norm(found)), 1e-12)
        return found.astype(np.float32)

    def _result(self, row: Row) -> np.ndarray:
        labels, task = self._folder.labels, self._folder.task
        if task == "fill-mask":
            value: Any = self._filled(row)
        elif task == "token-classification":
            if not row.offsets:
                raise Refused("RESULT needs TEXT: tokens alone do not say where they stand")
            scores = hf_results.softmax(_numpy(row.made))
            value = hf_results.words(scores, labels, row.offsets, row.special, row.text)
            if self._given.aggregation == "simple":
                value = hf_results.joined(value, row.text)
        else:
            problem = str(getattr(self._model.config, "problem_type", None) or "")
            most = self._given.top_k or (5 if task == "image-classification" else len(labels))
            scores = _numpy(row.made)
            chances = (
                hf_results.softmax(scores)
                if task == "image-classification"
                else hf_results.chances(scores, problem)
            )
            value = hf_results.ranked(chances, labels, most)
        return np.array([hf_results.text(value)], object)

    def _filled(self, row: Row) -> list[Any]:
        if self._reader is None:
            raise Refused("RESULT needs a tokenizer: LOGITS are what is known without one")
        places = [i for i, token in enumerate(row.ids) if token == self._reader.mask_token_id]
        if not places:
            raise Refused(f"the text has no {self._reader.mask_token}, which stands for the missing word")
        lists = []
        for place in places:
            chances = hf_results.softmax(_numpy(row.made[place]))
            options = []
            for token in np.argsort(-chances, kind="stable")[: self._given.top_k or 5].tolist():
                whole = [*row.ids[:place], token, *row.ids[place + 1 :]]
                options.append(
                    {
                        "score": float(chances[token]),
                        "token": token,
                        "token_str": self._reader.decode([token]),
                        "sequence": self._reader.decode(whole, skip_special_tokens=len(places) == 1),
                    }
                )
            lists.append(options)
        return lists[0] if len(lists) == 1 else lists


# classes of decoders, whose scores for a text are those of its last token
DECODERS = (
    "GPT", "Llama", "Mistral", "Mixtral", "Qwen", "Gemma", "Phi", "OPT", "Bloom", "Falcon", "CTRL", "StableLm", "Starcoder",
)  # fmt: skip


def _numpy(tensor: Any) -> np.ndarray:
    found: np.ndarray = tensor.float().cpu().numpy()
    return found


def _stacked(parts: list[np.ndarray]) -> np.ndarray:
    """Rows of one request as one array; shorter ones are filled up with zeros."""
    longest = max(len(part) for part in parts)
    if all(len(part) == longest for part in parts):
        return np.stack(parts)
    made = np.zeros((len(parts), longest, *parts[0].shape[1:]), parts[0].dtype)
    for row, part in zip(made, parts, strict=True):
        row[: len(part)] = part
    return made
