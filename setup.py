"""Builds the Cython modules of cext/ into the package neptrio._cext.

The sources live in cext/ at the top level, one concept per .pyx/.pxd pair. They cimport
each other by their installed name, so the build gives Cython a folder in which
neptrio/_cext is a link to cext/.

http2_nghttp2 needs libnghttp2 and its headers. Without them it is left out and the server
serves gRPC over h2 instead (slower, same behaviour).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
DEBUG = os.environ.get("NEPTRIO_CEXT_DEBUG") == "1"
CPP_MODULES: set[str] = set()
COMPILE_ARGS = ["-O0", "-g"] if DEBUG else ["-O3"]
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": False,
    "initializedcheck": DEBUG,
    "cdivision": True,
    "embedsignature": True,
    "freethreading_compatible": False,
}


def have_nghttp2() -> bool:
    """True when a C program can be compiled and linked against libnghttp2."""
    if os.environ.get("NEPTRIO_WITHOUT_NGHTTP2") == "1":
        return False
    cc = os.environ.get("CC", "cc").split()
    source = "#include <nghttp2/nghttp2.h>\nint main(void){return nghttp2_version(0)==0;}\n"
    try:
        done = subprocess.run(
            [*cc, "-x", "c", "-", "-o", os.devnull, "-lnghttp2"],
            input=source.encode(),
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return False
    return done.returncode == 0


def cimport_folder() -> Path:
    """A folder in which `neptrio._cext` resolves to cext/, for Cython's cimport search."""
    base = ROOT / "build" / "cimport"
    package = base / "neptrio"
    shutil.rmtree(base, ignore_errors=True)
    package.mkdir(parents=True)
    (package / "__init__.pxd").touch()
    (package / "_cext").symlink_to(ROOT / "cext", target_is_directory=True)
    return base


def extensions() -> list[Extension]:
    found = []
    for source in sorted((ROOT / "cext").glob("*.pyx")):
        name = source.stem
        libraries = []
        if name == "http2_nghttp2":
            if not have_nghttp2():
                print("libnghttp2 not found: gRPC will be served over h2 (slower)")
                continue
            libraries.append("nghttp2")
        found.append(
            Extension(
                f"neptrio._cext.{name}",
                [str(source.relative_to(ROOT))],
                libraries=libraries,
                extra_compile_args=COMPILE_ARGS,
                include_dirs=[str(ROOT / "cext")],
                language="c++" if name in CPP_MODULES else None,
            )
        )
    return found


os.chdir(ROOT)
setup(
    ext_modules=cythonize(
        extensions(),
        include_path=[str(cimport_folder())],
        compiler_directives=DIRECTIVES,
        build_dir="build/cython",
        nthreads=os.cpu_count() or 1,
    ),
)
