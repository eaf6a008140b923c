"""Fails if a package that running needs has a known vulnerability (pip-audit on requirements/run.txt).

    python tools/audit.py

The service of vulnerabilities that belongs to pip's own package index is asked. Whether it answers decides, within
seconds: without it nothing is checked, that is said, and the status is 0, so that nobody's build depends on the network.
A result without a vulnerability holds for a day, in build/.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "run.txt"
KEPT = ROOT / "build" / "audited"
DAY = 24 * 3600
ANSWER_SECONDS = 3
ALL_SECONDS = 60
# identifiers of vulnerabilities that do not concern the server, each with the reason
IGNORED: dict[str, str] = {}


def service() -> str:
    """The address of the index's JSON interface, as pip knows it; "" if this pip does not say."""
    try:
        from pip._internal.models.index import PyPI
    except ImportError:
        return ""
    return str(PyPI.pypi_url)


def no_answer(address: str, package: str) -> str:
    """Why the service cannot be used; "" when it can. It is asked for `package`, NAME/VERSION, which it must know."""
    if not address:
        return "this pip does not say where its index is"
    try:
        with urllib.request.urlopen(f"{address}/{package}/json", timeout=ANSWER_SECONDS) as answer:
            if "vulnerabilities" in json.load(answer):
                return ""
        return "the package index tells no vulnerabilities"
    except urllib.error.HTTPError as error:
        with error:
            return f"the package index does not tell vulnerabilities: {error}"
    except (OSError, ValueError) as error:
        return f"the package index does not tell vulnerabilities: {error}"


def findings(report: Any) -> tuple[list[str], int]:
    """(a line per vulnerability, how many packages were checked) of pip-audit's JSON."""
    lines, checked = [], 0
    for found in report["dependencies"]:
        if "skip_reason" in found:
            continue
        checked += 1
        for vulnerability in found["vulns"]:
            names = [vulnerability["id"], *vulnerability.get("aliases", [])]
            if any(name in IGNORED for name in names):
                continue
            fixed = ", ".join(vulnerability.get("fix_versions", [])) or "no version yet"
            lines.append(f"{found['name']} {found['version']}: {', '.join(names)}; repaired in {fixed}")
    return lines, checked


def audited() -> tuple[Any, str]:
    """(pip-audit's report, "") or (None, why there is none)."""
    if subprocess.run(
        [sys.executable, ROOT / "tools" / "install.py", "audit"], timeout=ALL_SECONDS
    ).returncode:
        return None, "pip-audit cannot be installed"
    run = subprocess.run(
        [
            sys.executable, "-m", "pip_audit", "-r", LOCK, "--require-hashes", "--no-deps", "--disable-pip",
            "--format=json", "--progress-spinner=off", f"--timeout={ANSWER_SECONDS}",
        ],
        capture_output=True,
        text=True,
        timeout=ALL_SECONDS,
    )  # fmt: skip
    try:
        return json.loads(run.stdout), ""
    except ValueError:
        return None, f"pip-audit says nothing: {run.stderr.strip().rpartition(chr(10))[2]}"


def main(address: str | None = None) -> int:
    content = hashlib.sha256(LOCK.read_bytes()).hexdigest()
    if KEPT.exists() and KEPT.read_text() == content and time.time() - KEPT.stat().st_mtime < DAY:
        return 0
    pin = LOCK.read_text().partition(" ")[0].replace("==", "/")
    reason = no_answer(service() if address is None else address, pin)
    report = None
    if not reason:
        try:
            report, reason = audited()
        except subprocess.TimeoutExpired:
            reason = f"it takes more than {ALL_SECONDS} s"
    lines, checked = findings(report) if report is not None else ([], 0)
    if not reason and not checked:
        reason = "the service knows none of the packages"
    if reason:
        print(f"known vulnerabilities are not checked: {reason}")
        return 0
    if lines:
        print(
            "packages that running needs have known vulnerabilities (make lock ARGS=--upgrade takes newer ones):"
        )
        print("\n".join(lines))
        return 1
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(content)
    print(f"known vulnerabilities: none in the {checked} packages that running needs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
