"""The table of sizes: the most that a client may send of anything whose size it chooses.

The problem: what a field of a request may be long is asked in many places (JSON, protobuf, shared memory, the embedded
server), and where nobody asked, one request took gigabytes. The choice: the numbers stand here and nowhere else, all
readers take them from here, and TABLE says of each what reads it and what a client gets beyond it.

Rules:
 1. A reader asks before it takes memory, and stops at the first byte or element that is one too many.
 2. What an error shows of a client's text went through shown(): nobody gets back as much as was sent.
 3. docs/security.md has the rows of TABLE; a test holds them equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

MOST_DIMENSIONS = 64  # of a tensor: numpy's own limit
MOST_TENSORS = 16384  # inputs of a request, and requested outputs
MOST_PARAMETERS = 16384  # of a request
LONGEST_NAME = 1024  # bytes of the name of a model, version, tensor, region or parameter
LONGEST_VALUE = 4096  # bytes of the value of a setting: a file's path can be so long
MAX_HEAD_BYTES = 64 << 10  # of an HTTP request's head
MIN_BYTES_PER_SECOND = 16 << 10  # of its body: so much time it has beside the request timeout
CONTROL_BYTES = 1 << 20  # of the message or body of a control verb
REFLECTION_BYTES = 16 << 10  # of a message of server reflection, which names one thing
LOAD_BYTES = 1 << 30  # of the message of a load call, which can bring a model's files
OUTPUT_BYTES = 2 << 30  # of an output or scratch buffer of a kernel model: what a gRPC message can carry
MOST_VALUES = 1 << 17  # of a JSON document, other than elements of tensors
MOST_ENTRIES = 1024  # elements of all lists and maps in a control message together
MOST_FILES = 1 << 15  # the same in the message of a load call: each file of a model is one
LONGEST_SHOWN = 128  # characters of a client's text in an error
LONGEST_ERROR = 64 << 10  # characters of an error's text, whoever made it
LAST_ERRORS = 8  # texts of errors that a model remembers
LONGEST_LAST_ERROR = 512  # characters of each
KEPT_PARAMETERS = 64 << 10  # bytes of a request's parameters that its trace keeps
LONGEST_KEPT = 256  # bytes of a client's text that a cache may keep
LONGEST_REPEATED = 1 << 10  # the same of what clients repeat in each request for inference


@dataclass(frozen=True)
class Limit:
    """A row of the table: what is limited where, how, and what a client gets beyond it."""

    where: str
    what: str
    most: int
    unit: str
    beyond: str  # HTTP status and gRPC status, or what happens
    flag: str = ""  # that changes it


_REFUSED = "400, INVALID_ARGUMENT"
_TOO_LARGE = "413, RESOURCE_EXHAUSTED"
TABLE = (
    Limit("inference", "dimensions of a shape", MOST_DIMENSIONS, "", _REFUSED),
    Limit("inference", "inputs, requested outputs, of each", MOST_TENSORS, "", _REFUSED),
    Limit("inference", "parameters", MOST_PARAMETERS, "", _REFUSED),
    Limit(
        "inference",
        "an output or scratch buffer of a kernel model",
        OUTPUT_BYTES,
        "bytes",
        _REFUSED,
        "--max-output-bytes",
    ),
    Limit("all verbs", "a name (model, version, tensor, region, parameter)", LONGEST_NAME, "bytes", _REFUSED),
    Limit("control verbs", "a message or body", CONTROL_BYTES, "bytes", _TOO_LARGE),
    Limit(
        "load, check",
        "a message; of a body `--http-max-input-size`",
        LOAD_BYTES,
        "bytes",
        _TOO_LARGE,
        "--max-load-bytes",
    ),
    Limit("server reflection", "a message", REFLECTION_BYTES, "bytes", _TOO_LARGE),
    Limit("JSON other than `infer`", "values that are no elements of inputs", MOST_VALUES, "", _REFUSED),
    Limit("control verbs over gRPC", "elements of all lists and maps", MOST_ENTRIES, "", _REFUSED),
    Limit("load over gRPC", "elements of all lists and maps, files among them", MOST_FILES, "", _REFUSED),
    Limit("control verbs over gRPC", "the value of a setting", LONGEST_VALUE, "bytes", _REFUSED),
    Limit("errors", "what they show of a client's text", LONGEST_SHOWN, "characters", "cut"),
    Limit("errors", "the whole text", LONGEST_ERROR, "characters", "cut"),
    Limit("last errors of a model", "texts", LAST_ERRORS, "", "the oldest are left out"),
    Limit("last errors of a model", "a text", LONGEST_LAST_ERROR, "characters", "cut"),
    Limit("traces", "the id of a request", LONGEST_NAME, "characters", "cut"),
    Limit("traces with tensors", "the value of a parameter", LONGEST_VALUE, "characters", "cut"),
    Limit(
        "traces with tensors", "the parameters of a request", KEPT_PARAMETERS, "bytes", "the rest is left out"
    ),
    Limit("caches", "a client's text in one", LONGEST_KEPT, "bytes", "not kept"),
    Limit(
        "caches of heads of inference, and of the text before its tensors",
        "one that came twice in a row",
        LONGEST_REPEATED,
        "bytes",
        "not kept",
    ),
)


def shown(text: str, most: int = LONGEST_SHOWN) -> str:
    """A client's text as an error, a status or the log shows it: cut, with the length that it had."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


# verbs of REST and rpcs whose bodies are inference, of any size that the port takes, or a model's files
LARGE_VERBS = frozenset(
    [
        "infer",
        "infer_stream",
        "generate",
        "generate_stream",
        "openai_completions",
        "openai_chat",
        "openai_embeddings",
        "repository_load",
        "repository_check",
    ]
)


def body_bytes(verb: str, most: int) -> int:
    """Bytes that the body of a REST request may have; `most`: --http-max-input-size."""
    return most if verb in LARGE_VERBS else min(most, CONTROL_BYTES)


def message_bytes(path: bytes, load: int = LOAD_BYTES) -> int:
    """Bytes that a message of an rpc other than inference may have; `load`: --max-load-bytes."""
    if path.endswith(b"/RepositoryModelLoad"):
        return load
    return REFLECTION_BYTES if path.endswith(b"/ServerReflectionInfo") else CONTROL_BYTES


def most_entries(path: bytes) -> int:
    """Elements that all lists and maps in a message of an rpc other than inference may have together."""
    return MOST_FILES if path.endswith(b"/RepositoryModelLoad") else MOST_ENTRIES


def remember(cache: dict[K, V], key: K, value: V, most: int, size: int = -1) -> None:
    """Keeps what was found for a text that a client sent: up to `most` of them, then all are forgotten, and none that is
    longer than LONGEST_KEPT. `size`: of the key, where it is no text itself."""
    if (len(key) if size < 0 else size) > LONGEST_KEPT:  # type: ignore[arg-type]
        return
    if len(cache) >= most:
        cache.clear()
    cache[key] = value
