"""Checks what a model's methods return and words its failures; shared by all code that runs models."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from ._config import ModelConfig
from ._errors import TritonModelException
from ._foreign import summary, text_of, type_name, valid
from ._request import TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, InferenceResponse

_OWN = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    # these run async models, so they are in each traceback above the model's own frames
    *(os.path.join(os.path.dirname(os.__file__), name, "") for name in ("asyncio", "concurrent")),
)
_log = logging.getLogger("neptrio.python")  # where nobody listens, Python prints its warnings
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
    text = summary(error) + _missing_module(error)
    try:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(own)]
        at = "".join(f"  {f.filename}({f.lineno}): {f.name}\n" for f in reversed(frames[-5:]))
    except BaseException:  # its class says what its traceback is, and its code what its files are called
        return text
    return f"{text}\n\nAt:\n{valid(at)}" if at else text


def _missing_module(error: BaseException) -> str:
    """What can be done where a package is not installed; "" for all other errors."""
    if type(error) is not ModuleNotFoundError or error.args != (f"No module named {error.name!r}",):
        return ""
    return f" ({ways_to_a_module()})"


def ways_to_a_module() -> str:
    """What can be done where a package is not installed."""
    return (
        f"the model runs with {sys.executable}: install the package there, or give the model an environment of its own "
        "with the parameter EXECUTION_ENV_PATH"
    )


def failure_text(instance: str, error: BaseException, own: tuple[str, ...] = ()) -> str:
    """The error for clients when execute() raised or returned something unusable."""
    return failed_text(instance, described(error, own))


def failed_text(instance: str, reason: str) -> str:
    """The error for clients when an answer of a model cannot be used."""
    return f"Failed to process the request(s) for model '{instance}', message: {reason}"


LOOP_STOPPED = "the model has stopped its event loop: it is run again, and the model is not ready any more"
OPEN_ANSWER, RESCHEDULED_ANSWER = object(), object()


def begun(given: list[Any]) -> None:
    """A decoupled model's execute() is called with these requests, of which there are several (_sender.py, rule 3). listed() is
    called when it has returned; where it raises they are closed."""
    for request in given:
        request._channel.set_together(True)


def listed(responses: Any, given: list[Any], instance: str, decoupled: bool) -> list[Any]:
    """What execute() has returned for each request in `given`. Raises AnswerError where all of it is unusable.

    It is a list of our own, even where a list was returned: one that the model keeps refers to its responses, too, and whoever
    counts references sees that once the caller has let go of it.
    """
    if decoupled:
        for request in given:
            request._channel.set_together(False)
        if responses is not None:
            raise AnswerError(
                f"Python model '{instance}' is using the decoupled mode and the execute function must return None."
            )
        return [None] * len(given)
    if responses is None and all(request._channel.taken for request in given):
        return [None] * len(given)
    if not isinstance(responses, (list, tuple)):
        raise AnswerError(
            f"execute() must return a list of {len(given)} InferenceResponse objects, one per request, "
            f"got {type_name(responses)}"
        )
    if len(responses) != len(given):
        raise AnswerError(
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            f"InferenceRequest(s) size is:{len(given)}, and InferenceResponse(s) size is:{len(responses)}\n"
        )
    return list(responses)


def answers(
    given: list[Any], responses: list[Any], instance: str, decoupled: bool, made: Callable[[int, Any], Any]
) -> list[Any]:
    """What becomes of each request, from what listed() says: what `made(place, response)` makes of its response; the text of
    an error; OPEN_ANSWER where a sender answers it, or has; RESCHEDULED_ANSWER where it is to be executed again. Closes the
    senders of those that are answered otherwise."""
    found: list[Any] = []
    for i, request in enumerate(given):
        back, response = request._channel, responses[i]
        if request._release_flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE:
            back.close()
            if response is None:
                found.append(RESCHEDULED_ANSWER)
            else:
                reason = "Expected a None object in the execute function return list for reschduled request, found type "
                found.append(failed_text(instance, f"{reason}'{type_name(response)}'"))
        elif decoupled or (response is None and back.taken):
            found.append(OPEN_ANSWER)
        elif response is None:
            found.append(failed_text(instance, "execute() returned None for a request"))
        elif not isinstance(response, InferenceResponse):
            reason = f"execute() must return InferenceResponse objects, got {type_name(response)}"
            found.append(failed_text(instance, reason))
        elif back.sent:
            _log.warning(
                "%s: a response was both sent and returned for a request; the sent one counts", instance
            )
            found.append(OPEN_ANSWER)
        else:
            back.close()
            found.append(made(i, response))
    return found


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
