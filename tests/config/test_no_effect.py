"""Fields that change nothing are named: by the check of a repository and in the server's log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from neptrio.config import defaults
from neptrio.config import model_config as model_config
from neptrio.config.no_effect import fields_without_effect
from tests.repository.test_check import problems
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

BATCH_INPUT = (
    'batch_input { kind: BATCH_ELEMENT_COUNT target_name: "E" data_type: TYPE_INT32 source_input: "INPUT0" }'
)
ELSEWHERE = "has no effect on models of backend '{}', only on those of '{}'"
CUDA_GRAPHS = "optimization { cuda { graphs: true } }"


def named(text: str, backend: str = "identity") -> list[tuple[str, str]]:
    config: Any = model_config.parse_text(f'name: "m" backend: "{backend}" max_batch_size: 8 {text}', "test")
    defaults.fill(config, None)
    return [(".".join(map(str, path)), why) for path, why in fields_without_effect(config)]


@pytest.mark.parametrize(
    ("text", "field", "why"),
    [
        (BATCH_INPUT, "batch_input", ELSEWHERE.format("identity", "onnxruntime")),
        (
            'batch_output { target_name: "OUTPUT0" }',
            "batch_output",
            ELSEWHERE.format("identity", "onnxruntime"),
        ),
        ("optimization { graph { level: 1 } }", "optimization.graph.level", "onnxruntime"),
        ("optimization { execution_accelerators { } }", "optimization.execution_accelerators", "onnxruntime"),
        (CUDA_GRAPHS, "optimization.cuda.graphs", ELSEWHERE.format("identity", "kernel")),
        ("optimization { priority: PRIORITY_MAX }", "optimization.priority", "no priority"),
        ("optimization { eager_batching: true }", "optimization.eager_batching", "has no effect"),
        (
            "optimization { gather_kernel_buffer_threshold: 4 }",
            "optimization.gather_kernel_buffer_threshold",
            "has no effect",
        ),
        (
            "dynamic_batching { default_priority_level: 2 }",
            "dynamic_batching.default_priority_level",
            "has no effect without priority_levels",
        ),
        (
            "dynamic_batching { priority_queue_policy { key: 1 value { max_queue_size: 1 } } }",
            "dynamic_batching.priority_queue_policy",
            "has no effect without priority_levels",
        ),
        ('instance_group [ { }, { profile: "p" } ]', "instance_group.1.profile", "TensorRT"),
        ('instance_group { host_policy: "p" }', "instance_group.0.host_policy", "no host policies"),
        (
            'parameters { key: "ISOLATION" value { string_value: "none" } }',
            "parameters.ISOLATION",
            "did you mean 'isolation'?",
        ),
        (
            'platform: "onnxruntime_onnx"',
            "platform",
            "'onnxruntime_onnx' is a platform of backend 'onnxruntime': backend 'identity' serves the model",
        ),
    ],
)
def test_each_field(text: str, field: str, why: str) -> None:
    ((found, reason),) = named(text)
    assert found == field and why in reason


def test_where_they_have_an_effect() -> None:
    assert named(f"{BATCH_INPUT} optimization {{ graph {{ level: 1 }} }}", "onnxruntime") == []
    assert named(CUDA_GRAPHS, "kernel") == []
    assert named("dynamic_batching { } instance_group { count: 2 }") == []


@pytest.mark.slow
def test_the_check_and_the_log_say_so(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config(extra=BATCH_INPUT))
    (line,) = problems(tmp_path)
    expected = "batch_input: " + ELSEWHERE.format("identity", "onnxruntime")
    assert line.startswith("warning: m: m/config.pbtxt:") and line.endswith(expected)
    with ServerProcess(tmp_path) as server:
        assert server.log().count(expected) == 1
