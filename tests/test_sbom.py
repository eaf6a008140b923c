"""The bill of materials of a wheel: what an installation brings along, the bundled library included."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tools import sbom

ROOT = Path(__file__).resolve().parents[1]

INSIDE = "neptrio.libs/libnghttp2-13a70f96.so.14.24.1"
OTHER = "neptrio.libs/libother-0123abcd.so.1.2"
PURL = "pkg:deb/debian/libnghttp2-14@1.52.0-1%2Bdeb12u3"
METADATA = """Metadata-Version: 2.4
Name: neptrio
Version: 9.8.7
License-Expression: Apache-2.0
Requires-Dist: trio<1,>=0.30
Requires-Dist: hypercorn<0.19,>=0.18
Requires-Dist: numpy; python_version < "3"
Requires-Dist: pytest>=9.2; extra == "test"
"""


def nghttp2() -> Path:
    """The libnghttp2 that the compiled session uses."""
    try:
        from neptrio.transport.http2 import nghttp2_session  # noqa: F401
    except ImportError:
        pytest.skip("built without libnghttp2")
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("this system does not tell which libraries are loaded")
    return Path(re.findall(r"\S*libnghttp2\S*", maps.read_text())[0])


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel as auditwheel leaves it, with the library of this machine."""
    path = tmp_path / "neptrio-9.8.7-cp311-cp311-manylinux_2_34_x86_64.whl"
    own = {"name": "neptrio", "purl": "pkg:pypi/neptrio@9.8.7"}
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("neptrio-9.8.7.dist-info/METADATA", METADATA)
        made.writestr(
            "neptrio-9.8.7.dist-info/sboms/auditwheel.cdx.json",
            json.dumps({"components": [own, {"name": "libnghttp2-14", "purl": PURL}]}),
        )
        made.writestr(INSIDE, nghttp2().read_bytes())
        made.writestr(OTHER, b"another library")
    return path


@pytest.fixture
def made(wheel: Path) -> dict[str, Any]:
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "86400"}
    subprocess.run([sys.executable, ROOT / "tools" / "sbom.py", wheel], check=True, env=environment)
    found: dict[str, Any] = json.loads(
        wheel.with_name("neptrio-9.8.7-cp311-cp311-manylinux_2_34_x86_64.cdx.json").read_text()
    )
    return found


def test_the_wheel_is_what_it_is_about(made: dict[str, Any], wheel: Path) -> None:
    assert (made["bomFormat"], made["specVersion"], made["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", made["serialNumber"])
    assert made["metadata"]["timestamp"] == "1970-01-02T00:00:00Z"
    root = made["metadata"]["component"]
    assert (root["name"], root["version"], root["purl"]) == ("neptrio", "9.8.7", "pkg:pypi/neptrio@9.8.7")
    assert root["licenses"] == [{"expression": "Apache-2.0"}]
    assert root["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]


def test_the_bundled_library_is_named_with_its_own_version(made: dict[str, Any]) -> None:
    found = {part["bom-ref"]: part for part in made["components"]}
    library = found[f"file:{INSIDE}"]
    content = nghttp2().read_bytes()
    assert library["name"] == "libnghttp2" and library["purl"] == PURL
    assert library["version"] == sbom.nghttp2_version(content)
    assert re.fullmatch(r"1\.\d+\.\d+.*", library["version"])
    assert library["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(content).hexdigest()}]
    assert found[f"file:{OTHER}"]["version"] == "1.2" and "purl" not in found[f"file:{OTHER}"]


def test_packages_are_there_with_what_they_require(made: dict[str, Any]) -> None:
    found = {part["purl"].split("/")[-1].split("@")[0]: part for part in made["components"] if "purl" in part}
    for name in ("trio", "hypercorn", "outcome", "h2", "hpack"):  # the last three are others' requirements
        assert found[name]["version"] == metadata.version(name)
        assert found[name]["purl"] == f"pkg:pypi/{name}@{metadata.version(name)}"
    assert found["trio"]["properties"] == [{"name": "neptrio:allowed-versions", "value": "<1,>=0.30"}]
    assert "pytest" not in found and "numpy" not in found
    assert found["trio"]["licenses"]


def test_references_lead_somewhere(made: dict[str, Any]) -> None:
    references = [made["metadata"]["component"]["bom-ref"], *(p["bom-ref"] for p in made["components"])]
    assert len(set(references)) == len(references)
    assert sorted(row["ref"] for row in made["dependencies"]) == sorted(references)
    below = {row["ref"]: set(row["dependsOn"]) for row in made["dependencies"]}
    reached: set[str] = set()
    left = [references[0]]
    while left:
        reference = left.pop()
        if reference not in reached:
            reached.add(reference)
            left += below[reference]
    assert reached == set(references)


def test_a_package_that_is_not_there_is_told(wheel: Path, tmp_path: Path) -> None:
    other = tmp_path / "neptrio-1-py3-none-any.whl"
    with zipfile.ZipFile(other, "w") as made:
        made.writestr(
            "neptrio-1.dist-info/METADATA", "Name: neptrio\nVersion: 1\nRequires-Dist: no-such-thing>1\n"
        )
    with pytest.raises(SystemExit, match="no-such-thing>1 is not installed: run `make build` first"):
        sbom.document(other)
