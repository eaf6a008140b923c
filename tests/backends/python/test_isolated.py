# ruff: noqa: F401  (imported tests run against this module's server)
"""Models behave alike in the server's process and with an interpreter of their own. In processes of their own, as is the
default, the imported tests run where they are defined."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends.python import test_bls as bls
from tests.backends.python import test_decoupled as decoupled
from tests.backends.python import test_execute as execute
from tests.backends.python.models import config, python_model
from tests.backends.python.models import isolated as made_isolated
from tests.backends.python.test_bls import (  # the same tests against isolated models
    test_a_model_that_calls_itself,
    test_async_executions_overlap,
    test_async_failure,
    test_call_another_model,
    test_calls_by_label_and_alias,
    test_failures_come_back_as_error_responses,
    test_load_and_unload_from_a_model,
    test_nested_calls,
)
from tests.backends.python.test_decoupled import (
    test_a_cancelled_stream_stops_its_sender,
    test_a_client_that_reads_nothing_costs_little,
    test_a_decoupled_model_must_return_none,
    test_a_sender_of_a_model_that_is_not_decoupled,
    test_an_error_in_between,
    test_collecting_from_a_decoupled_model,
    test_final_with_data_and_without,
    test_many_responses,
    test_requests_that_the_model_leaves_open_fail,
    test_sending_after_the_final_response_is_refused,
)
from tests.backends.python.test_execute import (
    test_a_model_may_reuse_its_output_buffer,
    test_a_model_may_write_to_its_inputs,
    test_a_model_that_misbehaves,
    test_dlpack,
    test_error_codes_of_responses,
    test_layouts,
    test_strings_and_bfloat16,
    test_sum_and_difference,
)
from tests.support.repository import write_model
from tests.support.server import ServerProcess


def write_models(repository: Path, way: str) -> None:
    """The models of the imported tests, which run where `way` says."""
    isolated = functools.partial(made_isolated, way=way)
    ints, loose = "TYPE_INT32:16", config(extra=decoupled.DECOUPLED)
    isolated(repository, "sum", execute.SUM, config(f"A:{ints} B:{ints}", f"SUM:{ints} DIFFERENCE:{ints}", 8))
    isolated(repository, "in_place", execute.IN_PLACE)
    isolated(repository, "reuse", execute.REUSE)
    isolated(repository, "bad", execute.BAD)
    kinds = "T:TYPE_FP32:-1,-1 BIG:TYPE_FP32:-1,-1 EMPTY:TYPE_FP32:-1,-1 SCALAR:TYPE_FP32:-1"
    isolated(repository, "layout", execute.LAYOUT, config(outputs=kinds))
    text = config("IN:TYPE_STRING:-1", "OUT:TYPE_STRING:-1")
    isolated(repository, "identity_string", execute.IDENTITY, text)
    isolated(repository, "repeat", decoupled.REPEAT, loose)
    isolated(repository, "in_order", decoupled.REPEAT, config(extra=decoupled.IN_ORDER))
    isolated(repository, "async_repeat", decoupled.ASYNC, loose)
    isolated(repository, "returns", decoupled.RETURNS, loose)
    isolated(repository, "collect", decoupled.COLLECT)
    isolated(repository, "single", decoupled.SINGLE)
    write_model(repository, "second", config().replace('"python"', '"identity"'))
    step = decoupled.REPEAT_STEP
    write_model(repository, "one_step", decoupled.ENSEMBLE.format(step.format("OUT")))
    two = f"{step.format('MID')}, {decoupled.SECOND_STEP}"
    write_model(repository, "two_steps", decoupled.ENSEMBLE.format(two))
    python_model(repository, "double", bls.DOUBLE, config(extra=bls.NAMES))
    python_model(repository, "spare", bls.DOUBLE)
    for name in ("caller", "middle"):
        isolated(repository, name, bls.CALLER)
    isolated(repository, "wide", bls.CALLER, config(extra="instance_group { count: 2 kind: KIND_CPU }"))
    isolated(repository, "overlap", bls.ASYNC)
    isolated(repository, "async_fails", bls.ASYNC_FAILS)
    isolated(repository, "control", bls.CONTROL)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("none", id="none"),
        pytest.param(sys.prefix, id="interpreter", marks=pytest.mark.slow),
    ],
)
def server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    write_models(repository, request.param)
    made_isolated(repository, "dlpack", execute.DLPACK, way=request.param)
    bf16 = config("IN:TYPE_BF16:-1", "OUT:TYPE_BF16:-1")
    made_isolated(repository, "identity_bf16", execute.IDENTITY, bf16, request.param)
    made_isolated(repository, "dlpack_bf16", execute.DLPACK_BF16, bf16, request.param)
    loads = [f"--load-model={d.name}" for d in repository.iterdir() if d.name != "spare"]
    with ServerProcess(repository, "--model-control-mode=explicit", *loads) as process:
        yield process
