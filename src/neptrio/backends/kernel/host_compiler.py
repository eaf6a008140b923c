"""Compiles a CUDA source for the CPU: into a shared object, with the C++ compiler.

The object is cached under the hash of everything it depends on: the preprocessed source, compiler and flags, and the processor's features. These belong to it because the code is made for this machine (-march=native, so
that elementwise kernels use the widest vectors); so machines that share a cache folder never mix their objects.

Numerics: products and sums are fused to multiply-adds as nvcc does by default (-ffp-contract=fast). Nothing else is
relaxed unless the model asks for --use_fast_math.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from neptrio.backends.kernel.source import Source
from neptrio.errors import Internal, InvalidArgument

log = logging.getLogger("neptrio.kernel")

INCLUDE = Path(__file__).parent / "include"
FLAGS = [
    "-std=c++17",
    "-O3",
    "-march=native",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-fno-plt",
    "-fno-stack-protector",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fno-semantic-interposition",
    "-fcf-protection=none",
    "-fmax-errors=10",
    "-Werror=frame-larger-than=40000",
    "-Werror=return-type",
]
COMPILE_TIMEOUT_S = 300
SHARED_LIMIT = 232448  # bytes of dynamic shared memory, the most of any GPU; NEPTRIO_SHARED in the header
_EXTERN = re.compile(
    r"\bextern\s+__shared__\s+(?P<type>(?:__align__\s*\(\s*\w+\s*\)\s*|alignas\s*\([^)]*\)\s*)*[\w:<>,\s]+?)"
    r"\s*\b(?P<name>[A-Za-z_]\w*)\s*\[\s*\]\s*;"
)
_EXTERN_HEAD = re.compile(r"\bextern\s+__shared__\b")
# lines of the compiler's output that say through which headers it came to a line, and its closing line
_NOISE = re.compile(r"In file included|\s+from \S+[:,]$|cc1plus: some")
_ALIGN = re.compile(r"(?:__align__\s*\(\s*\w+\s*\)|alignas\s*\([^)]*\))")


def cache_dir() -> Path:
    """The user's cache of compiled kernels: $NEPTRIO_KERNEL_CACHE, else in the user's cache folder."""
    own = os.environ.get("NEPTRIO_KERNEL_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "neptrio" / "kernels"


def compiler() -> list[str]:
    """The C++ compiler's command. Raises InvalidArgument when there is none."""
    wanted = os.environ.get("CXX")
    names = [wanted] if wanted else ["c++", "g++", "clang++"]
    for name in names:
        words = shlex.split(name)
        if words and shutil.which(words[0]):
            return words
    raise InvalidArgument(
        f"no C++ compiler found (looked for {', '.join(names)}): a kernel model on the CPU is compiled from its "
        "source; install g++ or clang++, or set CXX, or serve the model with an instance_group of kind KIND_GPU"
    )


def options(given: tuple[str, ...], where: Path) -> list[str]:
    """NVRTC's compile options (compile_options.checked()) as options of the C++ compiler; those without a counterpart
    are left out."""
    made = [f"-I{where}", f"-I{INCLUDE}"]
    for option in given:
        if option.startswith(("-D", "-U", "-I")):
            made.append(option)
        elif option in ("--use_fast_math", "-use_fast_math"):
            made.append("-ffast-math")
        elif option.startswith(("--std=", "-std=")):
            made.append("-std=" + option.split("=", 1)[1])
    return made


