"""What is made of an answer whose outputs are not those of its model's configuration (docs/python-models.md).

Problem: a Triton server passes such an answer on as it is, and drops the outputs that the configuration does not have. Models
rely on it: some leave an output out on purpose, others make FP64 where FP32 is configured and their clients read either. But
a misspelt name then is an answer with status 200 that holds nothing.

Choice: the log names every difference, and which of them is an error is the model's to say. Unless it says otherwise only
those are that lack an output and have one instead that the configuration does not have: then it is misnamed.

1. A difference is logged once for each model, and not more than MOST_TOLD of them.
2. Outputs that the configuration does not have are never sent, whatever is checked.
3. An output that the client did not ask for is not missing.
4. A process may answer with any number of outputs, and the loop waits meanwhile: what takes long is done for a few of them.
"""

from __future__ import annotations

import difflib
import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from neptrio import datatypes
from neptrio.config.output_checks import ALL, NAMES
from neptrio.errors import Internal, Reason, TritonError
from neptrio.limits import shown
from neptrio.request.infer_request import InferRequest, Tensor

MOST_TOLD = 8  # differences between a model's answers and its configuration that are logged
MOST_COMPARED = 16  # outputs that the configuration does not have, with those that are missing
LONGEST_COMPARED = 256  # characters of a name
log = logging.getLogger("neptrio.python")
_telling = threading.Lock()  # so that a model's instances together log a warning once


class Difference(NamedTuple):
    """One way in which an answer differs from the configuration."""

    text: str  # begins where the model's name stood
    consequence: str  # what clients notice of it where it is no error
    misnamed: bool  # an output is missing, and there is one that the configuration does not have
    harmless: bool = False  # it is no error, whatever is checked


def known(request: InferRequest, tensors: list[Tensor]) -> list[Tensor]:
    """A model's outputs without those that its configuration lacks."""
    names = request.model.known_outputs
    return [tensor for tensor in tensors if tensor.name in names]


def refusal(
    model: Any, made: Iterable[tuple[str, int, int]], wanted: Iterable[str] | None
) -> TritonError | None:
    """The error that an answer is which differs from the configuration, None where it is passed on. Logs the differences.

    `made` are the outputs in it: name, datatype, number of dimensions; `wanted` the names of those that the client asked for,
    None for all.
    """
    found = list(_differences(model.output_types, model.state_outputs, list(made), wanted))
    refused = None
    for difference in found:
        checked = model.check_outputs == ALL or (model.check_outputs == NAMES and difference.misnamed)
        failing = checked and not difference.harmless
        if failing and refused is None:
            refused = Internal(f"model '{model.name}' {difference.text}", reason=Reason.BACKEND)
        _tell(model, f"{difference.text}: {'such requests fail' if failing else difference.consequence}")
    return refused


def _tell(model: Any, text: str) -> None:
    with _telling:
        if text in model.told_of_outputs or len(model.told_of_outputs) >= MOST_TOLD:
            return
        model.told_of_outputs.add(text)
    log.warning("model '%s' %s", model.name, text, extra={"subject": model.name})


def _differences(
    types: dict[str, tuple[int, int]],
    states: Collection[str],
    made: list[tuple[str, int, int]],
    wanted: Iterable[str] | None,
) -> Iterator[Difference]:
    times = Counter(name for name, _, _ in made)
    extra = [name for name in times if name not in types and name not in states]
    few = [name[:LONGEST_COMPARED] for name in extra[:MOST_COMPARED]]  # rule 4
    strange = shown(str(few))
    missing = [name for name in (types if wanted is None else wanted) if name not in times]
    for place, name in enumerate(missing):
        text = f"answers without its output '{name}'"
        if extra:
            text += f" and with {strange}, which its configuration does not have"
            near = difflib.get_close_matches(name, few, 1, 0.5) if place < MOST_TOLD else ()
            if near:
                text += f" (is '{shown(near[0])}' meant to be it?)"
        yield Difference(text, "clients get an answer that lacks it", bool(extra))
    if extra and not missing:
        text = f"makes output(s) {strange} that its configuration does not have"
        yield Difference(text, "they are not sent", False, True)
    for name in [name for name in types if times[name] > 1]:
        yield Difference(f"makes output '{name}' more than once", "clients get it so", False)
    for name, dtype, rank in made:
        expected = types.get(name)
        if expected is None:
            continue
        if dtype != expected[0]:
            is_, should = datatypes.NAME.get(dtype, "another type"), datatypes.NAME.get(expected[0], "none")
            yield Difference(
                f"makes output '{name}' as {is_}, its configuration says {should}",
                f"clients get {is_}",
                False,
            )
        if expected[1] not in (-1, rank):
            yield Difference(
                f"makes output '{name}' with {rank} dimension(s), its configuration says {expected[1]}, the batch's included "
                "where it has one",
                "clients get it so",
                False,
            )
