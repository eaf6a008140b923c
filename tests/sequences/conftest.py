"""One server with a model for every strategy and control form, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sequences.models import sequence_config
from tests.support.repository import write_model
from tests.support.server import ServerProcess

STATE = 'state [ { input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_INT32 dims: [ 1 ] EXTRA } ]'

UNTYPED = (
    'backend: "sequence" max_batch_size: 4 input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ] '
    'output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] } ] sequence_batching { }'
)

PLAIN = (
    'backend: "identity" max_batch_size: 4 input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ] '
    'output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]'
)


def write_models(repository: Path) -> None:
    write_model(repository, "plain", PLAIN)
    write_model(repository, "direct", sequence_config("direct { }", 4))
    write_model(repository, "direct_one", sequence_config("direct { }", 1, idle_us=500_000))
    write_model(repository, "one_slot", sequence_config("direct { }", 1, idle_us=3_600_000_000))
    write_model(repository, "nobatch", sequence_config("direct { }", 0))
    write_model(repository, "oldest", sequence_config("oldest { max_candidate_sequences: 8 }", 4))
    write_model(
        repository,
        "two_instances",
        sequence_config("oldest { max_candidate_sequences: 2 }", 4, extra="instance_group [ { count: 2 } ]"),
    )
    write_model(
        repository,
        "delay_direct",
        sequence_config("direct { max_queue_delay_microseconds: 60000000 minimum_slot_utilization: 1.0 }", 2),
    )
    write_model(
        repository,
        "delay_shapes",
        sequence_config("direct { max_queue_delay_microseconds: 60000000 minimum_slot_utilization: 1.0 }", 2),
    )
    write_model(
        repository,
        "delay_oldest",
        sequence_config(
            "oldest { max_candidate_sequences: 8 preferred_batch_size: [ 3 ] "
            "max_queue_delay_microseconds: 60000000 preserve_ordering: true }",
            4,
        ),
    )
    write_model(repository, "string_id", sequence_config("direct { }", 2, corrid="TYPE_STRING"))
    write_model(repository, "defaults", UNTYPED)
    patient = "sequence_batching { max_sequence_idle_microseconds: 3600000000 }"
    write_model(repository, "untyped", UNTYPED.replace("sequence_batching { }", patient))
    for corrid in ("INT32", "UINT32", "INT64"):
        form = {"INT32": "fp32", "UINT32": "bool", "INT64": "int32"}[corrid]
        write_model(
            repository,
            f"corrid_{corrid.lower()}",
            sequence_config("direct { }", 2, corrid=f"TYPE_{corrid}", form=form),
        )
    for name, extra in {
        "state": "",
        "state_same_buffer": "use_same_buffer_for_input_output: true",
        "state_zero": 'initial_state { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true name: "zero" }',
        "state_file": 'initial_state { data_type: TYPE_INT32 dims: [ 1 ] data_file: "seven" name: "seven" }',
    }.items():
        write_model(
            repository,
            name,
            sequence_config(
                "direct { }",
                4,
                states=STATE.replace("EXTRA", extra),
                extra='parameters { key: "fail_value" value { string_value: "-1" } }',
            ),
            {"initial_state/seven": (7).to_bytes(4, "little")},
        )
    write_model(
        repository,
        "state_any",
        sequence_config(
            "oldest { max_candidate_sequences: 4 }",
            0,
            states='state [ { input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_INT32 dims: [ -1 ] } ]',
        ),
    )
    write_model(
        repository,
        "iterative",
        sequence_config(
            "oldest { max_candidate_sequences: 2 }",
            2,
            extra='parameters { key: "iterations" value { string_value: "5" } }',
            batching="iterative_sequence: true",
        ),
    )
    write_model(
        repository,
        "iterative_for_ever",
        sequence_config(
            "direct { }",
            1,
            extra='parameters { key: "iterations" value { string_value: "1000000000" } } '
            'parameters { key: "execute_delay_ms" value { string_value: "20" } }',
            idle_us=3_600_000_000,
            batching="iterative_sequence: true",
        ),
    )
    write_model(
        repository,
        "not_iterative",
        sequence_config(
            "direct { }", 2, extra='parameters { key: "iterations" value { string_value: "2" } }'
        ),
    )
    write_model(
        repository,
        "free",
        sequence_config(
            "direct { }",
            1,
            idle_us=3_600_000_000,
            extra='parameters { key: "free_sequences_on_disconnect" value { string_value: "true" } }',
        ),
    )


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("sequences")
    write_models(repository)
    with ServerProcess(repository) as process:
        yield process