def translate(source: Source) -> str:
    """The main file as text for the C++ compiler, with an entry point for each kernel. Line numbers stay."""
    main = source.files[0]
    text = main.text
    edits: list[tuple[int, int, str]] = []
    covered = set()
    for match in _EXTERN.finditer(main.code):
        kind = " ".join(_ALIGN.sub(" ", match.group("type")).split())
        name = match.group("name")
        lines = "\n" * match.group(0).count("\n")
        edits.append((match.start(), match.end(), f"{kind}* const {name} = ({kind}*)neptrio_shared;{lines}"))
        covered.add(match.start())
    for match in _EXTERN_HEAD.finditer(main.code):
        if match.start() not in covered:
            line = main.code.count("\n", 0, match.start()) + 1
            raise InvalidArgument(
                f"{main.name}:{line}: expected 'extern __shared__ TYPE name[];', which is what the host build reads"
            )
    for match in re.finditer(r"\bstatic\s+(?=__shared__)", main.code):
        edits.append((match.start(), match.end(), ""))
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    entries = []
    for name, signature in source.signatures.items():
        if signature.template:
            continue
        waits = source.waiting.get(name)
        if waits:
            recursive = source.recursive(name)
            if recursive:
                raise InvalidArgument(
                    f"{main.name}:{signature.line}: kernel '{name}' waits for other threads ({waits}) and calls the "
                    f"recursive function '{recursive}'; the host build can't bound its stack"
                )
        entries.append(f"{'NEPTRIO_FIBERS' if waits else 'NEPTRIO_LOOP'}({name})")
    head = f'#include "neptrio_host.h"\n#line 1 "{main.name}"\n'
    return head + text + '\n#line 1 "entry points"\n' + "\n".join(entries) + "\n"


def _fingerprint(parts: list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:40]


def _processor() -> bytes:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return b""
    found = re.search(r"^(?:flags|Features)\s*:.*$", text, re.MULTILINE)
    model = re.search(r"^model name\s*:.*$", text, re.MULTILINE)
    return ((found.group(0) if found else "") + (model.group(0) if model else "")).encode()


def _version(command: list[str]) -> bytes:
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Internal(f"the C++ compiler '{' '.join(command)}' does not run: {error}") from None
    return done.stdout


def compile_source(source: Source, compile_options: tuple[str, ...], model: str) -> Path:
    """The shared object for a source, cached or newly compiled. Raises InvalidArgument with the compiler's text."""
    source.refuse()
    text = translate(source)
    command = compiler()
    flags = [*FLAGS, *options(compile_options, source.path.parent)]
    if Path(command[-1]).name.startswith("clang"):
        flags = [f for f in flags if f not in ("-fno-gnu-unique",)]
    folder = cache_dir()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix="build-", dir=folder))
    except OSError as error:
        raise Internal(
            f"the cache folder of compiled kernels can't be written: {error} (NEPTRIO_KERNEL_CACHE sets another)"
        ) from None
    try:
        (work / "model.cpp").write_text(text, encoding="utf-8")
        # what the compiler reads, wherever its files lie; without lines, so that the same source is compiled once
        _run([*command, *flags, "-E", "-P", "-o", "model.ii", "model.cpp"], work, model)
        without_folders = [flag for flag in flags if not flag.startswith("-I")]
        key = _fingerprint(
            [
                (work / "model.ii").read_bytes(),
                " ".join([*command, *without_folders]).encode(),
                _version(command),
                _processor(),
            ]
        )
        target = folder / f"{key}.so"
        if target.is_file():
            return target
        output = work / "model.so"
        _run([*command, *flags, "-o", str(output), "model.cpp", "-lm"], work, model)
        os.replace(output, target)  # atomic: others that compile the same see no half file
    finally:
        shutil.rmtree(work, ignore_errors=True)
    log.info("compiled %s for the host: %s", model, target.name)
    return target


def _run(command: list[str], work: Path, model: str) -> None:
    """Runs the compiler in its folder. Raises InvalidArgument with what it says, or Internal when it takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, cwd=work, check=False
        )
    except subprocess.TimeoutExpired:
        raise Internal(f"compiling model '{model}' took longer than {COMPILE_TIMEOUT_S} s") from None
    if done.returncode:
        said = "\n".join(_relevant(done.stderr, work)[:12])
        raise InvalidArgument(f"model '{model}' does not compile for the host:\n{said}")


def _relevant(text: str, work: Path) -> list[str]:
    lines = [line.replace(f"{work}/", "") for line in text.splitlines()]
    return [line for line in lines if not _NOISE.match(line)] or lines
