"""ONNX Runtime's C library: found, checked, chosen, and given everything back."""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from onnx import helper

from neptrio.backends.onnx import library as onnx_library
from neptrio.backends.onnx import python_session as onnx_python
from neptrio.backends.onnx.api import OrtError
from neptrio.backends.onnx.backend import OnnxBackend
from neptrio.backends.onnx.instance import NativeInstance, OnnxInstance
from neptrio.backends.onnx.options import Options
from neptrio.backends.onnx.session import OnnxSession
from neptrio.errors import InvalidArgument
from neptrio.request.numpy_tensor import from_numpy, to_numpy
from tests.support import onnx_models
from tests.support.onnx_instances import context, execute, instance, request, run
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

ONE = np.ones((1, 4), np.float32)


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the wheel had no C library."""
    onnx_library.unusable.cache_clear()
    monkeypatch.setattr(onnx_library, "find", lambda: None)
    yield
    onnx_library.unusable.cache_clear()


def test_the_installed_library_is_usable() -> None:
    """Its table is what we think it is: everything the server calls is called by the tests beside this
    one, and the version it tells is the package's."""
    assert onnx_library.unusable() == ""
    path = onnx_library.find()
    assert path is not None
    assert onnx_library.load(str(path)) == importlib.metadata.version("onnxruntime")


def test_what_is_said_of_a_model(tmp_path: Path) -> None:
    assert onnx_library.unusable() == ""
    (tmp_path / "model.onnx").write_bytes(onnx_models.scale(("N", None, 4)))
    session = OnnxSession(tmp_path / "model.onnx", Options("m"))
    told = [
        [(t.name, t.type, t.shape) for t in tensors]
        for tensors in (session.get_inputs(), session.get_overridable_initializers(), session.get_outputs())
    ]
    python = onnx_python.open_session(tmp_path / "model.onnx", Options("m"), ["CPUExecutionProvider"])
    assert told == [
        [(t.name, t.type, t.shape) for t in tensors]
        for tensors in (python.get_inputs(), python.get_overridable_initializers(), python.get_outputs())
    ]
    assert told[0] == [("X", "tensor(float)", ["N", None, 4])] and told[1][0][0] == "FACTOR"
    session.close()
    with pytest.raises(RuntimeError, match="closed"):
        session.run(["Y"], [])


@pytest.mark.parametrize("content", [b"this is no model", b"", onnx_models.identity()[:40]])
def test_a_damaged_file_is_told_as_python_tells_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert onnx_library.unusable() == ""
    with pytest.raises(OrtError) as ours:
        OnnxSession(path, Options("m"))
    with pytest.raises(Exception, match="ONNXRuntimeError") as theirs:
        onnx_python.open_session(path, Options("m"), ["CPUExecutionProvider"])
    assert str(ours.value) == str(theirs.value).strip()


