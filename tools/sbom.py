"""Writes the software bill of materials of a wheel beside it: CycloneDX 1.6, JSON.

    python tools/sbom.py dist/NAME.whl      ->  dist/NAME.cdx.json

It lists what an installation of the wheel brings along:

 - the packages that it requires and those that they require, in the versions of this environment, which are those
   that the wheel was built and tested with; the ranges that the wheel allows are a property of each
 - the shared libraries inside (libnghttp2), with their own version, the hash of their file and, where auditwheel
   found it out, the system's package that they come from

The same wheel gives the same document: the serial number comes from the wheel's hash, and the time from SOURCE_DATE_EPOCH
if that is set.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import re
import sys
import tempfile
import uuid
import zipfile
from datetime import UTC, datetime
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

AUDITWHEEL = re.compile(r"[^/]+\.dist-info/sboms/auditwheel\.cdx\.json\Z")
LIBRARY = re.compile(r"[^/]+\.libs/(?P<file>(?P<name>[\w.+]+?)-[0-9a-f]{8}(?P<version>\.so(?:\.[\d.]+)?))\Z")


class NgHttp2Info(ctypes.Structure):
    """nghttp2_info of nghttp2.h."""

    _fields_ = (
        ("age", ctypes.c_int),
        ("version_num", ctypes.c_int),
        ("version_str", ctypes.c_char_p),
        ("proto_str", ctypes.c_char_p),
    )


def nghttp2_version(library: bytes) -> str:
    """The version that a libnghttp2 says it has."""
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(library)
        file.flush()
        version = ctypes.CDLL(file.name).nghttp2_version
        version.restype = ctypes.POINTER(NgHttp2Info)
        return str(version(0).contents.version_str.decode())


def package(name: str, version: str, info: Any = None) -> dict[str, Any]:
    """The component of a Python package. `info` is its metadata."""
    reference = f"pkg:pypi/{canonicalize_name(name)}@{version}"
    found: dict[str, Any] = {
        "type": "library",
        "bom-ref": reference,
        "name": name,
        "version": version,
        "purl": reference,
    }
    if info is not None:
        if info.get("Summary"):
            found["description"] = info["Summary"]
        expression, text = info.get("License-Expression"), info.get("License")
        if expression:
            found["licenses"] = [{"expression": expression}]
        elif text and "\n" not in text and len(text) < 80:
            found["licenses"] = [{"license": {"name": text}}]
    return found


def needed(texts: list[str], extras: set[str]) -> list[Requirement]:
    """Those of the requirements that hold on this system, with these extras of the package that states them."""
    found = []
    for text in texts:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            found.append(requirement)
    return found


class Closure:
    """The packages that requirements lead to, as they are installed here. Raises SystemExit if one is missing."""

    def __init__(self, requirements: list[Requirement]) -> None:
        self.components: dict[str, dict[str, Any]] = {}
        self.depends: dict[str, set[str]] = {}
        self._seen: set[tuple[str, str]] = set()
        self.direct = [self._add(requirement) for requirement in requirements]

    def _add(self, requirement: Requirement) -> str:
        try:
            installed = metadata.distribution(requirement.name)
        except metadata.PackageNotFoundError:
            raise SystemExit(f"{requirement} is not installed: run `make build` first") from None
        component = package(installed.metadata["Name"], installed.version, installed.metadata)
        reference = str(component["bom-ref"])
        component = self.components.setdefault(reference, component)
        below = self.depends.setdefault(reference, set())
        for extra in ("", *sorted(requirement.extras)):
            if (reference, extra) not in self._seen:
                self._seen.add((reference, extra))
                below |= {self._add(r) for r in needed(list(installed.requires or ()), {extra})}
        return reference


def libraries(wheel: zipfile.ZipFile) -> list[dict[str, Any]]:
    """The components of the shared libraries inside a wheel."""
    system: dict[str, str] = {}  # name of a package of the system -> purl
    for name in wheel.namelist():
        if AUDITWHEEL.match(name):
            for component in json.loads(wheel.read(name))["components"]:
                if not component["purl"].startswith("pkg:pypi/"):
                    system[component["name"]] = component["purl"]
    found = []
    for name in wheel.namelist():
        match = LIBRARY.match(name)
        if match is None:
            continue
        content = wheel.read(name)
        own = match["name"] == "libnghttp2"
        version = nghttp2_version(content) if own else match["version"].partition(".so.")[2]
        purl = next((purl for key, purl in system.items() if key.startswith(match["name"])), "")
        made: dict[str, Any] = {
            "type": "library",
            "bom-ref": f"file:{name}",
            "name": match["name"],
            "version": version,
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(content).hexdigest()}],
            "properties": [{"name": "neptrio:file", "value": name}],
        }
        if own:
            made["licenses"] = [{"license": {"id": "MIT"}}]
        if purl:
            made["purl"] = purl
        found.append(made)
    return found


def document(path: Path) -> dict[str, Any]:
    """The bill of materials of a wheel."""
    content = path.read_bytes()
    with zipfile.ZipFile(path) as wheel:
        name = next(n for n in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
        info = Parser().parsestr(wheel.read(name).decode())
        inside = libraries(wheel)
    requirements = needed(info.get_all("Requires-Dist", []), set())
    closure = Closure(requirements)
    for requirement, reference in zip(requirements, closure.direct, strict=True):
        allowed = {"name": "neptrio:allowed-versions", "value": str(requirement.specifier)}
        closure.components[reference]["properties"] = [allowed]
    root = package(info["Name"], info["Version"], info)
    root["hashes"] = [{"alg": "SHA-256", "content": hashlib.sha256(content).hexdigest()}]
    root["properties"] = [{"name": "neptrio:file", "value": path.name}]
    depends = {root["bom-ref"]: {*closure.direct, *(part["bom-ref"] for part in inside)}, **closure.depends}
    depends |= {part["bom-ref"]: set() for part in inside}
    made = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", path.stat().st_mtime)), UTC)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.UUID(bytes=hashlib.sha256(content).digest()[:16], version=4)}",
        "version": 1,
        "metadata": {
            "timestamp": made.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "tools": {"components": [{"type": "application", "name": "tools/sbom.py"}]},
            "component": root,
        },
        "components": [*inside, *(closure.components[key] for key in sorted(closure.components))],
        "dependencies": [{"ref": ref, "dependsOn": sorted(below)} for ref, below in sorted(depends.items())],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel
    output = wheel.with_name(wheel.name.removesuffix(".whl") + ".cdx.json")
    output.write_text(json.dumps(document(wheel), indent=1) + "\n")
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
