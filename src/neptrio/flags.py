"""tritonserver's flags that need more than an argparse line: value forms, and flags we refuse.

Rules:
 1. A flag is accepted only if it does what tritonserver's does. One whose feature is missing is
    refused with that reason, unless it is set to the value that says "off".
 2. A tuning hint for threads, pools or placement that this server does not have is accepted with a warning
    that says so: scripts written for tritonserver keep working and nobody is misled.
 3. An unknown flag is refused with the nearest known one.
Source: docs/protocol/features.md A8.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from neptrio import storage_uri
from neptrio.cores import usable_cores
from neptrio.observe.memory_limit import memory_limit

MOST_FRONTENDS = 64
ACCESS_LOGS = ("off", "json", "combined")
CONTROL_MODES = ("none", "poll", "explicit", "on-demand")
TRUE = ("true", "1", "on")
FALSE = ("false", "0", "off")

# flag -> (what it would do, the value that means "off" and is therefore accepted, or None)
MISSING: dict[str, tuple[str, str | None]] = {
    "--model-namespacing": ("model namespaces", "false"),
    "--repoagent-directory": ("repository agents", None),
    "--allow-sagemaker": ("the SageMaker endpoint", "false"),
    "--sagemaker-port": ("the SageMaker endpoint", None),
    "--sagemaker-safe-port-range": ("the SageMaker endpoint", None),
    "--sagemaker-thread-count": ("the SageMaker endpoint", None),
    "--allow-vertex-ai": ("the Vertex AI endpoint", "false"),
    "--vertex-ai-port": ("the Vertex AI endpoint", None),
    "--vertex-ai-thread-count": ("the Vertex AI endpoint", None),
    "--vertex-ai-default-model": ("the Vertex AI endpoint", None),
}

# settings of --backend-config: one that is nearly one of these is misspelt
BACKEND_SETTINGS = (
    "isolation",
    "check-outputs",
    "environment",
    "environment-cache-directory",
    "execution-env-path",
    "initialize-timeout-seconds",
    "is-ready-timeout-seconds",
    "allowed-directory",
    "default-max-batch-size",
)

# flags of threads and pools that this server has no counterpart of
NO_EFFECT = {
    "--http-thread-count": "one thread serves all connections",
    "--grpc-infer-thread-count": "one thread serves all connections",
    "--grpc-infer-allocation-pool-size": "requests are not pooled by number",
    "--grpc-http2-max-pings-without-data": "the server's own PINGs are bounded by --grpc-keepalive-time",
    "--grpc-max-response-pool-size": "responses are not pooled by number",
    "--buffer-manager-thread-count": "instances copy their own buffers",
    "--min-supported-compute-capability": "the CUDA driver decides which devices can run a model",
    "--enable-peer-access": "devices do not exchange tensors",
    "--model-load-gpu-limit": "models take what GPU memory they need",
    "--cuda-memory-pool-byte-size": "GPU memory is taken as models need it",
    "--cuda-virtual-address-size": "GPU memory is taken as models need it",
    "--host-policy": "instances run on whatever cores the server may use",
}


def boolean(text: str) -> bool:
    """true/false as tritonserver spells them."""
    lower = text.lower()
    if lower in TRUE:
        return True
    if lower in FALSE:
        return False
    raise argparse.ArgumentTypeError(f"expected one of {', '.join(TRUE + FALSE)}, got '{text}'")


def one_of(*names: str) -> Callable[[str], str]:
    """The parser of one of a few names, in any case of letters."""

    def parse(text: str) -> str:
        # a text that is none of them is what argparse refuses
        return next((name for name in names if name.lower() == text.lower()), text)

    return parse


def verbosity(text: str) -> int:
    """A level of verbose messages; true is 1 and false 0, as for a Triton server."""
    if text.lower() in ("true", "false"):
        return int(text.lower() == "true")
    return not_negative(text)


def at_least_one(text: str) -> int:
    """A number of threads; a Triton server takes 0 for 1."""
    return max(1, not_negative(text))


def port(text: str) -> int:
    """A TCP port, 0 = any free one."""
    return _ranged(text, 0, 65535)


def repository(text: str) -> Path | str:
    """A local folder as a Path, a URL of cloud storage as text; storage URIs of KServe become one of them."""
    try:
        return storage_uri.resolve(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def local_repository(text: str) -> Path:
    """A local folder."""
    where = repository(text)
    if isinstance(where, str):
        raise argparse.ArgumentTypeError(f"expected a folder of this machine, got '{text}'")
    return where


def model_name(text: str) -> str:
    """A name that a model's folder can have, "" for none."""
    if text.startswith(".") or "/" in text or "\0" in text:
        raise argparse.ArgumentTypeError(
            f"expected a model's name without '/' and without '.' in front, got '{text}'"
        )
    return text


