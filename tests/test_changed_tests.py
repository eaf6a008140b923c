"""tools/changed_tests.py: which tests belong to a file, in a small tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.changed_tests import chosen, imported, module_of

FILES = {
    "tests/loop/test_outputs.py": "import pytest\n",
    "tests/loop/test_outputs_far.py": "import pytest\n",
    "tests/loop/test_timers.py": "from neptrio.loop import timers, poller\n",
    "tests/loop/test_through.py": "from tests.support.clock import jump\n",
    "tests/loop/test_neither.py": "import neptrio\n",
    "tests/support/clock.py": "from neptrio.loop.clock import (\n    Clock,\n)\n",
    "tests/service/test_stats.py": "import json\n",
    "tests/test_page.py": 'PAGE = "docs/page.md"\n',
    "tests/test_tree.py": "",
}


@pytest.mark.parametrize(
    "changed, tests",
    [
        ("tests/loop/test_neither.py", ["tests/loop/test_neither.py"]),
        ("cext/loop/outputs.pyx", ["tests/loop/test_outputs.py", "tests/loop/test_outputs_far.py"]),
        ("cext/loop/outputs_core.pyx", ["tests/loop/test_outputs.py", "tests/loop/test_outputs_far.py"]),
        ("src/neptrio/loop/poller.py", ["tests/loop/test_timers.py"]),
        ("src/neptrio/loop/clock.py", ["tests/loop/test_through.py"]),
        ("tests/support/clock.py", ["tests/loop/test_through.py"]),
        ("src/neptrio/service/other.py", ["tests/service/test_stats.py"]),
        ("docs/page.md", ["tests/test_page.py"]),
        ("LICENSE", []),
    ],
)
def test_what_belongs_to_a_file(tmp_path: Path, changed: str, tests: list[str]) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert chosen([changed], tmp_path) == ([*tests, "tests/test_tree.py"], 0)


def test_names() -> None:
    assert module_of("src/neptrio/loop/__init__.py") == "neptrio.loop"
    assert module_of("cext/loop/outputs.pxd") == "neptrio.loop.outputs"
    assert module_of("tools/fuzz.py") == "tools.fuzz"
    assert module_of("Makefile") == ""
    assert imported("from a.b import c as d, e\nimport f.g, h as i") == {"a.b", "a.b.c", "a.b.e", "f.g", "h"}
