"""Slots, backlog, deadlines, cancellation, state and the tools, against a real server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.sequences.models import (
    LATCHED,
    LATCHED_CONFIG,
    Caller,
    Stream,
    listing,
    rest,
    sequence_config,
    tensors,
)
from tests.support.latch import Latch
from tests.support.metrics import scrape, value
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until


def fails(server: ServerProcess, model: str) -> int:
    """How many requests have failed."""
    _, stats = rest(server, "GET", f"/v2/models/{model}/stats")
    return int(stats["model_stats"][0]["inference_stats"]["fail"]["count"])


def test_backlog_is_served_in_arrival_order(server: ServerProcess) -> None:
    """One slot: the second and third sequence wait, whole, and come in the order of their first request."""
    with Stream(server) as stream:
        stream.send("one_slot", 1, "s", 1)
        assert stream.receive()["OUTPUT"] == 1
        stream.send("one_slot", 2, "s", 10)
        stream.send("one_slot", 3, "s", 100)
        stream.send("one_slot", 2, "e", 20)
        held = until(lambda: (found := listing(server, "one_slot"))["backlog_requests"] == 3 and found)
        assert [(r["id"], r["state"], r["slot"]) for r in held["sequences"]] == [
            (1, "slot", 0),
            (2, "backlog", -1),
            (3, "backlog", -1),
        ]
        assert held["backlog"] == 2 and held["slots"] == held["slots_used"] == 1
        stream.send("one_slot", 1, "e", 2)
        stream.send("one_slot", 3, "e", 200)
        # answers leave a stream in request order
        got = [stream.receive()["OUTPUT"] for _ in range(5)]
    assert got == [10, 100, 30, 3, 300]
    assert listing(server, "one_slot")["sequences"] == []


def test_direct_pads_lower_slots_with_null_requests(server: ServerProcess) -> None:
    with Stream(server) as stream:
        for sequence in (1, 2, 3):
            stream.send("direct", sequence, "s", 1)
            assert stream.receive()["POSITION"] == sequence - 1
        stream.send("direct", 3, "", 1)
        third = stream.receive()
        assert (third["BATCH_SIZE"], third["POSITION"], third["CORRID"], third["READY"]) == (3, 2, 3, 1)
        stream.send("direct", 1, "", 1)
        assert stream.receive()["BATCH_SIZE"] == 1, "slots above the highest ready one are left out"
        for sequence in (1, 2, 3):
            stream.send("direct", sequence, "e", 1)
        assert [stream.receive()["OUTPUT"] for _ in range(3)] == [3, 2, 3]


def test_different_shapes_do_not_share_a_batch(server: ServerProcess) -> None:
    with Stream(server) as stream:
        stream.send("delay_shapes", 1, "se", [1, 2])
        stream.send("delay_shapes", 2, "se", [1, 2, 3])
        assert stream.receive()["OUTPUT"] == [1, 2]
        # the second waits for company in its own shape; another sequence of that shape brings it
        stream.send("delay_shapes", 3, "se", [4, 5, 6])
        got = [stream.receive()["OUTPUT"] for _ in range(2)]
    assert got == [[1, 2, 3], [4, 5, 6]]


def test_oldest_goes_at_a_preferred_size(server: ServerProcess) -> None:
    """The delay is a minute: only the preferred size of 3 can have sent them."""
    with Stream(server) as stream:
        for sequence in (1, 2, 3):
            stream.send("delay_oldest", sequence, "s", sequence)
        got = [stream.receive() for _ in range(3)]
        assert [g["OUTPUT"] for g in got] == [1, 2, 3] and {g["BATCH_SIZE"] for g in got} == {3}
        for sequence in (1, 2, 3):
            stream.send("delay_oldest", sequence, "e", sequence)
        assert [stream.receive()["OUTPUT"] for _ in range(3)] == [2, 4, 6]


def test_oldest_puts_one_request_per_sequence_into_a_batch(server: ServerProcess) -> None:
    with Stream(server) as stream:
        for sequence in (1, 2, 3):  # no batch is full before the third sequence comes
            for step in ("s", "", "", "e"):
                stream.send("delay_oldest", sequence, step, 1)
        got = [stream.receive() for _ in range(12)]
    assert [g["OUTPUT"] for g in got] == [1, 2, 3, 4] * 3
    assert {g["BATCH_SIZE"] for g in got} == {3}, "sequences were not batched together"


def test_several_instances_share_the_sequences(server: ServerProcess) -> None:
    with Stream(server) as stream:
        for sequence in range(1, 5):
            stream.send("two_instances", sequence, "s", sequence)
        for _ in range(4):
            stream.receive()
        rows = listing(server, "two_instances")["sequences"]
        assert sorted((r["instance"][-2:], r["slot"]) for r in rows) == [
            ("_0", 0),
            ("_0", 1),
            ("_1", 0),
            ("_1", 1),
        ]
        for sequence in range(1, 5):
            stream.send("two_instances", sequence, "e", sequence)
        assert [stream.receive()["OUTPUT"] for _ in range(4)] == [2, 4, 6, 8]


def test_idle_sequences_end_and_free_their_slot(server: ServerProcess) -> None:
    with Stream(server) as stream:
        began = time.monotonic()
        stream.send("direct_one", 5, "s", 1)
        stream.receive()
        stream.send("direct_one", 6, "se", 2)  # waits in the backlog until 5 has been idle for 0.5 s
        assert stream.receive()["OUTPUT"] == 2
        assert time.monotonic() - began >= 0.5
        stream.send("direct_one", 5, "", 1)
        with pytest.raises(
            InferenceServerException, match="sequence 5 to model 'direct_one' must specify the START"
        ):
            stream.receive()


def test_timeout_acts_in_the_backlog_only(server: ServerProcess) -> None:
    with Stream(server) as stream, Stream(server) as other:
        stream.send("free", 1, "s", 1, timeout=1)
        assert stream.receive()["OUTPUT"] == 1
        other.send("free", 2, "s", 1, timeout=3_600_000_000)
        other.send("free", 2, "", 1, timeout=50_000)
        for _ in range(2):
            with pytest.raises(InferenceServerException) as info:
                other.receive()
            assert info.value.message() == "timeout of the corresponding sequence has been expired"
        stream.send("free", 1, "e", 1)
        assert stream.receive()["OUTPUT"] == 2
    assert fails(server, "free") == 2


@pytest.mark.slow
def test_a_cancelled_request_at_the_head_cancels_the_sequence(tmp_path: Path) -> None:
    write_model(tmp_path, "held", LATCHED_CONFIG, {"1/model.py": LATCHED})
    with (
        Latch(tmp_path / "held" / "open") as latch,
        ServerProcess(tmp_path) as server,
        grpcclient.InferenceServerClient(server.grpc) as client,
        Stream(server) as stream,
    ):

        def held(what: str, count: int) -> None:
            until(lambda: [r[what] for r in listing(server, "held")["sequences"]] == [count], what)

        stream.send("held", 1, "s", 1)
        results: list[Any] = []
        held("executing", 1)
        call = client.async_infer(
            "held", tensors(grpcclient, 2), lambda result, error: results.append(error), sequence_id=1
        )
        held("queued", 1)
        stream.send("held", 1, "", 3)
        held("queued", 2)
        call.cancel()
        until(lambda: results, "the client has cancelled")
        until(lambda: fails(server, "held"), "the server has seen it")
        latch.open()
        assert stream.receive()["OUTPUT"] == 1
        with pytest.raises(InferenceServerException, match="request cancelled"):
            stream.receive()
        until(lambda: not listing(server, "held")["sequences"], "the sequence has ended")
        stream.send("held", 1, "", 3)
        with pytest.raises(InferenceServerException, match="must specify the START flag"):
            stream.receive()


def test_cancel_in_the_backlog(server: ServerProcess) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client, Stream(server) as stream:
        stream.send("free", 1, "s", 1)
        stream.receive()
        call = client.async_infer(
            "free", tensors(grpcclient, 2), lambda result, error: None, sequence_id=2, sequence_start=True
        )
        until(lambda: listing(server, "free")["backlog"] == 1)
        call.cancel()
        until(lambda: listing(server, "free")["backlog"] == 0)
        stream.send("free", 1, "e", 1)
        assert stream.receive()["OUTPUT"] == 2


@pytest.mark.parametrize("cancel", [True, False])
def test_free_on_disconnect(server: ServerProcess, cancel: bool) -> None:
    """The stream that started the only slot's sequence closes: the slot is free, an hour too early."""
    stream = Stream(server)
    stream.send("free", 1, "s", 1)
    stream.receive()
    assert listing(server, "free")["slots_used"] == 1
    stream.close(cancel)
    until(lambda: listing(server, "free")["slots_used"] == 0)
    with Stream(server) as other:
        other.send("free", 1, "", 1)
        with pytest.raises(InferenceServerException, match="must specify the START flag"):
            other.receive()


