"""Checks what a model's methods return and words its failures; shared by all code that runs models."""

from __future__ import annotations

import os
import traceback
from typing import Any

from ._config import ModelConfig
from ._errors import TritonModelException
from ._foreign import summary, text_of, type_name, valid

_OWN = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    # these run async models, so they are in each traceback above the model's own frames
    *(os.path.join(os.path.dirname(os.__file__), name, "") for name in ("asyncio", "concurrent")),
)
hidden: list[str] = []  # prefixes of more files that are left out of tracebacks


class AnswerError(TritonModelException):
    """A model's method returned something unusable. Clients get its text without a traceback."""


def described(error: BaseException, own: tuple[str, ...] = ()) -> str:
    """The description of a model's exception: its type, its text and the model's own frames.

    `own` are prefixes of the server's files, whose frames are left out.
    """
    if issubclass(type(error), AnswerError):
        return text_of(error)
    own = (*own, *hidden, *_OWN, "<frozen", "<string>")
    text = summary(error)
    try:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(own)]
        at = "".join(f"  {f.filename}({f.lineno}): {f.name}\n" for f in reversed(frames[-5:]))
    except BaseException:  # its class says what its traceback is, and its code what its files are called
        return text
    return f"{text}\n\nAt:\n{valid(at)}" if at else text


def failure_text(instance: str, error: BaseException, own: tuple[str, ...] = ()) -> str:
    """The error for clients when execute() raised or returned something unusable."""
    return f"Failed to process the request(s) for model '{instance}', message: {described(error, own)}"


def check_count(responses: Any, expected: int) -> list[Any]:
    """What execute() returned, as a list. Raises AnswerError if it is not a list of `expected` responses."""
    if not isinstance(responses, (list, tuple)):
        raise AnswerError(
            f"execute() must return a list of {expected} InferenceResponse objects, one per request, "
            f"got {type_name(responses)}"
        )
    if len(responses) != expected:
        raise AnswerError(
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            f"InferenceRequest(s) size is:{expected}, and InferenceResponse(s) size is:{len(responses)}\n"
        )
    return list(responses) if isinstance(responses, tuple) else responses


def check_none(responses: Any, instance: str) -> None:
    """Raises AnswerError if execute() of a decoupled model returned anything but None."""
    if responses is not None:
        raise AnswerError(
            f"Python model '{instance}' is using the decoupled mode and the execute function must return None."
        )


def response_of_rescheduled(response: Any) -> str:
    """What is wrong with `response`, which execute() returned for a request that it wants to execute again."""
    return (
        "Expected a None object in the execute function return list for reschduled request, found type "
        f"'{type_name(response)}'"
    )


def check_completed(returned: Any, model: str) -> dict[str, Any]:
    """The configuration that auto_complete_config returned. Raises AnswerError."""
    if not isinstance(returned, ModelConfig):
        raise AnswerError(
            f"auto_complete_config function in model '{model}' must return a valid pb.ModelConfig object, "
            f"got {type_name(returned)}"
        )
    return returned.as_dict()


def said_ready(answer: Any) -> bool:
    """What a model's is_ready() returned. Raises AnswerError if it is not a bool."""
    if not isinstance(answer, bool):
        raise AnswerError(f"is_ready() must return a bool, got {type_name(answer)}")
    return answer


def check_class(module: Any, path: str) -> Any:
    """The TritonPythonModel class of a loaded model file. Raises TritonModelException."""
    model_class = getattr(module, "TritonPythonModel", None)
    if model_class is None:
        raise TritonModelException(f"{path} has no class TritonPythonModel")
    if not callable(getattr(model_class, "execute", None)):
        raise TritonModelException(f"TritonPythonModel in {path} has no method execute(self, requests)")
    return model_class
