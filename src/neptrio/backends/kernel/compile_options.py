"""The options that a configuration may give to the compilers of kernels.

A compiler writes files and reads any (--time=FILE, --pre-include=FILE), so options are a list of allowed ones. Folders of
headers lie inside the model's folder (config/paths.py); relative ones begin at the version's. CUDA's own headers, which the
compiler is given anyway, may be named too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from neptrio.config import paths
from neptrio.errors import InvalidArgument

_NAMED = {"D": "define-macro", "U": "undefine-macro", "I": "include-path"}
_SHORT = {f"-{letter}": letter for letter in _NAMED} | {
    f"--{name}": letter for letter, name in _NAMED.items()
}
_MACRO = re.compile(r"[A-Za-z_]\w*(?:\([^)]*\))?(?:=.*)?", re.DOTALL)
_ALLOWED = re.compile(
    r"--?(?:"
    r"std=c\+\+\d\d|use_fast_math|(?:ftz|prec-div|prec-sqrt|fmad|extra-device-vectorization|builtin-move-forward"
    r"|builtin-initializer-list)(?:=(?:true|false))?|(?:maxrregcount|split-compile|jump-table-density)=\d+"
    r"|ptxas-options=(?:-v|-O[0-3])|gpu-architecture=\w+|arch=\w+|device-debug|G|generate-line-info|lineinfo|dopt(?:=on)?"
    r"|disable-warnings|w|restrict|device-as-default-execution-space|default-device|device-int128|device-float128"
    r"|no-source-include|display-error-number|err-no|no-display-error-number|no-err-no|brief-diagnostics=(?:true|false)"
    r"|diag-(?:error|suppress|warn)=[\d,]+|minimal|modify-stack-limit=(?:true|false)|optimization-info=inline"
    r"|version-ident=(?:true|false))"
)


def checked(
    given: Sequence[str], version_dir: Path, model_dir: Path, settings: dict[str, str], model: str
) -> tuple[str, ...]:
    """The options with folders as absolute paths. Raises InvalidArgument for one that is not allowed."""
    what = f"compile_options of model '{model}'"
    made: list[str] = []
    waiting = ""
    for option in given:
        letter, value = waiting, option
        waiting = ""
        if not letter:
            if option in _SHORT:
                waiting = _SHORT[option]
                continue
            letter, value = _divided(option)
        if letter == "I":
            folder = _of_toolkit(value)
            if folder is None:
                folder = paths.allowed(value, version_dir, model_dir, settings, what, "kernel")
            made.append(f"-I{folder}")
        elif letter and _MACRO.fullmatch(value):
            made.append(f"-{letter}{value}")
        elif not letter and _ALLOWED.fullmatch(option):
            made.append(option)
        else:
            raise InvalidArgument(
                f"{what}: '{option}' is no option that a configuration may give (docs/kernels.md)"
            )
    if waiting:
        raise InvalidArgument(f"{what}: a value is missing behind the last option")
    return tuple(made)


def _of_toolkit(name: str) -> Path | None:
    """The folder of CUDA's headers, or inside of it, that an absolute path means; None for others."""
    if not name.startswith("/"):
        return None
    from neptrio.backends.kernel.nvrtc import include_folders  # which looks for CUDA

    return next((path for f in include_folders() if (path := paths.within(Path(f), name)) is not None), None)


def _divided(option: str) -> tuple[str, str]:
    """The letter of an option with a macro or a folder, and its value; two empty texts for other options."""
    for prefix, letter in _SHORT.items():
        head = prefix if len(prefix) == 2 else f"{prefix}="
        if option.startswith(head):
            return letter, option.removeprefix(head)
    return "", ""