def test_other_models_keep_sequences_of_a_closed_stream(server: ServerProcess) -> None:
    with Stream(server) as stream:
        stream.send("nobatch", 71, "s", 1, False)
        stream.receive()
    with Stream(server) as stream:
        stream.send("nobatch", 71, "e", 1, False)
        assert stream.receive()["OUTPUT"] == 2


@pytest.mark.parametrize(
    ("model", "first"), [("state", 0), ("state_same_buffer", 0), ("state_zero", 0), ("state_file", 7)]
)
def test_implicit_state(server: ServerProcess, model: str, first: int) -> None:
    with Stream(server) as stream:
        for sequence in (1, 2):
            stream.send(model, sequence, "s", sequence)
            got = stream.receive()
            assert got["OUTPUT"] == first + sequence and "SUM_OUT" not in got
        for sequence in (1, 2):
            stream.send(model, sequence, "", -1)  # fail_value: this execution fails
            with pytest.raises(InferenceServerException, match="the input begins with -1"):
                stream.receive()
            stream.send(model, sequence, "", 10)
            assert stream.receive()["OUTPUT"] == first + sequence + 10, "the failure changed the state"
            stream.send(model, sequence, "s", 3)
            assert stream.receive()["OUTPUT"] == first + 3, "START did not reset the state"
            stream.send(model, sequence, "e", 1)
            assert stream.receive()["OUTPUT"] == first + 4


