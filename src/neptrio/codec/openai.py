"""Requests and answers of OpenAI's API: checks what was asked, and makes the objects that are answered.

Nothing is taken silently: what a model does not map is refused unless it has the value that means "as usual", and an
unknown member is refused by name.
"""

from __future__ import annotations

import base64
import reprlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from neptrio.errors import Code, Internal, InvalidArgument, TritonError

# ---- sizes
MOST_CHOICES = 16  # n
MOST_REQUESTS = 128  # prompts times n
MOST_TEXTS = 2048  # to embed
MOST_STOPS = 4
LONGEST_STOP = 1024  # characters: what might begin one is looked for in every piece of an answer
MOST_MESSAGES = 16384  # messages, and parts of their contents
LONGEST_CONVERSATION = 4 << 20  # characters of all messages
LARGEST_TEXT = 16 << 20  # characters of a whole answer; a stream has no limit
# members that change nothing here, with what they would have to be to change something
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# members that a model may map (temperature, ...) or that are not supported -> the values that mean "as usual"
USUAL: dict[str, tuple[Any, ...]] = {
    "temperature": (1,),
    "top_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "logit_bias": ({},),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
NUMBERS: dict[str, tuple[float, float]] = {"temperature": (0, 2), "top_p": (0, 1)}
_shown = reprlib.Repr()  # whose texts are short without making a long one first
_shown.maxlevel = 3
_shown.maxstring = _shown.maxother = 60
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}


class RefusedMember(InvalidArgument):
    """A member of a request that is not taken: `param` names it, `kind` is OpenAI's code for the reason."""

    def __init__(self, message: str, param: str, kind: str) -> None:
        super().__init__(message)
        self.param = param
        self.kind = kind


def error_object(error: TritonError) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    status = error.code.http
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    param, code = None, CODES.get(status)
    if isinstance(error, RefusedMember):
        param, code = error.param, error.kind
    elif error.code is Code.NOT_FOUND:
        param, code = "model", "model_not_found"
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


def wrong(name: str, expected: str, value: Any) -> RefusedMember:
    """The error for a member that is missing, of the wrong kind, or beyond its limits."""
    shown = value if isinstance(value, str) else _shown.repr(value)
    kind = "missing_required_parameter" if value is None else "invalid_value"
    return RefusedMember(f"'{name}' must be {expected}, got {shown[:60]!r}", name, kind)


def unsupported(name: str, why: str) -> RefusedMember:
    """The error for a member that is known and cannot be served."""
    return RefusedMember(f"'{name}' is not supported{why}", name, "unsupported_parameter")


def whole(document: dict[str, Any], name: str, default: int | None, least: int, most: int) -> int | None:
    """An integer member. Raises InvalidArgument."""
    value = document.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise wrong(name, f"an integer from {least} to {most}", value)
    return value


def flag(document: dict[str, Any], name: str) -> bool:
    """A boolean member, False without it. Raises InvalidArgument."""
    value = document.get(name)
    if value is not None and not isinstance(value, bool):
        raise wrong(name, "true or false", value)
    return bool(value)


@dataclass
class Asked:
    """A checked request for completions: what is the same for every choice, and the prompts."""

    model: str
    prompts: list[str] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)
    n: int = 1
    stop: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)  # role -> value, for the model's tensors
    stream: bool = False
    include_usage: bool = False