def origin(text: str) -> str:
    """A web page's origin as browsers write it: `SCHEME://HOST[:PORT]` in lower case, `null`, or `*` for all."""
    lower = text.lower()
    if lower not in ("*", "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\s\"',;*]+", lower):
        raise argparse.ArgumentTypeError(
            f"expected SCHEME://HOST or SCHEME://HOST:PORT, null or *, got '{text}'"
        )
    return lower


def host(text: str) -> str:
    """A name in Host headers, `*.NAME` for all under it, `*` for all; in lower case, without a port."""
    lower = text.lower()
    if lower != "*" and not re.fullmatch(r"(?:\*\.)?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*", lower):
        raise argparse.ArgumentTypeError(f"expected NAME, *.NAME or *, without a port, got '{text}'")
    return lower


def positive(text: str) -> int:
    """An integer above 0."""
    return _ranged(text, 1, None)


def not_negative(text: str) -> int:
    """An integer of 0 or more."""
    return _ranged(text, 0, None)


def frontends(text: str) -> int:
    """A number of front ends: N, or `auto`, one for each core that this process may use but two, at least one."""
    if text == "auto":
        return max(1, usable_cores() - 2)
    value = not_negative(text)
    if value > MOST_FRONTENDS:
        raise argparse.ArgumentTypeError(f"expected {MOST_FRONTENDS} or less, got '{text}'")
    return value


def tolerance(text: str) -> float:
    """A finite number, 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number, 0 or more, got '{text}'")
    return value


def seconds(text: str) -> float:
    """A number of seconds, 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"expected a number of seconds, 0 or more, got '{text}'")
    return value


def positive_seconds(text: str) -> float:
    """A number of seconds above 0."""
    value = seconds(text)
    if not value:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got '{text}'")
    return value


UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class MemoryBudget(NamedTuple):
    """So many bytes that models may hold."""

    device: int | None  # of that GPU, by its number; None: of the host
    size: int  # 0: any number


def memory_budget(text: str) -> MemoryBudget:
    """Bytes of memory: a number with KiB, MiB, GiB or TiB, or `P%` of what this process may use; 0 for no limit. With
    `gpu:N=` before it, bytes of that GPU's memory."""
    place, equals, size = text.rpartition("=")
    device = re.fullmatch(r"gpu:(\d{1,4})", place.strip(), re.I) if equals else None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT]?)(?:i?B)?|(%))", size.strip(), re.I)
    if (
        (equals and device is None)
        or found is None
        or (found[3] and (device is not None or float(found[1]) > 100))
    ):
        raise argparse.ArgumentTypeError(
            f"expected a number of bytes, a number with KiB, MiB, GiB or TiB, or 1% to 100%, or such a size of a GPU as "
            f"gpu:0=8GiB, got '{text}'"
        )
    if found[3]:
        return MemoryBudget(None, int(memory_limit() * float(found[1]) / 100))
    return MemoryBudget(int(device[1]) if device else None, int(float(found[1]) * UNITS[found[2].upper()]))


def _ranged(text: str, low: int, high: int | None) -> int:
    value: int | None
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or value < low or (high is not None and value > high):
        limit = f"an integer from {low} to {high}" if high is not None else f"an integer of {low} or more"
        raise argparse.ArgumentTypeError(f"expected {limit}, got '{text}'")
    return value


def backend_setting(text: str) -> tuple[str, str, str]:
    """`NAME,KEY=VALUE` or, for all backends, `KEY=VALUE` (or `,KEY=VALUE`); NAME is "" then."""
    head, comma, rest = text.partition(",")
    if not comma or "=" in head:
        head, rest = "", text
    key, equals, value = rest.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"expected NAME,KEY=VALUE or KEY=VALUE, got '{text}'")
    return head, key, value


