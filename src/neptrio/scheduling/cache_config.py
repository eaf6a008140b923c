"""What --cache-config says: which response cache there is, and its settings.

Rules:
 1. `local` is the server's own cache (response_cache.py), unless `compiled=true` asks for the library of that name. Every other
    name is that of a library, libtritoncache_NAME.so, which is looked for when the server is made.
 2. The flag may be repeated, as for a Triton server: each adds settings of the same cache. A value may have commas, as long as
    what follows one does not look like the next setting.
 3. Of a library's settings, those of OWN are the server's; all others are handed to the library as they are written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

LOCAL = "local"
OWN = ("compiled", "coalesce", "namespace", "timeout_ms", "restart_ms")
TIMEOUT_MS, RESTART_MS = 100, 5000
MOST_MS = 60_000
_NEXT = re.compile(r",(?=[\w.-]+=)")


@dataclass(frozen=True)
class CacheConfig:
    """The settings of one cache."""

    name: str
    size: int = 0  # of the server's own
    coalesce: bool = False  # identical requests in flight share one execution
    compiled: bool = False  # it is a library
    timeout_ms: int = TIMEOUT_MS  # so long a request waits for a library's answer
    restart_ms: int = RESTART_MS  # a library's process that owes an answer for so long is killed
    namespace: str = ""  # "": answers are this server's alone
    settings: dict[str, str] = field(default_factory=dict)  # of the library


def parse_config(given: str | Sequence[str]) -> CacheConfig:
    """Reads the texts of --cache-config, `NAME,KEY=VALUE[,KEY=VALUE...]`. Raises ValueError."""
    name, values = "", dict[str, str]()
    for text in [given] if isinstance(given, str) else given:
        own, _, rest = text.partition(",")
        if not own or "=" in own:
            raise ValueError(f"--cache-config: expected NAME,KEY=VALUE, got '{text}'")
        if name and own != name:
            raise ValueError(f"--cache-config: there is one response cache, got '{name}' and '{own}'")
        name = own
        for part in _NEXT.split(rest) if rest else ():
            key, equals, value = part.partition("=")
            if not equals or not key:
                raise ValueError(f"--cache-config: expected NAME,KEY=VALUE, got '{text}'")
            values[key] = value
    compiled = _truth(values, "compiled")
    coalesce = _truth(values, "coalesce")
    if name == LOCAL and not compiled:
        unknown = set(values) - {"size", "coalesce", "compiled"}
        if unknown:
            raise ValueError(
                f"--cache-config: expected the settings size and coalesce, got {sorted(unknown)}"
            )
        return CacheConfig(name, _number(values, "size", None), coalesce)
    return CacheConfig(
        name,
        coalesce=coalesce,
        compiled=True,
        timeout_ms=_number(values, "timeout_ms", TIMEOUT_MS, MOST_MS),
        restart_ms=_number(values, "restart_ms", RESTART_MS, MOST_MS),
        namespace=values.get("namespace", ""),
        settings={key: value for key, value in values.items() if key not in OWN},
    )


def _truth(values: dict[str, str], key: str) -> bool:
    text = values.get(key, "false").lower()
    if text not in ("true", "false"):
        raise ValueError(f"--cache-config: {key} must be true or false, got '{values[key]}'")
    return text == "true"


def _number(values: dict[str, str], key: str, default: int | None, most: int | None = None) -> int:
    text = values.get(key, "" if default is None else str(default))
    if not text.isascii() or not text.isdigit() or not 0 < int(text) <= (most or int(text)):
        unit = "bytes" if most is None else f"milliseconds up to {most}"
        raise ValueError(f"--cache-config: {key} must be a positive number of {unit}, got '{text}'")
    return int(text)