def completion(document: dict[str, Any], chat: bool, mapped: set[str], counts: bool) -> Asked:
    """Checks a request. `mapped`: the roles that the model has inputs for; `counts`: it counts tokens.

    Raises InvalidArgument.
    """
    asked = Asked(model_of(document))
    read = {"model", "n", "stop", "stream", "stream_options", "max_tokens", "seed", *IGNORED, *USUAL}
    read |= {"messages", "max_completion_tokens"} if chat else {"prompt"}
    _known(document, read)
    for name, usual in USUAL.items():
        value = document.get(name)
        if value is None or name in mapped:
            continue
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in usual):
            raise unsupported(name, f" by model '{asked.model}'")
    for name, (low, high) in NUMBERS.items():
        value = document.get(name)
        if value is not None and name in mapped:
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
                raise wrong(name, f"a number from {low} to {high}", value)
            asked.values[name] = float(value)
    limit = whole(document, "max_completion_tokens", None, 1, 2**31 - 1) if chat else None
    if limit is not None and document.get("max_tokens") is not None:
        raise RefusedMember(
            "'max_tokens' and 'max_completion_tokens' are the same limit: give one of them",
            "max_tokens",
            "invalid_value",
        )
    limit = whole(document, "max_tokens", limit, 1, 2**31 - 1)
    for name, number in (("max_tokens", limit), ("seed", whole(document, "seed", None, 0, 2**31 - 1))):
        if number is not None:
            if name not in mapped:
                raise unsupported(name, f" by model '{asked.model}'")
            asked.values[name] = number
    asked.n = whole(document, "n", 1, 1, MOST_CHOICES) or 1
    asked.stop = texts(document, "stop", MOST_STOPS, missing=True)
    if "" in asked.stop:
        raise wrong("stop", "texts that are not empty", "")
    longest = max(map(len, asked.stop), default=0)
    if longest > LONGEST_STOP:
        raise RefusedMember(
            f"'stop' must be texts of at most {LONGEST_STOP} characters, got one of {longest}",
            "stop",
            "invalid_value",
        )
    asked.stream = flag(document, "stream")
    options = document.get("stream_options")
    if options is not None:
        if not isinstance(options, dict):
            raise wrong("stream_options", "an object", options)
        if not asked.stream:
            raise RefusedMember(
                "'stream_options' goes with 'stream': true only", "stream_options", "invalid_value"
            )
        _known(options, {"include_usage", "include_obfuscation"}, "stream_options.")
        asked.include_usage = flag(options, "include_usage")
        if asked.include_usage and not counts:
            raise unsupported(
                "stream_options.include_usage", f": model '{asked.model}' does not count tokens"
            )
    if chat:
        asked.messages = _messages(document.get("messages"))
    else:
        asked.prompts = texts(document, "prompt", MOST_REQUESTS)
    if max(len(asked.prompts), 1) * asked.n > MOST_REQUESTS:
        raise RefusedMember(
            f"more than {MOST_REQUESTS} choices: {len(asked.prompts)} prompts times n {asked.n}",
            "n",
            "invalid_value",
        )
    return asked


def model_of(document: dict[str, Any]) -> str:
    """The name of the model that is asked for. Raises InvalidArgument."""
    value = document.get("model")
    if not isinstance(value, str) or not value:
        raise wrong("model", "the name of a model", value)
    return value


