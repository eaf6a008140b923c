"""One fuzzer in its process: `python -m tests.fuzz.run TARGET [libFuzzer's arguments]` (tools/fuzz.py starts it)."""

from __future__ import annotations

import logging
import sys

import atheris

# what is written in Python: its branches are counted as well
INSTRUMENTED = [
    "neptrio.backends.kernel.expressions",
    "neptrio.codec.generate",
    "neptrio.transport.header_policy",
    "neptrio.transport.host_header",
    "neptrio.transport.http1.connection",
    "neptrio.transport.http1.input",
    "neptrio.transport.http1.exchange",
]
with atheris.instrument_imports(include=INSTRUMENTED, enable_loader_override=False):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    logging.disable(logging.CRITICAL)
    atheris.Setup([sys.argv[0], *sys.argv[2:]], TARGETS[sys.argv[1]])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
