"""Sequences of Python models: the end hook, rescheduling, states of any shape, warm-up."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.sequences.models import Stream, listing, rest, tensors
from tests.support.latch import Latch
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

# Writes what it hears of into a file of its folder; value 1 waits until the latch `open` is opened, value 7 is
# answered, and then no thread of the process runs until the latch `held` is opened.
MODEL = """
import asyncio, ctypes, json, os, pathlib
import triton_python_backend_utils as pb

class TritonPythonModel:
    def initialize(self, args):
        self.folder = args["model_repository"]

    def note(self, text):
        with open(os.path.join(self.folder, "notes"), "a") as file:
            file.write(text + "\\n")

    def hold(self):
        file = os.open(os.path.join(self.folder, "held"), os.O_RDONLY)
        ctypes.PyDLL(None).read(file, ctypes.create_string_buffer(1), 1)

    ASYNC def on_sequence_end(self, sequence_id, reason):
        self.note(f"{sequence_id!r} {reason}")
        if sequence_id == 13:
            raise ValueError("thirteen")

    def finalize(self):
        self.note("finalized")

    ASYNC def execute(self, requests):
        out = []
        for request in requests:
            value = pb.get_input_tensor_by_name(request, "INPUT").as_numpy()
            if value.flat[0] == 1:
                READ
            if value.flat[0] == 7:
                asyncio.get_running_loop().call_soon(self.hold)
            out.append(pb.InferenceResponse([pb.Tensor("OUTPUT", value)]))
        return out
