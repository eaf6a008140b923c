"""triton_python_backend_utils has the names of a Triton server's, and checks arguments as that does (2.51)."""

from __future__ import annotations

import json
import struct
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient

import c_python_backend_utils as compiled
import triton_python_backend_utils as pb_utils
from tests.backends.python.models import ISOLATION, config, python_model
from tests.support.metrics import scrape
from tests.support.server import ServerProcess

# what dir() shows in a model of tritonserver 2.51
NAMES = """
InferenceRequest InferenceResponse Logger MetricFamily ModelConfig PreferredMemory TRITONSERVER_MEMORY_CPU
TRITONSERVER_MEMORY_GPU TRITONSERVER_REQUEST_FLAG_SEQUENCE_END TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
TRITONSERVER_REQUEST_RELEASE_ALL TRITONSERVER_REQUEST_RELEASE_RESCHEDULE TRITONSERVER_RESPONSE_COMPLETE_FINAL
TRITON_STRING_TO_NUMPY Tensor TritonError TritonModelException deserialize_bytes_tensor get_input_config_by_name
get_input_tensor_by_name get_model_dir get_output_config_by_name get_output_tensor_by_name is_model_ready json load_model np
numpy_to_triton_type serialize_byte_tensor struct triton_string_to_numpy triton_to_numpy_type unload_model
using_decoupled_model_transaction_policy
"""
COMPILED_NAMES = """
COUNTER GAUGE HISTOGRAM InferenceRequest InferenceResponse InferenceResponseSender InferenceTrace Logger MemoryType Metric
MetricFamily MetricKind PreferredMemory ResponseIterator SharedMemory TRITONSERVER_MEMORY_CPU TRITONSERVER_MEMORY_GPU Tensor
TritonError TritonModelException async_event_future_done_callback is_model_ready load_model shared_memory unload_model
"""
METHODS = {
    "InferenceRequest": "async_exec correlation_id exec flags get_response_sender inputs is_cancelled parameters request_id "
    "requested_output_names set_flags set_release_flags timeout trace",
    "InferenceResponse": "error has_error output_tensors",
    "InferenceResponseSender": "is_cancelled send",
    "InferenceTrace": "get_context",
    "Logger": "ERROR INFO LogLevel VERBOSE WARNING log log_error log_info log_verbose log_warn",
    "MemoryType": "TRITONSERVER_MEMORY_CPU TRITONSERVER_MEMORY_GPU __members__",
    "Metric": "increment observe set value",
    "MetricFamily": "COUNTER GAUGE HISTOGRAM Metric",
    "MetricKind": "COUNTER GAUGE HISTOGRAM __members__",
    "ModelConfig": "add_input add_output as_dict set_dynamic_batching set_max_batch_size set_model_transaction_policy",
    "ResponseIterator": "__iter__ __next__",
    "SharedMemory": "free_memory",
    "Tensor": "__dlpack__ as_numpy from_dlpack is_cpu name shape to_dlpack triton_dtype",
    "TritonError": "ALREADY_EXISTS CANCELLED INTERNAL INVALID_ARG NOT_FOUND UNAVAILABLE UNKNOWN UNSUPPORTED code message",
}


def test_every_public_name_is_there() -> None:
    assert [name for name in NAMES.split() if not hasattr(pb_utils, name)] == []
    assert [name for name in COMPILED_NAMES.split() if not hasattr(compiled, name)] == []
    for owner, names in METHODS.items():
        found = getattr(pb_utils, owner, None) or getattr(compiled, owner)
        assert [name for name in names.split() if name not in dir(found) and not hasattr(found, name)] == []
    both = [name for name in NAMES.split() if name in COMPILED_NAMES.split()]
    assert [name for name in both if getattr(pb_utils, name) is not getattr(compiled, name)] == []


def test_a_star_import_brings_them_all() -> None:
    names: dict[str, Any] = {}
    exec("from triton_python_backend_utils import *", names)
    assert [name for name in NAMES.split() if name not in names] == []
    exec("from c_python_backend_utils import *", names)
    assert [name for name in COMPILED_NAMES.split() if name not in names] == []


def test_what_the_names_are() -> None:
    assert pb_utils.np is np and pb_utils.json is json and pb_utils.struct is struct
    assert pb_utils.TRITON_STRING_TO_NUMPY["TYPE_FP16"] is np.float16
    assert pb_utils.TRITON_STRING_TO_NUMPY["TYPE_STRING"] is np.object_
    assert [level.name for level in pb_utils.Logger.LogLevel] == ["INFO", "WARNING", "ERROR", "VERBOSE"]
    assert pb_utils.Logger.INFO is pb_utils.Logger.LogLevel.INFO
    assert pb_utils.TritonError("x").code() is pb_utils.TritonError.INTERNAL
    assert pb_utils.MetricFamily.HISTOGRAM is compiled.HISTOGRAM
    assert pb_utils.TRITONSERVER_MEMORY_GPU is compiled.MemoryType.TRITONSERVER_MEMORY_GPU