def test_implicit_state_survives_requested_outputs(server: ServerProcess) -> None:
    wanted = [grpcclient.InferRequestedOutput("OUTPUT")]
    with Caller(server, "grpc") as call:
        assert call("state", 9, "s", 1, outputs=wanted) == {"OUTPUT": 1}
        assert call("state", 9, "e", 1, outputs=wanted) == {"OUTPUT": 2}


def test_iterative_sequences_reschedule_until_they_answer(server: ServerProcess) -> None:
    with Caller(server, "grpc") as call:
        for _ in range(3):  # ids come from the server; slots come back
            got = call("iterative", 0, "", 2)
            assert got["OUTPUT"] == 10 and got["START"] == 0 and got["END"] == 0
        with pytest.raises(
            InferenceServerException, match="Request is released with TRITONSERVER_REQUEST_RELEASE_R"
        ):
            call("not_iterative", 1, "se", 1)
    assert listing(server, "iterative")["slots_used"] == 0
    assert listing(server, "not_iterative")["slots_used"] == 0


def test_an_iterative_sequence_ends_when_its_request_is_cancelled_while_it_executes(
    server: ServerProcess,
) -> None:
    model = "iterative_for_ever"
    for _ in range(2):  # the slot comes back
        with grpcclient.InferenceServerClient(server.grpc) as client:
            call = client.async_infer(model, tensors(grpcclient, 1), lambda result, error: None)
            until(lambda: listing(server, model)["slots_used"] == 1, "it has the slot")
            until(lambda: listing(server, model)["sequences"][0]["executing"] == 1, "it executes")
            call.cancel()
            until(lambda: listing(server, model)["slots_used"] == 0, "its sequence has ended")


def test_list_and_end(server: ServerProcess) -> None:
    with Caller(server, "http") as call:
        call("untyped", 5, "s", 1)
        call("untyped", "5", "s", 1)
        call("untyped", "a b/ü", "s", 1)
        rows = listing(server, "untyped")["sequences"]
        assert [r["id"] for r in rows] == [5, "5", "a b/ü"] and all(r["idle_us"] <= r["age_us"] for r in rows)
        status, answer = rest(server, "POST", "/v2/models/untyped/sequences/5/end")
        assert (status, answer) == (200, {"id": 5, "reason": "evicted", "requests_left": 0})
        assert [r["id"] for r in listing(server, "untyped")["sequences"]] == ["5", "a b/ü"]
        status, answer = rest(server, "POST", "/v2/models/untyped/sequences/5/end")
        assert (status, answer["error"]) == (404, "model 'untyped' has no live sequence with the uint id 5")
        assert rest(server, "POST", "/v2/models/untyped/sequences/5/end?type=string")[0] == 200
        assert rest(server, "POST", "/v2/models/untyped/sequences/a%20b%2F%C3%BC/end")[0] == 200
        assert rest(server, "POST", "/v2/models/untyped/sequences/x/end?type=uint")[0] == 400
        assert rest(server, "GET", "/v2/models/nope/sequences")[0] == 404
        with pytest.raises(InferenceServerException, match="must specify the START flag"):
            call("untyped", 5, "", 1)


