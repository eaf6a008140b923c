"""`neptrio explain --memory`: recorded traffic played against budgets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from neptrio import cli
from neptrio.traces.memory_plan import Size, Uses, enough, outcomes, played
from neptrio.traces.reader import Trace
from tests.support.repository import identity_config, write_model

MIB = 1 << 20
SIZES = {"a": Size(10, 1.0), "b": Size(10, 2.0), "c": Size(10, 4.0)}


def test_the_model_that_was_used_longest_ago_goes_first() -> None:
    found = played("abacb", SIZES, 20)
    assert found.waits == {"a": 1, "b": 2, "c": 1}, "c takes the place of b, and b that of a"
    assert found.again == 1
    assert found.seconds == 1 + 2 + 4 + 2


def test_all_have_room_in_the_largest_budget() -> None:
    found = outcomes("abcabcabc", SIZES)
    assert found[0].budget == 10 and found[-1].budget == 30
    assert found[-1].again == 0 and sum(found[-1].waits.values()) == 3
    assert found[0].again == 6, "there is room for one"
    assert enough(found, 9) is found[-1]
    assert enough(outcomes("a" * 9, SIZES), 9).budget == 10


def test_a_model_that_is_larger_than_the_budget_always_waits() -> None:
    found = played("aba", {"a": Size(10), "b": Size(50)}, 20)
    assert found.waits == {"a": 1, "b": 1} and found.again == 0
    assert played("bb", {"b": Size(50)}, 20).again == 1


def test_uses_are_in_the_order_of_their_beginnings() -> None:
    uses = Uses()
    for number, (model, ns) in enumerate([("late", 3_000_000_000), ("early", 1_000_000_000), ("", 5)]):
        uses.add(Trace(number, model, times=[(ns + 5, "REQUEST_END"), (ns, "REQUEST_START")]))
    assert uses.in_order() == ["early", "late"] and uses.seconds == 2.0
    assert uses.counts() == {"early": 1, "late": 1}


def traced(path: Path, models: Sequence[str]) -> str:
    """A trace file with a request each second."""
    rows = [
        {
            "id": number + 1,
            "model_name": model,
            "model_version": 1,
            "timestamps": [{"name": "REQUEST_START", "ns": number * 10**9}],
        }
        for number, model in enumerate(models)
    ]
    path.write_text(json.dumps(rows))
    return str(path)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        write_model(tmp_path / "models", name, identity_config(), {"1/weights": "x" * MIB})
    head = {"neptrio_model_sizes": 1}
    line = {"name": "a", "files": "of another day", "held": 3 * MIB, "seconds": 0.5}
    text = "\n".join(map(json.dumps, (head, line)))
    (tmp_path / "models" / ".neptrio-model-sizes").write_text(text + "\n")
    return tmp_path / "models"


def test_a_plan_for_a_trace_file(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = traced(tmp_path / "trace.json", "abab" * 10 + "?")
    assert cli.main(["explain", "--memory", file, "--model-repository", str(repository)]) == 0
    said = capsys.readouterr()
    assert "1 model of the traces left out, not in the repository: ?" in said.err
    lines = said.out.splitlines()
    assert lines[0] == "40 uses of 2 models in 40 s."
    assert lines[1].startswith("1 of them were never measured, and count as their files.")
    rows = [line.split() for line in lines if line.strip()[:1].isdigit() and "MiB" in line]
    assert rows[0][:5] == ["3.0", "MiB", "40", "100.0%", "38"], "no room for both: every use waits"
    assert rows[-1][:5] == ["4.0", "MiB", "2", "5.0%", "0"] and "<- enough" in lines[3 + len(rows)]
    assert any(line.split()[:2] == ["a", "3.0"] for line in lines)
    assert any(line.split()[:2] == ["b", "1.0"] and line.endswith("(files)") for line in lines)
    assert lines[-1].startswith("--model-memory-budget=5MiB is enough")


@pytest.mark.parametrize(
    ("flags", "status", "text"),
    [
        ([], 2, "expected the name of a model, or --memory FILE..."),
        (["m", "--memory", "FILE", "--model-repository", "REPOSITORY"], 2, "without a model"),
        (["--memory", "FILE"], 2, "goes with --model-repository DIR"),
        (["--memory", "missing", "--model-repository", "REPOSITORY"], 1, "missing"),
        (
            ["--memory", "OTHERS", "--model-repository", "REPOSITORY"],
            1,
            "no request for a model of the repository",
        ),
    ],
)
def test_flags_that_are_not_enough(
    repository: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    status: int,
    text: str,
) -> None:
    given = {
        "FILE": traced(tmp_path / "trace.json", "ab"),
        "OTHERS": traced(tmp_path / "others.json", "xy"),
        "REPOSITORY": str(repository),
    }
    assert cli.main(["explain", *(given.get(flag, flag) for flag in flags)]) == status
    assert text in capsys.readouterr().err