ONE = np.ones(1, np.float32)


def tensor(name: Any = "A") -> pb_utils.Tensor:
    return pb_utils.Tensor(name, ONE)


def request(**given: Any) -> pb_utils.InferenceRequest:
    return pb_utils.InferenceRequest(
        **{"model_name": "m", "inputs": [], "requested_output_names": [], **given}
    )


def family(kind: Any) -> pb_utils.MetricFamily:
    return pb_utils.MetricFamily("utilities", "what a test counts", kind)


COUNTER, HISTOGRAM = pb_utils.MetricFamily.COUNTER, pb_utils.MetricFamily.HISTOGRAM
WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: tensor(3), "name of Tensor must be a str, got int"),
    (lambda: pb_utils.Tensor("A", [1.0]), "content of Tensor 'A' must be a numpy array .*, got list"),  # type: ignore[arg-type]
    (lambda: pb_utils.Tensor("A", np.float32(1)), "numpy array .*, got float32"),  # type: ignore[arg-type]
    (lambda: pb_utils.Tensor.from_dlpack(3, ONE), "name of Tensor.from_dlpack.* must be a str, got int"),  # type: ignore[arg-type]
    (lambda: pb_utils.InferenceResponse([3]), "output_tensors of InferenceResponse must be .*, got int"),  # type: ignore[list-item]
    (lambda: pb_utils.InferenceResponse(tensor()), "must be a list of Tensor objects, got Tensor"),  # type: ignore[arg-type]
    (lambda: pb_utils.InferenceResponse(None), "must be a list of Tensor objects, got NoneType"),  # type: ignore[arg-type]
    (lambda: pb_utils.InferenceResponse([], error="text"), "must be a TritonError, got str"),  # type: ignore[arg-type]
    (lambda: pb_utils.InferenceResponse([], error=ValueError()), "must be a TritonError, got ValueError"),  # type: ignore[arg-type]
    (lambda: pb_utils.TritonError(), "message"),  # type: ignore[call-arg]
    (lambda: pb_utils.TritonError(3), "message of TritonError must be a str, got int"),  # type: ignore[arg-type]
    (lambda: pb_utils.TritonError("x", 3), "must be one of TritonError.UNKNOWN, .*, got int"),  # type: ignore[arg-type]
    (lambda: request(model_name=3), "model_name of InferenceRequest must be a str, got int"),
    (lambda: request(request_id=3), "request_id of InferenceRequest must be a str, got int"),
    (lambda: request(inputs=[3]), "inputs of InferenceRequest must be .*, got int"),
    (lambda: request(requested_output_names="AB"), "must be a list of str, got str"),
    (
        lambda: request(requested_output_names=[3]),
        "a name in requested_output_names .* must be a str, got int",
    ),
    (lambda: request(model_version="1"), "model_version of InferenceRequest must be an int, got str"),
    (lambda: request(model_version=1.0), "model_version of InferenceRequest must be an int, got float"),
    (lambda: request(timeout=1.5), "timeout of InferenceRequest must be an int, got float"),
    (
        lambda: request(timeout=-1),
        "timeout of InferenceRequest must be an int from 0 to 18446744073709551615, got -1",
    ),
    (lambda: request(flags=-1), "flags of InferenceRequest must be an int from 0 to 4294967295, got -1"),
    (
        lambda: request(correlation_id=None),
        "correlation_id of InferenceRequest must be an int or a str, got NoneType",
    ),
    (lambda: request(trace="x"), "trace of InferenceRequest must be an InferenceTrace, got str"),
    (lambda: request(preferred_memory=0), "must be a PreferredMemory, got int"),
    (lambda: request().set_flags("x"), "flags of set_flags.* must be an int, got str"),  # type: ignore[arg-type]
    (lambda: request().set_release_flags("x"), "flags of set_release_flags.* must be an int, got str"),  # type: ignore[arg-type]
    (lambda: pb_utils.PreferredMemory(0), "must be one of pb_utils.TRITONSERVER_MEMORY_CPU, .*, got int"),  # type: ignore[arg-type]
    (lambda: pb_utils.PreferredMemory(), "preferred_memory_type"),  # type: ignore[call-arg]
    (lambda: pb_utils.MetricFamily(3, "d", COUNTER), "name of MetricFamily must be a str, got int"),  # type: ignore[arg-type]
    (lambda: family(0), "must be one of MetricFamily.COUNTER, .*, got int"),
    (lambda: family(COUNTER).Metric().increment("3"), "value of increment.* must be a number, got str"),  # type: ignore[arg-type]
    (lambda: family(COUNTER).Metric(labels=3), "labels of Metric.* must be a dict, got int"),  # type: ignore[arg-type]
    (lambda: family(HISTOGRAM).Metric(buckets="12"), "must be a list of numbers, got str"),  # type: ignore[arg-type]
    (lambda: pb_utils.Logger.log("x", 0), "must be one of Logger.INFO, .*, got int"),  # type: ignore[arg-type]
    (lambda: pb_utils.Logger.log_info(3), "message of Logger must be a str, got int"),  # type: ignore[arg-type]
    (lambda: pb_utils.load_model(3), "model_name of load_model.* must be a str, got int"),  # type: ignore[arg-type]
    (lambda: pb_utils.load_model("m", {}), "config of load_model.* must be a str, got dict"),  # type: ignore[arg-type]
    (lambda: pb_utils.load_model("m", "", {"f": "x"}), "content in load_model.* must be bytes, got str"),  # type: ignore[dict-item]
    (lambda: pb_utils.is_model_ready(3), "model_name of is_model_ready.* must be a str, got int"),  # type: ignore[arg-type]
    (lambda: pb_utils.is_model_ready("m", 1), "model_version of is_model_ready.* must be a str, got int"),  # type: ignore[arg-type]
    (lambda: pb_utils.unload_model(3), "model_name of unload_model.* must be a str, got int"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "reason"), WRONG)