"""
CONFIG = """
backend: "python" max_batch_size: 1
input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
sequence_batching { max_sequence_idle_microseconds: 3600000000 oldest { max_candidate_sequences: 4 } }
"""
HOOK = "    async def on_sequence_end(self, sequence_id, reason):\n"
ISOLATION = {
    isolated: f'parameters {{ key: "isolation" value: {{ string_value: "{value}" }} }}'
    for isolated, value in {False: "none", True: "process"}.items()
}
in_both_places = pytest.mark.parametrize("isolated", ISOLATION, ids=["in-process", "isolated"])
in_both_kinds = pytest.mark.parametrize("kind", ["sync", "async"])


def of_kind(model: str, kind: str) -> str:
    code = model.replace("ASYNC ", "" if kind == "sync" else "async ")
    read = 'pathlib.Path(self.folder, "open").read_bytes'
    return code.replace("READ", f"{read}()" if kind == "sync" else f"await asyncio.to_thread({read})")


def told(notes: Path) -> list[str]:
    return notes.read_text().splitlines() if notes.exists() else []


@pytest.mark.slow
@in_both_places
@in_both_kinds
def test_every_reason_of_an_end(tmp_path: Path, kind: str, isolated: bool) -> None:
    write_model(tmp_path, "m", CONFIG + ISOLATION[isolated], {"1/model.py": of_kind(MODEL, kind)})
    notes = tmp_path / "m" / "notes"
    expected: list[str] = []

    def heard(line: str) -> None:
        expected.append(line)
        until(lambda: told(notes) == expected, lambda: told(notes))

    with (
        Latch(tmp_path / "m" / "open") as latch,
        ServerProcess(tmp_path, "--model-control-mode=explicit", "--load-model=m") as server,
    ):
        with grpcclient.InferenceServerClient(server.grpc) as client, Stream(server) as stream:
            stream.send("m", 2, "se", 5)
            stream.receive()
            heard("2 ended")
            stream.send("m", "x", "s", 5)
            stream.receive()
            assert rest(server, "POST", "/v2/models/m/sequences/x/end")[0] == 200
            heard("'x' evicted")
            # a failing hook is logged and disturbs nobody
            stream.send("m", 13, "se", 5)
            stream.receive()
            heard("13 ended")
            server.until_logged("sequence end hook of m")
            server.until_logged("thirteen")
            # cancelled while its predecessor runs: the sequence ends when that has run
            stream.send("m", 3, "s", 1)
            until(lambda: [r["executing"] for r in listing(server, "m")["sequences"]] == [1])
            call = client.async_infer("m", tensors(grpcclient, 5), lambda result, error: None, sequence_id=3)
            until(lambda: [r["queued"] for r in listing(server, "m")["sequences"]] == [1])
            call.cancel()
            until(lambda: [r["queued"] for r in listing(server, "m")["sequences"]] == [0])
            assert notes.read_text().splitlines() == expected, "told of the end while a request runs"
            latch.open()
            assert stream.receive()["OUTPUT"] == 1
            heard("3 cancelled")
            stream.send("m", 4, "s", 5)
            stream.receive()
        assert rest(server, "POST", "/v2/repository/models/m/unload", {})[0] == 200
        expected.append("4 unloaded")
        heard("finalized")


@pytest.mark.slow
@in_both_places
@in_both_kinds
def test_every_end_at_an_unload_is_told_before_finalize(tmp_path: Path, kind: str, isolated: bool) -> None:
    """Also when there are more of them than the ring to a model's process takes at once, and the process has not taken
    those yet: what comes over its socket must not overtake them."""
    count = 600
    config = CONFIG.replace("max_candidate_sequences: 4", f"max_candidate_sequences: {count}")
    code = of_kind(MODEL, kind)
    if (
        kind == "async"
    ):  # hooks that take some turns of the loop: whoever does not wait for all of them is too early
        code = code.replace(HOOK, HOOK + "        for _ in range(100): await asyncio.sleep(0)\n")
        assert code.count("asyncio.sleep(0)") == 1
    write_model(tmp_path, "m", config + ISOLATION[isolated], {"1/model.py": code})
    notes = tmp_path / "m" / "notes"
    with (
        Latch(tmp_path / "m" / "held") as held,
        ServerProcess(tmp_path, "--model-control-mode=explicit", "--load-model=m") as server,
    ):
        with Stream(server) as stream:
            for id in range(count):
                stream.send("m", 100 + id, "s", 5)
            for _ in range(count):
                stream.receive()
            if isolated and kind == "async":  # others take finalize where they take the rest anyway
                stream.send("m", 100, "", 7)
                stream.receive()
        assert rest(server, "POST", "/v2/repository/models/m/unload", {})[0] == 200
        assert rest(server, "GET", "/v2/health/live")[0] == 200  # another pass: it has told of all ends
        held.open()
        until(lambda: "finalized" in told(notes), lambda: told(notes))
        assert told(notes) == [*(f"{100 + id} unloaded" for id in range(count)), "finalized"]


# has answered while it still executes
EARLY = """
import asyncio, os, pathlib
import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def initialize(self, args):
        self.folder = args["model_repository"]

    def note(self, text):
        with open(os.path.join(self.folder, "notes"), "a") as file:
            file.write(text + "\\n")

    ASYNC def on_sequence_end(self, sequence_id, reason):
        self.note(f"{sequence_id!r} {reason}")

    def finalize(self):
        self.note("finalized")

    ASYNC def execute(self, requests):
        for request in requests:
            made = pb.InferenceResponse([pb.Tensor("OUTPUT", np.array([[5]], np.int32))])
            request.get_response_sender().send(made, flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        READ
        self.note("executed")
"""


@pytest.mark.slow
@in_both_places
@in_both_kinds
def test_an_unload_waits_for_executions_that_have_answered(tmp_path: Path, kind: str, isolated: bool) -> None:
    models = {"decoupled": "model_transaction_policy { decoupled: true }", "plain": ""}
    for name, extra in models.items():
        config = CONFIG + ISOLATION[isolated] + extra
        write_model(tmp_path, name, config, {"1/model.py": of_kind(EARLY, kind)})
    flags = ("--model-control-mode=explicit", "--load-model=*")
    with ServerProcess(tmp_path, *flags) as server:
        for name in models:
            _unload_beside_an_execution(server, name, tmp_path / name)


def _unload_beside_an_execution(server: ServerProcess, name: str, folder: Path) -> None:
    notes = folder / "notes"
    with Latch(folder / "open") as latch:
        with Stream(server) as stream:
            stream.send(name, 4, "s", 5)
            assert stream.receive()["OUTPUT"] == 5
        assert rest(server, "POST", f"/v2/repository/models/{name}/unload", {})[0] == 200
        assert rest(server, "GET", "/v2/health/live")[0] == 200  # another pass
        assert told(notes) == []
        latch.open()
        until(lambda: "finalized" in told(notes), lambda: told(notes))
        assert told(notes) == ["executed", "4 unloaded", "finalized"]


ITERATIVE = """
import pathlib
import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def initialize(self, args):
        self.folder = args["model_repository"]

    def execute(self, requests):
        out = []
        for request in requests:
            want = int(pb.get_input_tensor_by_name(request, "INPUT").as_numpy().flat[0])
            done = int(pb.get_input_tensor_by_name(request, "DONE").as_numpy().flat[0])
            start = int(pb.get_input_tensor_by_name(request, "START").as_numpy().flat[0])
            assert start == (done == 0 and request.flags() & 1), (start, done, request.flags())
            if want == 1:
                pathlib.Path(self.folder, "open").read_bytes()
            out.append(None)
            if done + 1 < max(want, 2):
                request.set_release_flags(pb.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            else:
                out[-1] = pb.InferenceResponse([pb.Tensor("OUTPUT", np.array([[done + 1]], np.int32))])
        return out
"""
ITERATIVE_CONFIG = """
backend: "python" max_batch_size: 4
input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
sequence_batching { max_sequence_idle_microseconds: 200000 iterative_sequence: true
  oldest { max_candidate_sequences: 4 }
  control_input [ { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] } ] }
"""


@pytest.mark.slow
@in_both_places
def test_iterative_sequences_of_python_models(tmp_path: Path, isolated: bool) -> None:
    """The model counts its own rounds by START, is rescheduled, and is forgotten when it idles too long."""
    code = ITERATIVE.replace(
        'done = int(pb.get_input_tensor_by_name(request, "DONE").as_numpy().flat[0])',
        "done = self.rounds[request.correlation_id()] = "
        "0 if request.flags() & 1 else self.rounds[request.correlation_id()] + 1",
    ).replace("def initialize(self, args):\n", "def initialize(self, args):\n        self.rounds = {}\n")
    config = ITERATIVE_CONFIG + ISOLATION[isolated]
    write_model(tmp_path, "patient", config.replace(": 200000", ": 3600000000"), {"1/model.py": code})
    write_model(tmp_path, "m", config.replace(": 200000", ": 1000000"), {"1/model.py": code})
    with Latch(tmp_path / "m" / "open") as latch, ServerProcess(tmp_path) as server, Stream(server) as stream:
        wanted = [5, 2, 30, 3, 4, 2]  # more than there are slots
        for value in wanted:
            stream.send("patient", 0, "", value)
        assert [stream.receive()["OUTPUT"] for _ in wanted] == wanted
        assert listing(server, "patient")["slots_used"] == 0
        stream.send("m", 77, "s", 1)  # its execution lasts for longer than the idle time
        until(lambda: [r["state"] for r in listing(server, "m")["sequences"]] == ["ending"])
        latch.open()
        with pytest.raises(InferenceServerException) as info:
            stream.receive()
        assert info.value.message() == (
            "inference request for sequence 77 to model 'm' must specify the START flag on the first request of "
            "the sequence"
        )
        assert listing(server, "m")["slots_used"] == 0

        def counted() -> bool:
            """Whether it began anew and counted its rounds; a slow machine may let it idle once more between two."""
            stream.send("m", 77, "s", 3)
            try:
                return bool(stream.receive()["OUTPUT"] == 3)
            except InferenceServerException as error:
                assert error.message() == info.value.message()
                return False

        until(counted)


COUNTDOWN = """
import gc
import numpy as np
import triton_python_backend_utils as pb
from triton_python_backend_utils._process.ring_child import RingChild

def kept():
    return sum(len(thing.open_ids) for thing in gc.get_objects() if isinstance(thing, RingChild))

class TritonPythonModel:
    def initialize(self, args):
        self.left = {}

    def execute(self, requests):
        for request in requests:
            id = request.correlation_id()
            if request.flags() & 1:
                self.left[id] = int(pb.get_input_tensor_by_name(request, "INPUT").as_numpy().flat[0])
            left = self.left[id] = self.left[id] - 1
            value = left if left >= 0 else -kept()
            response = pb.InferenceResponse([pb.Tensor("OUTPUT", np.array([[value]], np.int32))])
            if left >= 0:
                request.set_release_flags(pb.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            final = 0 if left >= 0 else pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            request.get_response_sender().send(response, flags=final)
"""


@pytest.mark.slow
@in_both_places
def test_a_decoupled_model_sends_in_each_execution(tmp_path: Path, isolated: bool) -> None:
    config = ITERATIVE_CONFIG + ISOLATION[isolated] + "model_transaction_policy { decoupled: true }"
    write_model(tmp_path, "m", config.replace(": 200000", ": 3600000000"), {"1/model.py": COUNTDOWN})
    with ServerProcess(tmp_path) as server, Stream(server) as stream:
        for begun in (5, 1, 20):
            stream.send("m", 0, "", begun)
            found = [stream.receive()["OUTPUT"] for _ in range(begun + 1)]
            assert found[:-1] == list(range(begun - 1, -1, -1))
            assert found[-1] == (-1 if isolated else 0), (
                "its process keeps nothing of executions that are over"
            )


GROWING = """
import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        out = []
        for request in requests:
            value = pb.get_input_tensor_by_name(request, "INPUT").as_numpy()
            past = pb.get_input_tensor_by_name(request, "PAST").as_numpy()
            now = np.concatenate([past, value], axis=-1)
            if value.flat[0] == -1:
                out.append(pb.InferenceResponse(error=pb.TritonError("minus one")))
                continue
            tensors = [pb.Tensor("OUTPUT", now)]
            if value.flat[0] == -2:
                now = now[..., None]
            if value.flat[0] != -3:
                tensors.append(pb.Tensor("PRESENT", now))
            out.append(pb.InferenceResponse(tensors))
        return out
"""


def growing(size: int, initial: str) -> str:
    return f"""
backend: "python" max_batch_size: {size}
input [ {{ name: "INPUT" data_type: TYPE_INT32 dims: [ -1 ] }} ]
output [ {{ name: "OUTPUT" data_type: TYPE_INT32 dims: [ -1 ] }} ]
sequence_batching {{ max_sequence_idle_microseconds: 3600000000 oldest {{ max_candidate_sequences: 4 }}
  state [ {{ input_name: "PAST" output_name: "PRESENT" data_type: TYPE_INT32 dims: [ -1 ] {initial} }} ] }}
"""


def state_model(size: int, same_buffer: bool, from_file: bool) -> str:
    return f"state_{size}_{'same' if same_buffer else 'own'}_{'file' if from_file else 'zeros'}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The models whose tests disturb nobody."""
    repository = tmp_path_factory.mktemp("python")
    for size, same_buffer, from_file in itertools.product([0, 4], [False, True], [False, True]):
        initial = "use_same_buffer_for_input_output: true " if same_buffer else ""
        if from_file:
            initial += 'initial_state { data_type: TYPE_INT32 dims: [ 2 ] data_file: "two" name: "two" }'
        files = {"1/model.py": GROWING, "initial_state/two": np.array([7, 8], np.int32).tobytes()}
        write_model(repository, state_model(size, same_buffer, from_file), growing(size, initial), files)
    for corrid, _, again in WARMED:
        files = {"1/model.py": WARM, "initial_state/seven": (7).to_bytes(4, "little")}
        write_model(repository, f"warm_{corrid}", warm(corrid, again), files)
    with ServerProcess(repository) as process:
        yield process


@pytest.mark.parametrize("size", [0, 4])
@pytest.mark.parametrize("same_buffer", [False, True])
@pytest.mark.parametrize("from_file", [False, True])
def test_states_of_variable_shape(
    server: ServerProcess, size: int, same_buffer: bool, from_file: bool
) -> None:
    """The state grows with every request; zeros of 1 element, or a file of 2, stand at its beginning."""
    first = [7, 8] if from_file else [0]
    model = state_model(size, same_buffer, from_file)
    with Stream(server) as stream:

        def send(sequence: int, text: str, value: Any) -> Any:
            stream.send(model, sequence, text, value, size > 0)
            return stream.receive()["OUTPUT"]

        for sequence in (1, 2):
            assert send(sequence, "s", sequence) == [*first, sequence]
        past = {sequence: [*first, sequence] for sequence in (1, 2)}
        for values in ([5], [6, 7, 8], [9]):
            for sequence in (1, 2):
                past[sequence] = past[sequence] + values
                assert send(sequence, "", values) == past[sequence]
        with pytest.raises(InferenceServerException, match="minus one"):
            send(1, "", -1)
        with pytest.raises(InferenceServerException, match="the sequence keeps its previous state"):
            send(1, "", -2)
        assert send(1, "", -3) == [*past[1], -3], "a failure changed the state"
        assert send(1, "", 4) == [*past[1], 4], "a response without the state changed it"
        assert send(1, "s", 3) == [*first, 3]
        assert send(2, "e", 3) == [*past[2], 3]


WARM = """
import json
import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def initialize(self, args):
        self.seen, self.ended = [], []

    def on_sequence_end(self, sequence_id, reason):
        self.ended.append(sequence_id)

    def execute(self, requests):
        out, batch = [], []
        for request in requests:
            names = ("INPUT", "PAST", "START", "END", "READY", "CORRID")
            found = {n: pb.get_input_tensor_by_name(request, n).as_numpy() for n in names}
            assert all(len(a.shape) == 2 for a in found.values())
            id = found["CORRID"].flat[0]
            row = [found[n].flat[0].item() for n in names[:-1]]
            batch.append([*row, id.decode() if isinstance(id, bytes) else int(id)])
            if request.request_id().startswith("again"):
                request.set_release_flags(pb.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                out.append(None)
            else:
                text = json.dumps([self.seen, self.ended]).encode()
                out.append(pb.InferenceResponse([
                    pb.Tensor("OUTPUT", np.array([[text]], dtype=object)),
                    pb.Tensor("PRESENT", found["PAST"] + 100)]))
        self.seen.append(batch)
        return out
"""


def warm(corrid: str, again: bool) -> str:
    flags = ",".join(
        f'{{ name: "{n}" control [ {{ kind: CONTROL_SEQUENCE_{n} int32_false_true: [ 0, 1 ] }} ] }}'
        for n in ("START", "END", "READY")
    )
    given = (
        'inputs { key: "START" value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } } '
        'inputs { key: "PAST" value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } } '
    )
    sample = 'inputs { key: "INPUT" value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } } '
    samples = f'{{ name: "made" batch_size: 2 {sample} }}, {{ name: "given" batch_size: 1 {sample} {given} }}'
    if again:
        samples += f', {{ name: "again" batch_size: 1 {sample} }}'
    return f"""
backend: "python" max_batch_size: 2
input [ {{ name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "OUTPUT" data_type: TYPE_STRING dims: [ 1 ] }} ]
sequence_batching {{ max_sequence_idle_microseconds: 3600000000 {"iterative_sequence: true" if again else ""} direct {{ }}
  control_input [ {flags}, {{ name: "CORRID" control [ {{ kind: CONTROL_SEQUENCE_CORRID data_type: {corrid} }} ] }} ]
  state [ {{ input_name: "PAST" output_name: "PRESENT" data_type: TYPE_INT32 dims: [ 1 ]
            initial_state {{ data_type: TYPE_INT32 dims: [ 1 ] data_file: "seven" name: "seven" }} }} ] }}
model_warmup [ {samples} ]
"""


WARMED = [("TYPE_UINT64", [1, 2], False), ("TYPE_STRING", ["1", "2"], False), ("TYPE_INT32", [1, 2], True)]


@pytest.mark.parametrize(("corrid", "ids", "again"), WARMED)
def test_warm_up_samples_are_sequences(
    server: ServerProcess, corrid: str, ids: list[Any], again: bool
) -> None:
    """What a sample does not give is made: START, END, READY, an id per place, the initial state."""
    model = f"warm_{corrid}"
    with Stream(server) as stream:
        assert listing(server, model)["slots_used"] == listing(server, model)["null_requests"] == 0
        stream.send(model, ids[0], "s", 5)
        seen, ended = json.loads(stream.receive()["OUTPUT"])
        assert seen[0] == [[0, 7, 1, 1, 1, ids[0]], [0, 7, 1, 1, 1, ids[1]]]
        assert seen[1] == [[0, 0, 0, 1, 1, ids[0]]], "what the sample gives counts"
        assert seen[2:] == ([[[0, 7, 1, 1, 1, ids[0]]]] if again else [])
        assert ended == []
        if not again:
            stream.send(model, ids[0], "e", 6)
            seen, _ = json.loads(stream.receive()["OUTPUT"])
            assert seen[2] == [[5, 7, 1, 0, 1, ids[0]]], "the warm-up left something behind"


BOTH = """
import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        out = []
        for request in requests:
            how = int(pb.get_input_tensor_by_name(request, "INPUT").as_numpy().flat[0])
            response = pb.InferenceResponse([pb.Tensor("OUTPUT", np.array([[how]], np.int32))])
            out.append(None)
            if how == 1:
                request.set_release_flags(pb.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                out[-1] = response
            elif how == 2:
                sender = request.get_response_sender()
                request.set_release_flags(pb.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                sender.send(response, flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            else:
                out[-1] = response
        return out
"""


@pytest.mark.slow
@in_both_places
def test_a_request_that_is_answered_is_not_executed_again(tmp_path: Path, isolated: bool) -> None:
    """One that got a response and is to be executed again fails; one whose final response was sent is done."""
    config = ITERATIVE_CONFIG.replace(": 200000", ": 3600000000") + ISOLATION[isolated]
    write_model(tmp_path, "m", config, {"1/model.py": BOTH})
    with ServerProcess(tmp_path) as server, Stream(server) as stream:
        stream.send("m", 0, "", 1)
        with pytest.raises(
            InferenceServerException,
            match="Expected a None object in the execute function return list for reschduled request, found type "
            "'InferenceResponse'",
        ):
            stream.receive()
        stream.send("m", 0, "", 2)
        assert stream.receive()["OUTPUT"] == 2
        stream.send("m", 0, "", 3)
        assert stream.receive()["OUTPUT"] == 3
        until(lambda: listing(server, "m")["slots_used"] == 0)
        with httpclient.InferenceServerClient(server.http) as client:
            (row,) = client.get_inference_statistics("m")["model_stats"]
        assert row["execution_count"] == 3