OPTIONS = [
    Options("m", level=0, intra_threads=1, inter_threads=2, arena=False, pattern=False, parallel=True),
    Options("m", level=99, arena=True, pattern=True, parallel=False, entries=(("session.set_denormal_as_zero", "1"),)),
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
def test_options(tmp_path: Path, options: Options) -> None:
    assert onnx_library.unusable() == ""
    (tmp_path / "model.onnx").write_bytes(onnx_models.identity())
    for session in (
        OnnxSession(tmp_path / "model.onnx", options),
        onnx_python.open_session(tmp_path / "model.onnx", options, ["CPUExecutionProvider"]),
    ):
        r = request(X=ONE)
        (output,) = session.run(["Y"], r.inputs)
        assert output.tobytes() == ONE.tobytes()
        session.close()


def test_an_option_that_is_refused(tmp_path: Path) -> None:
    """Both interfaces pass configuration entries on, and the session refuses a bad one."""
    config = 'parameters { key: "session.intra_op_thread_affinities" value { string_value: "x" } } max_batch_size: 8'
    said = []
    for api in ("c", "python"):
        with pytest.raises(InvalidArgument, match="cannot load") as caught:
            instance(tmp_path, onnx_models.identity(), config, api)
        said.append(str(caught.value).strip())
    assert said[0].endswith(said[1].partition("model 'm': ")[2]) and "must consist of only digits" in said[0]


def test_the_choice(tmp_path: Path, without_library: None) -> None:
    """Without a usable library models run through Python, unless the configuration insists."""
    plain = instance(tmp_path, onnx_models.identity())
    assert type(plain) is OnnxInstance and isinstance(plain.session, onnx_python.PythonSession)
    (answer,) = execute(plain, request(X=ONE))
    assert answer is not None
    with pytest.raises(InvalidArgument, match="'c', which is not possible: there is no onnxruntime package"):
        instance(tmp_path, onnx_models.identity(), api="c")
    with pytest.raises(
        InvalidArgument, match="'session_api' of model 'm' must be 'c' or 'python', got 'rust'"
    ):
        instance(tmp_path, onnx_models.identity(), api="rust")


def test_a_library_that_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is no library of ONNX Runtime is told and left alone."""
    monkeypatch.setattr(onnx_library, "find", lambda: tmp_path / "libonnxruntime.so.1")
    monkeypatch.setattr(onnx_library, "load", _refuse)
    onnx_library.unusable.cache_clear()
    try:
        assert "libonnxruntime.so.1: it has no OrtGetApiBase" in onnx_library.unusable()
        assert type(instance(tmp_path, onnx_models.identity())) is OnnxInstance
    finally:
        onnx_library.unusable.cache_clear()


def _refuse(path: str) -> str:
    raise onnx_library.Unusable("it has no OrtGetApiBase")


def test_which_batches_need_python(tmp_path: Path) -> None:
    """Plain tensors do not; strings and a layout of the whole batch do, over the C session too."""
    assert type(instance(tmp_path, onnx_models.identity())) is NativeInstance
    strings = instance(tmp_path, onnx_models.identity("BYTES"))
    assert type(strings) is OnnxInstance and isinstance(strings.session, OnnxSession)
    gpu = context(tmp_path, onnx_models.identity(), api="c")
    with pytest.raises(InvalidArgument, match="another provider than the CPU's"):
        OnnxBackend(gpu).create_instance("m_0_0", "GPU", 0)


@pytest.mark.parametrize("api", ["c", "python"])
def test_ragged_batches(tmp_path: Path, api: str) -> None:
    """The layout of a batch is the same over either session."""
    content = onnx_models.model(
        [
            helper.make_node("Reshape", ["E", "column"], ["C"]),
            helper.make_node("Reshape", ["X", "column"], ["Y"]),
        ],
        [onnx_models.tensor("X", "FP32", ["N"]), onnx_models.tensor("E", "INT32", ["M"])],
        [onnx_models.tensor("C", "INT32", ["M", 1]), onnx_models.tensor("Y", "FP32", ["N", 1])],
        [helper.make_tensor("column", onnx_models.TYPES["INT64"], [2], [-1, 1])],
    )
    backend = instance(
        tmp_path,
        content,
        """max_batch_size: 8
        input { name: "X" data_type: TYPE_FP32 dims: [-1] allow_ragged_batch: true }
        output [ { name: "C" data_type: TYPE_INT32 dims: [1] }, { name: "Y" data_type: TYPE_FP32 dims: [-1] } ]
        batch_input { kind: BATCH_ELEMENT_COUNT target_name: "E" data_type: TYPE_INT32 source_input: "X" }
        batch_output { target_name: "Y" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "X" }""",
        api,
    )
    arrays = [np.ones((1, 2), np.float32), np.zeros((1, 5), np.float32)]
    answers = execute(backend, *(request(X=a) for a in arrays))
    for a, answer in zip(arrays, answers, strict=True):
        assert answer is not None
        np.testing.assert_array_equal(answer["Y"], a)
        np.testing.assert_array_equal(answer["C"], [[a.size]])


def test_where_batches_run(tmp_path: Path) -> None:
    """On the instance's thread until executions of the same shapes were measured to take less than 20 us."""
    backend: Any = instance(tmp_path, onnx_models.identity("FP32", ("N", None)), api="c")
    small, large = np.ones((1, 4), np.float32), np.ones((1, 1 << 22), np.float32)
    for x in (small, large):
        assert run(backend, request(X=x)).off_loop
        (mean,) = [t for key, t in backend.builder.statistics().items() if key[0] == x.shape]
        assert run(backend, request(X=x)).off_loop == (mean > 20000)
    assert mean > 20000  # 16 MiB were moved
    assert run(backend, request(X=small), request(X=small)).off_loop  # rows of two: not measured yet
    foreign = context(tmp_path, onnx_models.identity(), api="c")
    foreign.config.model_operations.op_library_filename.append("some.so")  # may call Python
    flushing = context(tmp_path, onnx_models.identity(), api="c")
    flushing.config.parameters["session.set_denormal_as_zero"].string_value = "1"  # only on that thread
    for bound in (foreign, flushing):
        made: Any = OnnxBackend(bound).create_instance("m_0_0", "CPU", 0)
        made.builder.use(backend.session, ["Y"], [])
        for _ in range(3):
            assert run(made, request(X=small)).off_loop


def resident() -> int:
    """Bytes of memory in use by this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def allocated() -> int:
    """Bytes that malloc() has given and not got back."""
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


def grown(measure: Callable[[], int], work: Callable[[], None], most: int) -> int:
    """By how many bytes `work` lets the process grow. Other tests may have left something to a thread of this process,
    such as imports, which grows once; a leak grows every time. So only what is seen three times counts."""
    rounds = 3
    while True:
        before = measure()
        work()
        found = measure() - before
        rounds -= 1
        if found < most or not rounds:
            return found


@pytest.mark.slow
def test_executions_leave_nothing(tmp_path: Path) -> None:
    """Answers, gathered batches and inputs handed through: 1 MiB is 100 bytes for each."""
    content = onnx_models.model(
        [helper.make_node("Neg", ["X"], ["Y"])],
        [onnx_models.tensor("X", "FP32", ["N", 64])],
        [onnx_models.tensor("Y", "FP32", ["N", 64]), onnx_models.tensor("X", "FP32", ["N", 64])],
    )
    backend = instance(tmp_path, content, api="c")
    x = np.ones((1, 64), np.float32)

    def work(count: int) -> None:
        for _ in range(count):
            execute(backend, request(X=x), request(X=x))
            execute(backend, request(["Y"], X=x))

    work(500)
    assert grown(resident, lambda: work(5000), 1 << 20) < 1 << 20
    backend.finalize()


@pytest.mark.slow
def test_failures_leave_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """10,000 statuses that are not released would hold 5 MB. What is in use varies by half of one."""
    caplog.set_level(logging.CRITICAL, logger="neptrio")  # pytest would keep every message
    content = onnx_models.model(
        [helper.make_node("Reshape", ["X", "COUNT"], ["Y"])],
        [onnx_models.tensor("X", "FP32", [None]), onnx_models.tensor("COUNT", "INT64", [2])],
        [onnx_models.tensor("Y", "FP32", [None, None])],
    )
    backend = instance(tmp_path, content, "", "c")
    bad = request(X=np.zeros(64, np.float32), COUNT=np.array([7, 8]))

    def work(count: int) -> None:
        for _ in range(count):
            assert run(backend, bad).error is not None

    work(500)
    assert grown(allocated, lambda: work(10000), 2 << 20) < 2 << 20
    backend.finalize()


@pytest.mark.slow
@pytest.mark.parametrize("api", ["c", "python"])
def test_nothing_is_reported_to_anybody(tmp_path: Path, api: str) -> None:
    """ONNX Runtime's telemetry begins with a database in the user's home."""
    content = onnx_models.model(
        [helper.make_node("Neg", ["X"], ["Y"])],
        [onnx_models.tensor("X", "FP32", [None])],
        [onnx_models.tensor("Y", "FP32", [None])],
    )
    (tmp_path / "model.onnx").write_bytes(content)
    code = (
        "import sys\nfrom neptrio.backends.onnx import library\n"
        "if sys.argv[1] == 'c': assert library.unusable() == ''\n"
        "library.module().InferenceSession(sys.argv[2], providers=['CPUExecutionProvider'])\n"
    )
    home = tmp_path / "home"
    home.mkdir()
    environment = {
        k: v for k, v in os.environ.items() if k not in ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")
    }
    subprocess.run(
        [sys.executable, "-c", code, api, str(tmp_path / "model.onnx")],
        env={**environment, "HOME": str(home)},
        check=True,
    )
    assert list(home.rglob("*")) == []


def held() -> tuple[int, int]:
    """Open descriptors and threads."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.slow
def test_sessions_that_come_and_go(tmp_path: Path) -> None:
    """200 loads and unloads leave no descriptor and no thread, and little memory."""
    config = 'max_batch_size: 8 parameters { key: "intra_op_thread_count" value { string_value: "3" } }'

    def cycle() -> None:
        backend = instance(tmp_path, onnx_models.identity(), config, "c")
        execute(backend, request(X=ONE))
        backend.finalize()

    for _ in range(20):
        cycle()
    gc.collect()  # sessions of other tests
    before, memory = held(), resident()
    for _ in range(200):
        cycle()
    gc.collect()
    # a thread that was joined may be listed for a moment; what other tests have left may end meanwhile
    until(
        lambda: all(now <= then for now, then in zip(held(), before, strict=True)), lambda: (before, held())
    )
    assert resident() - memory < 8 << 20


def test_sessions_on_many_threads(tmp_path: Path) -> None:
    """Instances share nothing but the environment."""
    wrong: list[Any] = []

    def work(number: int) -> None:
        backend = instance(tmp_path / str(number), onnx_models.add_sub(("N", 8)), api="c")
        for k in range(100):
            a = np.full((1, 8), number * 1000 + k, np.int32)
            (answer,) = execute(backend, request(A=a, B=a))
            if answer is None or not np.array_equal(answer["SUM"], 2 * a):
                wrong.append(answer)
        backend.finalize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert wrong == []


def test_a_plain_model_needs_no_python_module(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The process that serves it has the C library and not the module; a damaged model prints nothing
    on standard output, where ONNX Runtime's Python module puts a banner."""
    write_model(tmp_path, "plain", "", {"1/model.onnx": onnx_models.add_sub()})
    (tmp_path / "plain" / "config.pbtxt").unlink()
    write_model(tmp_path, "strings", "", {"1/model.onnx": onnx_models.identity("BYTES")})
    write_model(tmp_path, "damaged", 'backend: "onnxruntime"', {"1/model.onnx": b"this is no model"})
    with ServerProcess(tmp_path, "--exit-on-error=false") as server:
        a = np.arange(16, dtype=np.int32).reshape(1, 16)
        inputs = [grpcclient.InferInput(name, [1, 16], "INT32") for name in ("A", "B")]
        for tensor in inputs:
            tensor.set_data_from_numpy(a)
        with grpcclient.InferenceServerClient(server.grpc) as client:
            np.testing.assert_array_equal(client.infer("plain", inputs).as_numpy("SUM"), 2 * a)
        with httpclient.InferenceServerClient(server.http) as client:
            reasons = {row["name"]: row.get("reason", "") for row in client.get_model_repository_index()}
            assert "not an ONNX model, or a damaged one" in reasons["damaged"]
            statistics = client.get_inference_statistics("plain")["model_stats"][0]
        assert statistics["inference_stats"]["compute_infer"]["ns"] > 0
        maps = Path(f"/proc/{server.process.pid}/maps").read_text()
        assert "libonnxruntime.so" in maps and "onnxruntime_pybind11_state" not in maps
    assert capfd.readouterr().out == ""


def test_a_bound_run_asks_for_no_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ONNX Runtime's Python does before such a run takes several times as long as the run."""
    made = context(tmp_path, onnx_models.add_sub(), "")
    session = onnx_python.open_session(
        tmp_path / "1" / "model.onnx", Options(made.name), ["CPUExecutionProvider"]
    )
    monkeypatch.setattr(session._session, "run_with_iobinding", None, raising=False)
    arrays = {name: np.full((2, 16), i, np.int32) for name, i in (("A", 5), ("B", 7))}
    tensors = [from_numpy(name, array) for name, array in arrays.items()]
    found = session.run_bound(["DIFF", "SUM"], tensors, lambda: None, 0, set())
    assert [(t.name, set(to_numpy(t).ravel().tolist())) for t in found] == [("DIFF", {-2}), ("SUM", {12})]


# ---------------------------------------------------------------- packages


def test_two_packages_of_onnx_runtime_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They install the same files, so what is there is a mixture, or all of the one that came last."""
    onnx_library.doubled.cache_clear()
    installed = {"onnxruntime": ("1.31.1", Path("/a"))}

    def distribution(name: str) -> Any:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        version, folder = installed[name]
        return SimpleNamespace(version=version, locate_file=folder.joinpath)

    monkeypatch.setattr(onnx_library.metadata, "distribution", distribution)
    with caplog.at_level(logging.WARNING, "neptrio.onnx"):
        assert onnx_library.doubled() == "" and not caplog.records
        onnx_library.doubled.cache_clear()
        # of two folders of the path the first counts, as in an environment that sees the system's packages
        installed["onnxruntime-gpu"] = ("1.30.0", Path("/b"))
        assert onnx_library.doubled() == "" and not caplog.records
        onnx_library.doubled.cache_clear()
        installed["onnxruntime-gpu"] = ("1.30.0", Path("/a"))
        said = onnx_library.doubled()
    onnx_library.doubled.cache_clear()
    assert said.startswith("onnxruntime 1.31.1 and onnxruntime-gpu 1.30.0 are both installed")
    assert [record.getMessage() for record in caplog.records] == [said]


@pytest.mark.slow
def test_without_onnx_runtime_a_load_says_what_to_install(tmp_path: Path) -> None:
    """An installation without the extra serves its other models."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'onnxruntime':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
    )
    write_model(
        tmp_path / "models",
        "scale",
        'backend: "onnxruntime" max_batch_size: 8',
        {"1/model.onnx": onnx_models.scale(("N", 4))},
    )
    write_model(tmp_path / "models", "other", identity_config())
    path = os.pathsep.join(p for p in (str(tmp_path / "hidden"), os.environ.get("PYTHONPATH", "")) if p)
    with ServerProcess(
        tmp_path / "models", "--exit-on-error=false", env=os.environ | {"PYTHONPATH": path}
    ) as server:
        assert (
            "ONNX models need ONNX Runtime: pip install 'onnxruntime<2,>=1.20', or for GPUs: pip install 'onnxruntime-gpu["
            in server.log()
        )
        with httpclient.InferenceServerClient(server.http) as client:
            assert client.is_model_ready("other") and not client.is_model_ready("scale")
