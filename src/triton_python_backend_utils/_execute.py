"""What every runner of a model does around its methods: checking their answers, wording their failures."""

from __future__ import annotations

import os
import traceback
from typing import Any

from ._config import ModelConfig
from ._errors import TritonModelException

_OWN = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    # what runs an async model, and is above it in every traceback
    *(os.path.join(os.path.dirname(os.__file__), name, "") for name in ("asyncio", "concurrent")),
)
hidden: list[str] = []  # prefixes of more files that say nothing to a model's author


class AnswerError(TritonModelException):
    """What a model's function returned cannot be used. Its text is told as it stands."""


def described(error: BaseException, own: tuple[str, ...] = ()) -> str:
    """What is told of an exception in a model: its type, its text and the model's own frames.

    `own` are prefixes of files that say nothing to a model's author.
    """
    if isinstance(error, AnswerError):
        return str(error)
    own = (*own, *hidden, *_OWN, "<frozen", "<string>")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(own)]
    at = "".join(f"  {frame.filename}({frame.lineno}): {frame.name}\n" for frame in reversed(frames[-5:]))
    text = f"{type(error).__name__}: {error}"
    return f"{text}\n\nAt:\n{at}" if at else text


def failure_text(instance: str, error: BaseException, own: tuple[str, ...] = ()) -> str:
    """What the clients are told when execute() raised, or returned what cannot be used."""
    text = str(error) if isinstance(error, AnswerError) else described(error, own)
    return f"Failed to process the request(s) for model '{instance}', message: {text}"


def check_count(responses: Any, expected: int) -> list[Any]:
    """execute()'s answer as a list of `expected` responses. Raises AnswerError."""
    if not isinstance(responses, (list, tuple)):
        raise AnswerError(
            f"execute() must return a list of {expected} InferenceResponse objects, one per request, "
            f"got {type(responses).__name__}"
        )
    if len(responses) != expected:
        raise AnswerError(
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            f"InferenceRequest(s) size is:{expected}, and InferenceResponse(s) size is:{len(responses)}\n"
        )
    return list(responses) if isinstance(responses, tuple) else responses


def check_none(responses: Any, instance: str) -> None:
    """What execute() of a decoupled model returned. Raises AnswerError."""
    if responses is not None:
        raise AnswerError(
            f"Python model '{instance}' is using the decoupled mode and the execute function must return None."
        )


def check_completed(returned: Any, model: str) -> dict[str, Any]:
    """The configuration that auto_complete_config returned. Raises AnswerError."""
    if not isinstance(returned, ModelConfig):
        raise AnswerError(
            f"auto_complete_config function in model '{model}' must return a valid pb.ModelConfig object, "
            f"got {type(returned).__name__}"
        )
    return returned.as_dict()


def said_ready(answer: Any) -> bool:
    """What a model's is_ready() returned, of which only True is a yes. Raises AnswerError for what is no bool."""
    if not isinstance(answer, bool):
        raise AnswerError(f"is_ready() must return a bool, got {type(answer).__name__}")
    return answer


def check_class(module: Any, path: str) -> Any:
    """The TritonPythonModel class of a loaded model file. Raises TritonModelException."""
    model_class = getattr(module, "TritonPythonModel", None)
    if model_class is None:
        raise TritonModelException(f"{path} has no class TritonPythonModel")
    if not callable(getattr(model_class, "execute", None)):
        raise TritonModelException(f"TritonPythonModel in {path} has no method execute(self, requests)")
    return model_class
