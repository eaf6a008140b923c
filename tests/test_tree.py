"""The tree tests itself: nothing of one machine in it, documents linked, targets explained."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tools.mutants import MUTANTS, occurs_once

ROOT = Path(__file__).resolve().parents[1]
FILES = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT,
    capture_output=True,
    text=True,
).stdout.split()
pytestmark = pytest.mark.skipif(not FILES, reason="not a git checkout")

# written so that this file does not contain what it looks for
MACHINE_PATHS = re.compile("|".join(["/ho" + "me/[a-z]", "/ro" + "ot/", "/Us" + "ers/[a-z]", "/wo" + "rk/"]))
REGISTRIES = re.compile(
    "|".join(["--ind" + "ex-url", "--extra-ind" + "ex-url", "py" + r"pi\.org", "file" + "s.pythonhosted"])
)


def texts() -> list[tuple[str, str]]:
    found = []
    for name in FILES:
        path = ROOT / name
        if path.is_file() and not path.is_symlink() and path.suffix != ".binpb":
            try:
                found.append((name, path.read_text(encoding="utf-8")))
            except UnicodeDecodeError:
                continue
    return found


def test_no_file_names_a_machine_path_or_a_registry() -> None:
    found = [
        f"{name}:{number}: {line.strip()}"
        for name, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if MACHINE_PATHS.search(line) or REGISTRIES.search(line)
    ]
    assert found == []


def test_every_page_of_docs_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    pages = sorted(name for name in FILES if re.fullmatch(r"docs/[^/]+\.md", name) and (ROOT / name).exists())
    assert pages
    assert [page for page in pages if f"]({page})" not in readme] == [], (
        "add a link to README.md, Documentation"
    )


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for name, text in texts():
        if name.endswith(".md"):
            for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
                if "://" not in target and not (ROOT / name).parent.joinpath(target).exists():
                    broken.append(f"{name}: {target}")
    assert broken == []


def printed_by(target: str) -> list[str]:
    """The first word of every line that `make TARGET` prints."""
    done = subprocess.run(["make", "-s", target], cwd=ROOT, capture_output=True, text=True, timeout=60)
    return [line.split()[0] for line in done.stdout.splitlines() if line]


def test_every_make_target_has_a_sentence() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.M))
    explained = set(re.findall(r"^([a-z][a-z-]*):.*## \S", makefile, re.M))
    assert targets - explained == set()
    phony = set(re.search(r"^\.PHONY:(.*)$", makefile, re.M)[1].split())  # type: ignore[index]
    assert phony == targets, "targets and .PHONY differ"
    assert set(printed_by("help-all")) == targets
    first = printed_by("help")
    assert first[:10] == re.search(r"^FIRST := (.*)$", makefile, re.M)[1].split()  # type: ignore[index]


def test_every_dependency_has_a_line_in_its_page() -> None:
    page = (ROOT / "docs/dependencies.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for requirement in [*project["dependencies"], *extras["cuda"], *extras["examples"]]:
        name = re.match(r"[\w.-]+", requirement)
        assert name is not None
        assert re.search(rf"^\| {re.escape(name[0])}\b", page, re.M), f"{name[0]} is missing"


# who may sleep, and why
SLEEPERS = {
    "tests/support/waiting.py": "polls what has no event, with a deadline",
    "tests/support/cancelled.py": "a model asks whether it is cancelled, which only can be asked",
    "tests/soak/test_soak.py": "measures the memory every second",
}


def test_no_test_sleeps_until_something_has_happened() -> None:
    """Tests wait with tests.support.waiting, ServerProcess.until_logged, Gate or Latch; sleep(0) only yields."""
    asleep = {
        name
        for name, text in texts()
        if re.fullmatch(r"tests/.*\.py", name) and re.search(r"\bsleep\((?!0\))", text)
    }
    assert asleep - {"tests/test_tree.py"} == set(SLEEPERS)


# who may start tasks in a nursery, and why
STARTERS = {
    "src/neptrio/transport/wire.py": "start(): what a connection's task raises ends that connection only",
    "src/neptrio/transport/port_server.py": "a port's own tasks, and those of its connections, which it guards itself",
    "src/neptrio/transport/rest/disconnect.py": "in a nursery of its own, which ends with the call",
    "src/neptrio/transport/rest/openai.py": "in a nursery of its own, which ends with the call",
}


def test_tasks_of_connections_are_started_by_their_wire() -> None:
    """What a task raises that was started in a port's nursery ends the server; Wire.start() ends the connection."""
    starting = {
        name
        for name, text in texts()
        if re.fullmatch(r"(src/neptrio|cext)/transport/.*\.pyx?", name) and re.search(r"\bstart_soon\b", text)
    }
    assert starting == set(STARTERS)


def test_every_environment_variable_is_explained() -> None:
    """Those that the server and its build look at are in the table of docs/command-line.md."""
    read = re.compile(
        r"""(?:environ(?:\.get)?[\[(]|held_requests\()\s*"([A-Z][A-Z0-9_]+)|"(MALLOC\w+)" not in os.environ"""
    )
    wanted = {"CUDA_HOME", "CUDA_PATH"}  # looked at in a loop
    for name, text in texts():
        if re.fullmatch(r"(src/neptrio/.*\.py|cext/.*\.pyx|setup\.py)", name):
            wanted |= {first or second for first, second in read.findall(text)}
    table = (
        (ROOT / "docs/command-line.md")
        .read_text()
        .partition("## Environment variables")[2]
        .partition("\n## ")[0]
    )
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    explained = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {"NEPTRIO_POLLER", "TRITONSERVER_DELAY_SCHEDULER", "NEPTRIO_CEXT_DEBUG"} <= wanted
    assert wanted - {"CC"} <= explained
    # and the table holds nothing that is gone
    everything = "".join(text for name, text in texts() if name.startswith(("src/", "cext/", "setup.py")))
    assert all(f'"{name}"' in everything for name in explained)


PUBLIC = {
    "_asdict",
    "_exit",
    "_fields",
    "_fields_",
    "_getframe",
    "_inductor",
    "_replace",
}  # of the standard library, and of PyTorch
MOST_PRIVATE = 75  # there are never more than there were


def test_tests_look_from_outside() -> None:
    """What a test takes of an object's private attributes ties it to how that is made. Their number only goes down."""
    found = [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, text in texts()
        if re.fullmatch(r"tests/.*\.py", name)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and re.match(r"_[^_]", node.attr)
        and node.attr not in PUBLIC
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]
    assert len(found) <= MOST_PRIVATE, found


def test_every_mutant_names_a_line_that_is_there() -> None:
    assert [mutant for mutant in MUTANTS if not occurs_once(*mutant[:2])] == []


def test_the_package_is_typed() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package in ("neptrio", "triton_python_backend_utils"):
        assert (ROOT / "src" / package / "py.typed").exists() and "py.typed" in packages[package]