def test_a_wrong_argument_is_a_type_error_that_names_it(call: Callable[[], Any], reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        call()


@pytest.mark.parametrize("given", [1.5, b"5", -1, 1 << 64])
def test_a_correlation_id_is_an_integer_or_a_text(given: Any) -> None:
    with pytest.raises(pb_utils.TritonModelException, match="Correlation ID must be integer or string"):
        request(correlation_id=given)


@pytest.mark.parametrize(
    "make", [str, np.str_, np.bytes_, lambda t: t.encode(), lambda t: bytearray(t.encode())]
)
def test_names_are_texts_of_any_kind(make: Callable[[str], Any]) -> None:
    def plain(value: Any, expected: str) -> bool:
        return type(value) is str and value == expected

    made = tensor(make("A"))
    assert plain(made.name(), "A")
    assert plain(pb_utils.Tensor.from_dlpack(make("A"), ONE).name(), "A")
    response = pb_utils.InferenceResponse([made])
    assert pb_utils.get_output_tensor_by_name(response, make("A")) is made
    asked = request(
        inputs=[made], requested_output_names=[make("O")], model_name=make("m"), request_id=make("7")
    )
    assert pb_utils.get_input_tensor_by_name(asked, make("A")) is made
    assert list(asked.requested_output_names()) == ["O"] and plain(
        next(iter(asked.requested_output_names())), "O"
    )
    assert plain(asked.model_name(), "m") and plain(asked.request_id(), "7")
    rows = {"input": [{"name": "A"}], "output": [{"name": "A"}]}
    assert pb_utils.get_input_config_by_name(rows, make("A")) == {"name": "A"}
    assert pb_utils.get_output_config_by_name(rows, make("A")) == {"name": "A"}
    assert pb_utils.triton_string_to_numpy(make("TYPE_FP32")) is np.float32
    assert plain(pb_utils.TritonError(make("why")).message(), "why")
    counter = pb_utils.MetricFamily(make("utilities"), make("d"), COUNTER).Metric(labels={"a": make("b")})
    counter.increment(np.float32(2))
    assert counter.value() == 2


def test_empty_buckets() -> None:
    family(HISTOGRAM).Metric(buckets=[]).observe(3)
    with pytest.raises(pb_utils.TritonModelException, match="buckets"):
        family(COUNTER).Metric(buckets=[])


def test_a_trace_is_always_an_object() -> None:
    trace = request().trace()
    assert type(trace) is pb_utils.InferenceTrace and trace.get_context() is None
    assert request(trace=trace).trace() is trace


def test_a_capsule_holds_its_tensor() -> None:
    made = tensor()
    seen = weakref.ref(made)
    capsule = made.to_dlpack()
    del made
    assert seen() is not None
    assert np.array_equal(pb_utils.Tensor.from_dlpack("A", capsule).as_numpy(), ONE)
    del capsule
    assert seen() is None


# ---------------------------------------------------------------- in a model

SEES = """
import json
import numpy as np
import c_python_backend_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        TritonPythonModel.completed_in = pb_utils.get_model_dir()
        config.add_output({"name": "COMPLETED", "data_type": "TYPE_STRING", "dims": [-1]})
        assert pb_utils.get_model_dir().endswith("/1")
        return config

    def initialize(self, args):
        self.initialized_in = pb_utils.get_model_dir()

    def execute(self, requests):
        (r,) = requests
        names = {"r": r, "self": self, "pb_utils": pb_utils, "np": np, "c": c_python_backend_utils}
        exec(json.loads(r.parameters())["code"], names)
        return [pb_utils.InferenceResponse([pb_utils.Tensor(b"OUT", np.array([json.dumps(names["x"])], np.object_))])]
"""
COUNTS = """
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            sender = r.get_response_sender()
            for i in range(3):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full(1, i, np.float32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
SPARE = """
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(1, np.float32))]) for _ in requests]
"""
HOMES = ("none", "process")
CALL = (
    "i = pb_utils.InferenceRequest(model_name=b'counts', requested_output_names=[b'OUT'], "
    "inputs=[pb_utils.Tensor(b'IN', np.ones(1, np.float32))]).exec(decoupled=True)\n"
    "def seen(): return [float(t.as_numpy()[0]) for a in i for t in a.output_tensors()]\n"
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("repository")


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServerProcess]:
    for home in HOMES:
        python_model(repository, home, SEES, config(outputs="OUT:TYPE_STRING:-1") + ISOLATION.format(home))
    python_model(repository, "counts", COUNTS, config(extra="model_transaction_policy { decoupled: true }"))
    python_model(repository, "spare", SPARE)
    loads = [f"--load-model={name}" for name in (*HOMES, "counts")]
    with ServerProcess(
        repository, "--model-control-mode=explicit", "--allow-file-override=true", *loads
    ) as process:
        yield process


def sees(server: ServerProcess, home: str, code: str) -> Any:
    """What `x` is in the model after `code`."""
    with httpclient.InferenceServerClient(server.http, network_timeout=60) as client:
        given = httpclient.InferInput("IN", [1], "FP32")
        given.set_data_from_numpy(ONE)
        wanted = [httpclient.InferRequestedOutput("OUT")]
        result = client.infer(home, [given], outputs=wanted, parameters={"code": code})
        return json.loads(result.as_numpy("OUT")[0])


@pytest.mark.parametrize("home", HOMES)
def test_get_model_dir_is_the_versions_folder(server: ServerProcess, repository: Path, home: str) -> None:
    code = "x = [self.initialized_in, pb_utils.get_model_dir()]"
    assert sees(server, home, code) == [str(repository / home / "1")] * 2


@pytest.mark.parametrize("home", HOMES)
def test_an_untraced_request_has_a_trace(server: ServerProcess, home: str) -> None:
    assert sees(server, home, "x = [r.trace().get_context(), type(r.trace()) is c.InferenceTrace]") == [
        None,
        True,
    ]


@pytest.mark.parametrize("home", HOMES)
def test_an_answer_of_a_decoupled_model_can_be_iterated_again(server: ServerProcess, home: str) -> None:
    assert sees(server, home, CALL + "x = [seen(), seen(), [*i] == [*i]]") == [[0, 1, 2], [0, 1, 2], True]
    begun = CALL + "first = next(i)\nx = [seen(), seen(), next(i, None) is None]"
    assert sees(server, home, begun) == [[1, 2], [0, 1, 2], True]


@pytest.mark.parametrize("home", HOMES)
def test_load_model_takes_the_configuration_second(server: ServerProcess, home: str) -> None:
    configured = json.dumps(
        {
            "backend": "python",
            "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [1]}],
            "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [1]}],
        }
    )
    code = "import triton_python_backend_utils as pb_utils\n" + SPARE
    call = f"pb_utils.load_model(b'spare', {configured!r}, {{b'file:1/model.py': {code.encode()!r}}})\n"
    assert sees(server, home, call + "x = pb_utils.is_model_ready(np.str_('spare'), '')") is True
    with httpclient.InferenceServerClient(server.http) as client:
        assert [row["name"] for row in client.get_model_metadata("spare")["inputs"]] == ["X"]
        assert (
            sees(server, home, "pb_utils.unload_model(b'spare')\nx = pb_utils.is_model_ready('spare')")
            is False
        )


@pytest.mark.parametrize("home", HOMES)
def test_a_histogram_without_buckets(server: ServerProcess, home: str) -> None:
    made = f"f = pb_utils.MetricFamily('no_buckets_{home}', 'd', pb_utils.MetricFamily.HISTOGRAM)\n"
    code = made + "m = f.Metric(labels={'a': 'b'}, buckets=[])\nm.observe(3)\nself.kept = f, m\nx = 1"
    assert sees(server, home, code) == 1
    assert f'no_buckets_{home}_bucket{{a="b",le="+Inf"}} 1' in scrape(server)