def test_command(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    from neptrio import commands

    with Caller(server, "http") as call:
        call("untyped", 77, "s", 1)
        assert commands.run("sequences", ["untyped", "--url", server.http]) == 0
        text = capsys.readouterr().out
        assert text.splitlines()[0].split() == [
            "id",
            "state",
            "instance",
            "slot",
            "age",
            "idle",
            "queued",
            "executing",
        ]
        assert text.splitlines()[1].split()[:2] == ["77", "slot"] and "1 of 4 slots used" in text
        assert commands.run("sequences", ["untyped", "--url", server.http, "--end", "77"]) == 0
        assert capsys.readouterr().out == "ended 77, 0 accepted requests still run\n"
        assert commands.run("sequences", ["untyped", "--url", server.http, "--end", "77"]) == 1
        assert "no live sequence with the uint id 77" in capsys.readouterr().err


PYTHON_MODEL = """
import triton_python_backend_utils as pb
import numpy as np

class TritonPythonModel:
    def initialize(self, args):
        self.sums, self.ended = {}, []

    def on_sequence_end(self, sequence_id, reason):
        self.sums.pop(sequence_id, None)
        self.ended.append(f"{sequence_id!r} {reason}")

    def execute(self, requests):
        out = []
        for r in requests:
            value = pb.get_input_tensor_by_name(r, "INPUT").as_numpy()
            ready = pb.get_input_tensor_by_name(r, "READY").as_numpy().item()
            i = r.correlation_id()
            start = bool(r.flags() & pb.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
            if ready:
                self.sums[i] = (0 if start else self.sums[i]) + int(value.sum())
            out.append(pb.InferenceResponse([
                pb.Tensor("OUTPUT", np.array([[self.sums.get(i, 0)]], np.int32)),
                pb.Tensor("ENDED", np.array([["|".join(self.ended)]], dtype=object)),
                pb.Tensor("SUM_OUT", np.array([[self.sums.get(i, 0)]], np.int32)),
                pb.Tensor("STATE", pb.get_input_tensor_by_name(r, "SUM_IN").as_numpy()),
            ]))
        return out
"""
PYTHON_CONFIG = """
backend: "python" max_batch_size: 2
input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "ENDED" data_type: TYPE_STRING dims: [ 1 ] },
         { name: "STATE" data_type: TYPE_INT32 dims: [ 1 ] } ]
sequence_batching { max_sequence_idle_microseconds: 3600000000 direct { }
  control_input [ { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } ] } ]
  state [ { input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_INT32 dims: [ 1 ] } ] }
"""


@pytest.mark.slow
def test_python_models_hear_of_the_end_and_hold_implicit_state(tmp_path: Path) -> None:
    write_model(tmp_path, "py", PYTHON_CONFIG, {"1/model.py": PYTHON_MODEL})
    hasty = PYTHON_CONFIG.replace(": 3600000000", ": 300000")
    write_model(tmp_path, "hasty", hasty, {"1/model.py": PYTHON_MODEL})
    with ServerProcess(tmp_path) as server, Caller(server, "grpc") as call:
        assert call("py", 1, "s", 5)["OUTPUT"] == 5
        got = call("py", 1, "e", 6)
        assert got["OUTPUT"] == 11 and got["STATE"] == 5 and got["ENDED"] == b""
        call("py", 2, "s", 1)
        assert rest(server, "POST", "/v2/models/py/sequences/2/end")[0] == 200
        assert call("py", 3, "se", 1)["ENDED"] == b"1 ended|2 evicted"
        assert call("hasty", "a", "s", 1)["ENDED"] == b""
        until(lambda: not listing(server, "hasty")["sequences"])
        assert call("hasty", 3, "se", 1)["ENDED"] == b"'a' idle"


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 4 }"])
def test_delay_scheduler_holds_until_enough_wait(tmp_path: Path, strategy: str) -> None:
    import os

    write_model(tmp_path, "held", sequence_config(strategy, 4))
    env = {**os.environ, "TRITONSERVER_DELAY_SCHEDULER": "3"}
    with ServerProcess(tmp_path, env=env) as server, Stream(server) as stream:
        for sequence in (1, 2):
            stream.send("held", sequence, "s", 1)
        until(lambda: sum(r["queued"] for r in listing(server, "held")["sequences"]) == 2)
        stream.send("held", 3, "s", 1)
        assert {stream.receive()["BATCH_SIZE"] for _ in range(3)} == {3}
        stream.send("held", 1, "e", 1)  # once let go, it holds no more
        assert stream.receive()["OUTPUT"] == 2


