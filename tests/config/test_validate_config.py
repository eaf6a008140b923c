"""What a complete configuration may not say, and what the error names."""

from __future__ import annotations

from pathlib import Path

import pytest

from neptrio._proto.inference import ModelConfig
from neptrio.backends.identity import IdentityBackend
from neptrio.config import defaults, validate_config
from neptrio.config import model_config as model_config
from neptrio.config.model_config import ConfigSource
from neptrio.errors import InvalidArgument

IO = """input { name: "X" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }
"""


def checked(text: str, folder: Path) -> ModelConfig:
    text = 'backend: "identity"\nmax_batch_size: 8\n' + text
    source = ConfigSource(model_config.parse_text(text, "m/config.pbtxt"), "m/config.pbtxt", text)
    defaults.identify(source, "m", folder, True)
    defaults.fill(source.config, IdentityBackend)
    validate_config.check(source, source.config, folder)
    return source.config


GOOD = [
    IO,
    'input { name: "X" data_type: TYPE_FP32 dims: [ -1, 6 ] reshape { shape: [ -1, 2, 3 ] } }',
    'input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } }',
    IO + "dynamic_batching { preferred_batch_size: [ 4, 8 ] priority_levels: 2 default_priority_level: 2 "
    "priority_queue_policy { key: 2 value: {} } }",
    IO + "dynamic_batching { preserve_ordering: true priority_levels: 1 default_priority_level: 1 }",
    IO + "dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY } }",
    IO + "dynamic_batching { default_priority_level: 3 priority_queue_policy { key: 2 value: {} } }",
    IO + "sequence_batching { oldest { max_candidate_sequences: 4 } control_input { name: 'START' control { "
    "kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } } control_input { name: 'ID' control { "
    "kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } } }",
    IO + "version_policy { specific { versions: [ 1, 3 ] } }",
    IO + "instance_group [ { count: 2 kind: KIND_CPU }, { passive: true } ]",
]


@pytest.mark.parametrize("text", GOOD)
def test_good(text: str, tmp_path: Path) -> None:
    config = checked(text, tmp_path)
    assert (config.name, config.max_batch_size) == ("m", 8) and config.input[0].name == "X"