def resource(text: str) -> tuple[str, int | None, int]:
    """`NAME:COUNT` or `NAME:COUNT:DEVICE` (a number or `global`) as (name, device, count).

    A device of None means every device, -1 means global.
    """
    name, _, rest = text.partition(":")
    count, _, device = rest.partition(":")
    where = -1 if device == "global" else None
    if not name or not count.isdigit() or not (device in ("", "global") or device.isdigit()):
        raise argparse.ArgumentTypeError(f"expected NAME:COUNT or NAME:COUNT:DEVICE, got '{text}'")
    return name, int(device) if device.isdigit() else where, int(count)


@dataclass(frozen=True)
class AdminAddress:
    """Where the admin listener listens: a TCP host and port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: Path | None = None

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def admin_address(text: str) -> AdminAddress:
    """`HOST:PORT`, `[IPV6]:PORT` or `unix:PATH`; port 0 is any free one."""
    scheme, colon, path = text.partition(":")
    if scheme == "unix" and colon and path:
        return AdminAddress(path=Path(path))
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^:/\s]+)):([0-9]{1,5})", text)
    if found is None or int(found[3]) > 65535:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, [IPV6]:PORT or unix:PATH, got '{text}'")
    return AdminAddress(found[1] or found[2], int(found[3]))


def file_mode(text: str) -> int:
    """The mode of a file in octal digits, like 600."""
    if not re.fullmatch(r"[0-7]{3,4}", text) or int(text, 8) > 0o777:
        raise argparse.ArgumentTypeError(f"expected a mode in octal digits like 600 or 660, got '{text}'")
    return int(text, 8)


RESTRICTED_CATEGORIES = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)


@dataclass(frozen=True)
class Restriction:
    """A group of endpoints that wants `header: value` of every request."""

    categories: tuple[str, ...]
    header: str
    value: str


def restriction(what: str) -> Callable[[str], Restriction]:
    """The parser of `CATEGORY[,CATEGORY...]:HEADER=VALUE`; `what` names the endpoints in errors.

    The value is everything behind the first `=`.
    """

    def parse(text: str) -> Restriction:
        categories, colon, pair = text.partition(":")
        header, equals, value = pair.partition("=")
        if not (categories and colon and header and equals and value):
            raise argparse.ArgumentTypeError(
                f"option format is '<config name>:<setting>=<value>'. Got {text}: expected "
                f"CATEGORY[,CATEGORY...]:HEADER=VALUE with categories from {', '.join(RESTRICTED_CATEGORIES)}"
            )
        names = tuple(categories.split(","))
        for name in names:
            if name not in RESTRICTED_CATEGORIES:
                known = ", ".join(RESTRICTED_CATEGORIES)
                raise argparse.ArgumentTypeError(
                    f"unknown restricted {what} '{name}', expected one of {known}"
                )
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", header):
            raise argparse.ArgumentTypeError(f"'{header}' cannot be the name of a header")
        if not value.isprintable() or not value.isascii() or value != value.strip():
            raise argparse.ArgumentTypeError(
                f"'{value}' cannot be the value of a header: expected printable ASCII without blanks at its ends"
            )
        return Restriction(names, header, value)

    return parse


def read_restrictions(path: Path | None, variable: str, what: str) -> tuple[Restriction, ...]:
    """Restrictions that are not on the command line, where every user of the machine could read them.

    One `CATEGORY[,CATEGORY...]:HEADER=VALUE` per line of the file and of the environment variable; empty lines
    and those that begin with `#` are skipped. The variable is taken out of the environment, so that models
    do not see it. Raises ValueError, without a secret in its text.
    """
    texts = [(f"the environment variable {variable}", os.environ.pop(variable, ""))]
    if path is not None:
        try:
            texts.append((f"'{path}'", path.read_text("utf-8")))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
            raise ValueError(f"restrictions cannot be read from '{path}': {reason}") from None
    parse = restriction(what)
    found = []
    for place, text in texts:
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            try:
                found.append(parse(line.strip()))
            except argparse.ArgumentTypeError:
                raise ValueError(
                    f"{place}, line {number}: expected CATEGORY[,CATEGORY...]:HEADER=VALUE with categories from "
                    f"{', '.join(RESTRICTED_CATEGORIES)}"
                ) from None
    return tuple(found)


def check_restrictions(restrictions: tuple[Restriction, ...], what: str) -> None:
    """Raises ValueError when a category is in more than one group."""
    seen: set[str] = set()
    for group in restrictions:
        for category in group.categories:
            if category in seen:
                raise ValueError(
                    f"restricted {what} '{category}' can not be specified in multiple config groups"
                )
            seen.add(category)


class Pattern(Protocol):
    """A compiled regular expression, as far as headers need one."""

    def search(self, text: str) -> object | None:
        """A match anywhere in `text`, or None."""


def compile_pattern(pattern: str) -> Pattern:
    """A header-forward pattern in RE2's syntax: without regard to case unless it says `(?-i)`.

    RE2 matches in linear time, so no header can hold up the server, whatever the pattern. Raises
    ValueError saying what is wrong with it.
    """
    import re2  # only servers that forward headers need it

    options = re2.Options()
    options.case_sensitive = False
    options.log_errors = False
    try:
        compiled: Pattern = re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0] if error.args else error
        text = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        raise ValueError(f"'{pattern}' is not a regular expression (RE2): {text}") from None
    return compiled


def header_pattern(text: str) -> str:
    """A header-forward pattern, checked."""
    try:
        compile_pattern(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def refuse_unknown(parser: argparse.ArgumentParser, left: list[str]) -> list[str]:
    """What argparse did not know: exits with the reason, or returns warnings for accepted hints."""
    known = [flag for action in parser._actions for flag in action.option_strings]
    warnings = []
    at = 0
    while at < len(left):
        flag, equals, value = left[at].partition("=")
        at += 1
        if not flag.startswith("-"):
            if Path(flag).is_dir():
                parser.error(
                    f"'{flag}' stands behind flags: a folder of models is the first argument, or --model-repository={flag}"
                )
            parser.error(f"unexpected argument '{flag}'{nearest(flag, [])}")
        if not equals and at < len(left) and not left[at].startswith("--"):
            value = left[at]
            at += 1
        if flag in NO_EFFECT:
            warnings.append(f"{flag} has no effect: {NO_EFFECT[flag]}")
        elif flag in MISSING:
            what, off = MISSING[flag]
            if off is None or not _same(value, off):
                also = f" (only '{flag}={off}' is accepted)" if off else ""
                parser.error(f"{flag}: this server does not have {what} yet{also}")
        else:
            everything = [*known, *NO_EFFECT, *MISSING]
            whole = [
                one for one in everything if flag.startswith("--") and len(flag) > 2 and one.startswith(flag)
            ]
            if whole:
                parser.error(f"flags are written in full: '{flag}' begins {' and '.join(whole)}")
            parser.error(f"unknown flag '{flag}'{nearest(flag, everything if flag.startswith('--') else [])}")
    return warnings


def misspelt(key: str) -> str:
    """The setting of --backend-config that was probably meant, "" for a key that is one or like none."""
    near = difflib.get_close_matches(key, BACKEND_SETTINGS, 1, 0.85)
    return near[0] if near and near[0] != key else ""


def _same(value: str, off: str) -> bool:
    return value.lower() == off.lower() or (off == "false" and value.lower() in FALSE)


def nearest(word: str, known: list[str], alike: float = 0.5) -> str:
    near = difflib.get_close_matches(word, known, 1, alike)
    return f", did you mean '{near[0]}'?" if near else "; see 'neptrio --help'"


def authorization() -> dict[str, str]:
    """The header by which a command shows the token in NEPTRIO_TOKEN to a server with --auth-config; empty without one.

    The environment, because everybody on a machine can read its command lines. What comes from a file ends with a line's end.
    Raises ValueError, which does not show it, for what no header can have.
    """
    token = os.environ.get("NEPTRIO_TOKEN", "").strip()
    if not (token.isascii() and token.isprintable()):
        raise ValueError("NEPTRIO_TOKEN holds no token: it has characters that a header cannot have")
    return {"Authorization": f"Bearer {token}"} if token else {}