def test_delay_scheduler_counts_over_all_instances(tmp_path: Path) -> None:
    import os

    config = sequence_config("direct { }", 1, extra="instance_group [ { count: 2 } ]")
    write_model(tmp_path, "held", config)
    env = {**os.environ, "TRITONSERVER_DELAY_SCHEDULER": "2"}
    with ServerProcess(tmp_path, env=env) as server, Stream(server) as stream:
        stream.send("held", 1, "s", 1)
        until(lambda: sum(r["queued"] for r in listing(server, "held")["sequences"]) == 1)
        stream.send("held", 2, "s", 5)
        assert sorted(stream.receive()["OUTPUT"] for _ in range(2)) == [1, 5]


def test_backlog_delay_scheduler(tmp_path: Path) -> None:
    import os

    write_model(tmp_path, "held", sequence_config("direct { }", 1))
    env = {**os.environ, "TRITONSERVER_DELAY_SCHEDULER": "1", "TRITONSERVER_BACKLOG_DELAY_SCHEDULER": "2"}
    with ServerProcess(tmp_path, env=env) as server, Stream(server) as stream:
        stream.send("held", 1, "se", 1)
        stream.send("held", 2, "s", 1)
        until(lambda: listing(server, "held")["backlog_requests"] == 1)
        assert listing(server, "held")["sequences"][0]["queued"] == 1, "the backlog was not waited for"
        stream.send("held", 2, "e", 1)
        assert [stream.receive()["OUTPUT"] for _ in range(3)] == [1, 1, 2]


BAD = [
    ("max_batch_size: 1", 'state [ { input_name: "INPUT" output_name: "S" data_type: TYPE_INT32 dims: [ 1 ] } ]', "also an input of another kind"),
    ("max_batch_size: 1", 'state [ { input_name: "A" output_name: "B" data_type: TYPE_INT32 dims: [ 1 ] initial_state { data_type: TYPE_INT32 dims: [ 1 ] data_file: "none" name: "i" } } ]', "cannot read the initial state 'i'"),
    ("max_batch_size: 1", 'state [ { input_name: "A" output_name: "B" data_type: TYPE_INT32 dims: [ 2 ] initial_state { data_type: TYPE_INT32 dims: [ 3 ] zero_data: true name: "i" } } ]', "which do not fit"),
    ("max_batch_size: 1", 'control_input [ { name: "INPUT" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] } ]', "also an input of another kind"),
    ("max_batch_size: 1", 'control_input [ { name: "X" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }, { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } ] } ]', "is specified for multiple control kinds"),
]  # fmt: skip


def test_bad_configurations_fail_the_load_with_a_reason(tmp_path: Path) -> None:
    for i, (size, batching, _) in enumerate(BAD):
        config = (
            f'backend: "sequence" {size} input [ {{ name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] }} ] '
            f'output [ {{ name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] }} ] sequence_batching {{ {batching} }}'
        )
        write_model(tmp_path, f"bad{i}", config)
    with ServerProcess(tmp_path, "--exit-on-error=false") as server:
        _, index = rest(server, "POST", "/v2/repository/index")
    reasons = {row["name"]: row.get("reason", "") for row in index}
    for i, (_, _, reason) in enumerate(BAD):
        assert reason in reasons[f"bad{i}"]


def test_arrays_stay_separate(server: ServerProcess) -> None:
    """Vectors of different lengths in different sequences do not mix."""
    with Stream(server) as stream:
        for sequence in (1, 2):
            stream.send("oldest", sequence, "s", np.arange(sequence * 3))
            assert stream.receive()["OUTPUT"] == list(range(sequence * 3))
        for sequence in (1, 2):
            stream.send("oldest", sequence, "e", np.arange(sequence * 3))
            assert stream.receive()["OUTPUT"] == [2 * i for i in range(sequence * 3)]


def test_gauges(server: ServerProcess) -> None:
    with Stream(server) as stream:
        stream.send("free", 1, "s", 1)
        stream.receive()
        stream.send("free", 2, "s", 1)
        until(lambda: listing(server, "free")["backlog"] == 1)
        text, labels = scrape(server), {"model": "free", "version": "1"}
        assert value(text, "neptrio_live_sequences", **labels) == 2
        assert value(text, "neptrio_sequence_slots", state="used", **labels) == 1
        assert value(text, "neptrio_sequence_slots", state="free", **labels) == 0
        assert value(text, "neptrio_sequence_backlog", kind="sequences", **labels) == 1
        assert value(text, "neptrio_sequence_backlog", kind="requests", **labels) == 1
        stream.send("free", 1, "e", 1)
        for _ in range(2):
            stream.receive()
