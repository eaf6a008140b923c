"""What is said of models in processes of their own, without starting one."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from neptrio.backends.python import examine, limits
from neptrio.config.groups import runs_on
from neptrio.observe.top_view import Sample, render
from neptrio.scheduling.explain import explain
from tests.support.requests import config_of

PYTHON = 'backend: "python" instance_group { count: 2 kind: KIND_CPU } '


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }} '


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a process of its own behind shared memory, the default"),
        (parameter("isolation", "process"), "a process of its own behind shared memory (parameter isolation"),
        (
            parameter("isolation", "none"),
            "threads of the server's process and share its GIL (parameter isolation 'none')",
        ),
        (parameter("FORCE_CPU_ONLY_INPUT_TENSORS", "no"), "threads of the server's process"),
        (
            parameter("EXECUTION_ENV_PATH", "/env"),
            "the interpreter of its EXECUTION_ENV_PATH, behind shared memory",
        ),
    ],
)
def test_explain_says_where_a_python_model_runs(text: str, words: str) -> None:
    assert words in explain(config_of(PYTHON + text))[-1]


@pytest.mark.parametrize("backend", ["kernel", "onnxruntime"])
def test_explain_says_where_a_kernel_or_onnx_model_runs_that_asks(backend: str) -> None:
    text = f'backend: "{backend}" {parameter("isolation", "process")}'
    assert "a process of its own behind shared memory (parameter isolation" in explain(config_of(text))[-1]


@pytest.mark.parametrize("backend", ["identity", "kernel", "onnxruntime"])
def test_explain_says_nothing_of_it_for_other_models(backend: str) -> None:
    assert "process" not in " ".join(explain(config_of(f'backend: "{backend}"')))


def test_the_start_up_table() -> None:
    config = config_of(PYTHON)
    assert (runs_on(config), runs_on(config, True)) == ("2 x CPU", "2 x CPU, own processes")


def test_top_shows_each_process() -> None:
    stat = {
        "name": "m", "version": "1", "inference_count": 0, "execution_count": 0,
        "inference_stats": defaultdict(lambda: {"count": 0, "ns": 0}), "processes": [],
    }  # fmt: skip
    process = {"instance": "m_0_0", "pid": 7, "restarts": 2, "ring": 3, "resident_bytes": 25_000_000}
    samples = [
        Sample(seconds, {("m", "1"): {**stat, "processes": [{**process, "cpu_seconds": cpu}]}})
        for seconds, cpu in [(10.0, 4.0), (12.0, 5.0)]
    ]
    assert render("here", *samples)[-1] == "  m_0_0: pid 7, 25 MB, 50% of a core, 2 restarts, 3 ahead"


def test_variables_that_a_process_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SECRET", "TOKEN_A", "TOKEN_B", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SECRET", "s")
    monkeypatch.setenv("TOKEN_A", "a")
    plain = limits.environment(config_of(PYTHON), {})
    assert plain["SECRET"] == "s" and "PATH" in plain and int(plain["OMP_NUM_THREADS"]) >= 1
    assert limits.withheld(config_of(PYTHON), {}) == []
    few = limits.environment(config_of(PYTHON + parameter("ENVIRONMENT", "minimal")), {})
    assert "SECRET" not in few and "PATH" in few
    made = limits.environment(config_of(PYTHON + parameter("ENVIRONMENT", "minimal,TOKEN_*, NEW=x=y")), {})
    assert (made["TOKEN_A"], made["NEW"]) == ("a", "x=y") and "SECRET" not in made
    # what all models get may be narrowed for all, and a model names what it needs
    for_all = {"environment": "minimal"}
    assert "SECRET" not in limits.environment(config_of(PYTHON), for_all)
    named = config_of(PYTHON + parameter("ENVIRONMENT", "SECRET"))
    assert limits.environment(named, for_all)["SECRET"] == "s"
    assert {"SECRET", "TOKEN_A"} & set(limits.withheld(named, for_all)) == {"TOKEN_A"}
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert limits.environment(config_of(PYTHON + parameter("THREADS", "2")), {})["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize("asked", ["", "*", "NEPTRIO_TOKEN", "NEPTRIO_*", "minimal", "minimal,NEPTRIO_*"])
def test_no_process_is_given_what_is_the_servers_own(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv("NEPTRIO_TOKEN", "hush")
    monkeypatch.setenv("NEPTRIO_ANYTHING", "hush")
    monkeypatch.setenv("NEPTRIO_KERNEL_CACHE", "/cache")  # which kernel models' processes need
    config = config_of(PYTHON + (parameter("ENVIRONMENT", asked) if asked else ""))
    made = limits.environment(config, {})
    assert [name for name in made if name.startswith("NEPTRIO_")] == ["NEPTRIO_KERNEL_CACHE"]
    assert not [name for name in limits.withheld(config, {}) if name.startswith("NEPTRIO_")]
    given = config_of(PYTHON + parameter("ENVIRONMENT", "NEPTRIO_TOKEN=the model's"))
    assert limits.environment(given, {})["NEPTRIO_TOKEN"] == "the model's"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def preload(args): pass\nclass TritonPythonModel: pass", True),
        ("class TritonPythonModel:\n    @classmethod\n    def preload(cls, args): pass", True),
        ("class Other:\n    def preload(self): pass\nclass TritonPythonModel: pass", False),
        ("class TritonPythonModel(", False),
    ],
)
def test_which_files_have_a_preload(tmp_path: Path, code: str, found: bool) -> None:
    (tmp_path / "model.py").write_text(code)
    assert examine.preloads(tmp_path / "model.py") is found
