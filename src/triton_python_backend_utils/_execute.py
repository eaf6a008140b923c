"""What every runner of a model does around execute(): checking its answer, wording its failure."""

from __future__ import annotations

import os
import traceback
from typing import Any

from ._errors import TritonModelException

_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep


def failure_text(instance: str, error: BaseException, own: tuple[str, ...] = ()) -> str:
    """What the client is told of an exception in execute(): its text and the model's own frames.

    `own` are prefixes of files that say nothing to a model's author.
    """
    own = (*own, _OWN, "<frozen", "<string>")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(own)]
    at = "".join(f"  {frame.filename}({frame.lineno}): {frame.name}\n" for frame in reversed(frames[-5:]))
    text = (
        f"Failed to process the request(s) for model '{instance}', message: {type(error).__name__}: {error}"
    )
    return f"{text}\n\nAt:\n{at}" if at else text


def check_count(responses: Any, expected: int) -> list[Any]:
    """execute()'s answer as a list of `expected` responses. Raises TritonModelException."""
    if not isinstance(responses, (list, tuple)):
        raise TritonModelException(
            f"execute() must return a list of {expected} InferenceResponse objects, one per request, "
            f"got {type(responses).__name__}"
        )
    if len(responses) != expected:
        raise TritonModelException(
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            f"InferenceRequest(s) size is:{expected}, and InferenceResponse(s) size is:{len(responses)}"
        )
    return list(responses) if isinstance(responses, tuple) else responses


def check_class(module: Any, path: str) -> Any:
    """The TritonPythonModel class of a loaded model file. Raises TritonModelException."""
    model_class = getattr(module, "TritonPythonModel", None)
    if model_class is None:
        raise TritonModelException(f"{path} has no class TritonPythonModel")
    if not callable(getattr(model_class, "execute", None)):
        raise TritonModelException(f"TritonPythonModel in {path} has no method execute(self, requests)")
    return model_class