BAD = [
    ('name: "n"', ":3: name: unexpected directory name 'm' for model 'n'"),
    ("input { data_type: TYPE_FP32 dims: [ 1 ] }", ":3: input[0]: every input must have a name"),
    (IO + '\ninput { name: "X" data_type: TYPE_FP32 dims: [ 1 ] }', ":6: input[1].name: two inputs are called 'X'"),
    ('output { name: "X" dims: [ 1 ] }', ":3: output[0].data_type: output 'X' must specify data_type"),
    ('input { name: "X" data_type: TYPE_FP32 }', ":3: input[0].dims: input 'X' must specify dims; a scalar"),
    ('input { name: "X" data_type: TYPE_FP32\n dims: [ 4, 0 ] }', ":4: input[0].dims[1]: input 'X': a dimension is 1"),
    ('input { name: "X" data_type: TYPE_FP32 dims: [ -2 ] }', "or -1 for any size, got -2"),
    (
        'input { name: "X" data_type: TYPE_FP32 dims: [ 4 ]\n reshape { shape: [ 2, 3 ] } }',
        ":4: input[0].reshape: input 'X' and its reshape must hold the same number of elements: dims [4], shape [2,3]",
    ),
    (
        'output { name: "X" data_type: TYPE_FP32 dims: [ -1, 4 ] reshape { shape: [ 4 ] } }',
        "output 'X' has 1 variable dims but its reshape has 0",
    ),
    (
        'output { name: "X" data_type: TYPE_FP32 dims: [ -1, 4 ] reshape { shape: [ 4, -1 ] } }',
        "must hold the same number of elements",
    ),
    ('input { name: "X" data_type: TYPE_FP32 dims: [ 4 ] format: FORMAT_NHWC }', "needs 3 dims, got [4]"),
    (
        'output { name: "X" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "no.txt" }',
        "output[0].label_filename: output 'X' names a file that is not in the model's folder: 'no.txt'",
    ),
    (IO + "version_policy { latest { } }", "version_policy.latest.num_versions: expected 1 or more, got 0"),
    (IO + "version_policy { specific { } }", "expected at least one version number"),
    (IO + "version_policy { specific { versions: 0 } }", "versions[0]: a version is 1 or more, got 0"),
    (
        IO + "dynamic_batching {\n preferred_batch_size: [ 4, 9 ] }",
        ":6: dynamic_batching.preferred_batch_size[1]: expected a batch size from 1 to max_batch_size (8), got 9",
    ),
    (IO + "dynamic_batching { preferred_batch_size: [ 0 ] }", "from 1 to max_batch_size (8), got 0"),
    (
        IO + "dynamic_batching { priority_levels: 3 default_priority_level: 4 }",
        "expected a level from 1 to priority_levels (3), got 4",
    ),
    (
        IO + "dynamic_batching { priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 0 value: {} } }",
        "priority_queue_policy: expected levels from 1 to priority_levels (2), got 0",
    ),
    (IO + "dynamic_batching { priority_levels: 3 }", "expected a level from 1 to priority_levels (3), got 0"),
    (
        IO + "dynamic_batching { priority_levels: 3 default_priority_level: 1 priority_queue_policy { key: 4 value: {} } }",
        "priority_queue_policy: expected levels from 1 to priority_levels (3), got 4",
    ),
    (
        IO + "dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }",
        "cannot keep the order of requests with 2 priority levels",
    ),
    (
        IO + "dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY "
        "default_timeout_microseconds: 1 } }",
        "cannot keep the order of requests when timeout_action is DELAY",
    ),
    (IO + "sequence_batching { direct { minimum_slot_utilization: 1.5 } }", "expected 0 to 1, got 1.5"),
    (IO + "sequence_batching { control_input { } }", "every control_input must have a name"),
    (
        IO + 'sequence_batching { control_input { name: "S" control { kind: CONTROL_SEQUENCE_START } } }',
        "must specify exactly one of int32_false_true",
    ),
    (
        IO + 'sequence_batching { control_input { name: "S" control { int32_false_true: [ 1 ] } } }',
        "expects two values (for false and true), got 1",
    ),
    (
        IO + 'sequence_batching { control_input { name: "S" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32 } } }',
        "has one of the types TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32, TYPE_STRING",
    ),
    (IO + "sequence_batching { }\nresponse_cache { enable: true }", "the responses of a sequence cannot be cached"),
    (
        IO + "model_transaction_policy { decoupled: true } response_cache { enable: true }",
        "the responses of a decoupled model cannot be cached",
    ),
    (IO + "instance_group { count: -1 }", "instance_group[0].count: expected 1 or more instances, got -1"),
    (IO + "instance_group { kind: KIND_CPU gpus: [ 0 ] }", "has kind KIND_CPU but names GPUs [0]"),
    (IO + 'instance_group [ { name: "a" }, { name: "a" } ]', "two instance groups are called 'a'"),
    (IO + 'model_repository_agents { agents { name: "checksum" } }', "not supported by this server, got 'checksum'"),
    (
        IO + 'model_warmup { name: "w" inputs { key: "Z" value { } } }',
        "warm-up sample 'w' gives an input 'Z' that the model does not have; it has X",
    ),
    (
        IO + 'model_warmup { inputs { key: "X" value { data_type: TYPE_INT8 dims: 4 } } }',
        "warm-up input 'X' must have data_type TYPE_FP32, got TYPE_INT8",
    ),
    (IO + "instance_group { passive: true }", "expected a group that is not passive: passive instances execute no requests"),
    (IO + "model_warmup { batch_size: 9 }", "expected at most max_batch_size (8), got 9"),
    (IO + 'platform: "ensemble"', "needs the field ensemble_scheduling"),
    (
        'ensemble_scheduling { }\ninstance_group { }',
        "an ensemble has no backend of its own, got 'identity'",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BAD)
def test_bad(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as info:
        checked(text, tmp_path)
    assert message in str(info.value)
    assert str(info.value).startswith("m/config.pbtxt:")


def test_a_negative_batch_size(tmp_path: Path) -> None:
    source = ConfigSource(model_config.parse_text("max_batch_size: -1", "c"), "c", "max_batch_size: -1")
    with pytest.raises(
        InvalidArgument, match=r"c:1: max_batch_size: expected 0 \(no batching\) or more, got -1"
    ):
        validate_config.check(source, source.config, tmp_path)


def test_gpus_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from neptrio.config import accelerators

    monkeypatch.setattr(accelerators, "gpus", lambda: ())
    with pytest.raises(InvalidArgument, match="has kind KIND_GPU but no GPUs are available"):
        checked(IO + "instance_group { kind: KIND_GPU }", tmp_path)
    monkeypatch.setattr(accelerators, "gpus", lambda: (accelerators.Gpu(0, "a"), accelerators.Gpu(1, "b")))
    checked(IO + "instance_group { kind: KIND_GPU }", tmp_path)
    with pytest.raises(InvalidArgument, match="names GPU 2, available are 0, 1"):
        checked(IO + "instance_group { kind: KIND_GPU gpus: [ 2 ] }", tmp_path)


@pytest.mark.parametrize(
    ("text", "auto_complete", "said"),
    [
        (
            "\nplatform: 'onnx'",
            True,
            "m/config.pbtxt:2: platform: must specify 'backend' (or 'platform') for model 'm': the platform 'onnx' names none, "
            "expected one of identity, onnxruntime_onnx, ",
        ),
        (
            "",
            False,
            "neither is given, and with --disable-auto-complete-config the model's file does not decide",
        ),
        ("", True, "neither is given, and no version folder holds a file that tells it (model.graphdef, "),
    ],
)
def test_what_tells_no_backend(tmp_path: Path, text: str, auto_complete: bool, said: str) -> None:
    """A model's file that is there is not said to be missing."""
    (tmp_path / "1").mkdir()
    if text or not auto_complete:
        (tmp_path / "1/model.onnx").write_bytes(b"")
    source = ConfigSource(model_config.parse_text(text, "m/config.pbtxt"), "m/config.pbtxt", text)
    with pytest.raises(InvalidArgument) as info:
        defaults.identify(source, "m", tmp_path, auto_complete)
    assert said in str(info.value)