def embedding(document: dict[str, Any]) -> tuple[list[str], bool]:
    """The texts to embed, and whether base64 is wanted. Raises InvalidArgument."""
    _known(document, {"model", "input", "encoding_format", "dimensions", *IGNORED})
    form = document.get("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise wrong("encoding_format", "float or base64", form)
    if document.get("dimensions") is not None:
        raise unsupported("dimensions", ": a model's embeddings have the size they have")
    return texts(document, "input", MOST_TEXTS), form == "base64"


def texts(document: dict[str, Any], name: str, most: int, missing: bool = False) -> list[str]:
    """A member that is a text or a list of texts. Raises InvalidArgument."""
    value = document.get(name)
    if value is None and missing:
        return []
    found = [value] if isinstance(value, str) else value
    if isinstance(found, list) and len(found) > most:
        raise RefusedMember(
            f"'{name}' must be a text or 1 to {most} texts, got {len(found)} of them", name, "invalid_value"
        )
    if not isinstance(found, list) or not found or not all(isinstance(one, str) for one in found):
        raise wrong(name, f"a text or 1 to {most} texts (tokens are not taken)", value)
    try:
        "".join(found).encode()
    except UnicodeEncodeError:
        raise RefusedMember(f"'{name}' is not valid Unicode", name, "invalid_value") from None
    return found


def _known(document: dict[str, Any], names: set[str], prefix: str = "") -> None:
    for name, value in document.items():
        if name not in names and value is not None:
            raise RefusedMember(
                f"'{prefix}{name[:60]}' is not supported", f"{prefix}{name[:60]}", "unknown_parameter"
            )


def _too_much(what: str) -> RefusedMember:
    return RefusedMember(f"'messages' has {what}", "messages", "invalid_value")


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise wrong("messages", "a list of at least one message", value)
    made = []
    pieces, size = len(value), 0
    if pieces > MOST_MESSAGES:
        raise _too_much(f"{pieces} messages, of at most {MOST_MESSAGES}")
    for i, message in enumerate(value):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise wrong(where, "an object with a role", message)
        _known(message, {"role", "content", "name"}, f"{where}.")
        content = message.get("content")
        if isinstance(content, list):
            parts = []
            pieces += len(content)
            if pieces > MOST_MESSAGES:
                raise _too_much(f"more than {MOST_MESSAGES} messages and parts of them")
            for part in content:
                if (
                    not isinstance(part, dict)
                    or part.get("type") != "text"
                    or not isinstance(part.get("text"), str)
                ):
                    raise wrong(f"{where}.content", "text", part)
                parts.append(part["text"])
            content = "".join(parts)
        if not isinstance(content, str):
            raise wrong(f"{where}.content", "text", content)
        size += len(message["role"]) + len(content)
        if size > LONGEST_CONVERSATION:
            raise _too_much(f"more than {LONGEST_CONVERSATION} characters")
        made.append({"role": message["role"], "content": content})
    return made


class Stops:
    """Cuts a text, which comes in pieces, before the first of some stop texts.

    What might be the beginning of a stop text is kept back until it is known.
    """

    def __init__(self, stops: list[str]) -> None:
        self._stops = stops
        self._kept = ""
        self.stopped = False

    def take(self, piece: str) -> str:
        """What may be sent now."""
        text = self._kept + piece
        ends = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if ends:
            self.stopped, self._kept = True, ""
            return text[: min(ends)]
        keep = 0
        for stop in self._stops:
            # the earliest place from where on the text is a beginning of this one
            at = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
            while 0 <= at < len(text) - keep:
                if stop.startswith(text[at:]):
                    keep = len(text) - at
                at = text.find(stop[0], at + 1)
        self._kept = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """What was kept back, when nothing follows."""
        rest, self._kept = self._kept, ""
        return rest


def choice(chat: bool, index: int, text: str, reason: str | None) -> dict[str, Any]:
    """One choice of a whole answer."""
    if chat:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def delta(chat: bool, index: int, text: str | None, reason: str | None, first: bool) -> dict[str, Any]:
    """One choice of a chunk; `text` is None at the end."""
    if not chat:
        return {"index": index, "text": text or "", "logprobs": None, "finish_reason": reason}
    made: dict[str, Any] = {} if text is None else {"content": text}
    if first:
        made = {"role": "assistant", "content": text or ""}
    return {"index": index, "delta": made, "logprobs": None, "finish_reason": reason}


def usage(prompt: int, completed: int | None) -> dict[str, int]:
    """The usage object; `completed` is None for embeddings."""
    if completed is None:
        return {"prompt_tokens": prompt, "total_tokens": prompt}
    return {"prompt_tokens": prompt, "completion_tokens": completed, "total_tokens": prompt + completed}


def vector(values: np.ndarray, as_base64: bool) -> Any:
    """An embedding as a list of numbers, or as base64 of little-endian FP32. Raises Internal for what is no number."""
    row = np.ascontiguousarray(values.reshape(-1), dtype="<f4")
    if not np.isfinite(row).all():
        raise Internal(f"the model has made an embedding with {row[~np.isfinite(row)][0]} in it")
    return base64.b64encode(row.tobytes()).decode() if as_base64 else row.tolist()
