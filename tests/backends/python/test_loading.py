"""Loading models: isolated modules, auto_complete_config, readiness, reload, Python-based backends."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from neptrio import cli
from neptrio.execution.backend import READY_SECONDS
from tests.backends.python.models import HEAD, config, python_model
from tests.backends.python.test_isolated_process import children
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

HELPED = """
import helper
from helper import NUMBER
from . import sibling
from package import part
from package.part import VALUE
import package.deeper as deeper
import of_all_versions

class TritonPythonModel:
    def execute(self, requests):
        import late
        import numpy as np
        parts = [NUMBER, helper.double(NUMBER), sibling.NUMBER, part.VALUE, VALUE, deeper.VALUE, late.NUMBER]
        parts.append(of_all_versions.NUMBER)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(parts, np.float32))]) for _ in requests]
"""

COMPLETING = """
import numpy as np

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        c = auto_complete_model_config
        c.set_max_batch_size(4)
        c.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]})
        c.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]})
        c.set_dynamic_batching()
        c.set_parameter("own", "told")
        c.set_parameter("added", "told")
        return c

    def initialize(self, args):
        import json
        self.config = json.loads(args["model_config"])
        assert args["model_name"] == "completing" and args["model_version"] == "1"
        assert args["model_instance_kind"] == "CPU" and args["model_instance_device_id"] == "0"
        assert args["model_repository"].endswith("/completing")
        self.dtype = pb_utils.triton_string_to_numpy(
            pb_utils.get_output_config_by_name(self.config, "OUT")["data_type"])

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor(
            "OUT", pb_utils.get_input_tensor_by_name(r, "IN").as_numpy().astype(self.dtype) + 1)]) for r in requests]
"""

SHARED = """
import numpy as np

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(c):
        c.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]})
        c.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]})
        return c

    def initialize(self, args):
        import json, os
        parameters = json.loads(args["model_config"])["parameters"]
        self.factor = float(parameters["factor"]["string_value"])

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy() * np.float32(self.factor))])
                for r in requests]
"""

READY = """
import os, time, pathlib

class TritonPythonModel:
    def initialize(self, args):
        self.flag = pathlib.Path(args["model_repository"]) / "flag"

    def is_ready(self):
        return self.flag.read_text() == "yes"

    def execute(self, requests):
        raise RuntimeError("not here")
"""


def infer(server: ServerProcess, model: str, array: np.ndarray) -> Any:
    with httpclient.InferenceServerClient(server.http) as client:
        tensor = httpclient.InferInput("IN", list(array.shape), "FP32")
        tensor.set_data_from_numpy(array)
        return client.infer(model, [tensor]).as_numpy("OUT").tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("isolation", "above"), [("none", "..helper"), ("process", "helper")]
)  # Python itself lets no relative import out of a package on sys.path
def test_helper_modules_of_two_models_do_not_clash(tmp_path: Path, isolation: str, above: str) -> None:
    for name, base in (("one", 1), ("two", 100)):
        python_model(
            tmp_path,
            name,
            HELPED,
            files={
                "1/helper.py": f"import sibling\nNUMBER = {base}\ndef double(n): return 2 * n + sibling.NUMBER * 0",
                "1/sibling.py": f"NUMBER = {base + 1}",
                "1/late.py": f"from helper import NUMBER as N\nNUMBER = N + {base + 2}",
                "1/package/__init__.py": "",
                "of_all_versions.py": f"NUMBER = {base + 5}",
                "1/package/part.py": f"from . import deeper\nfrom {above} import NUMBER\nVALUE = {base + 3}",
                "1/package/deeper.py": f"from helper import NUMBER\nVALUE = NUMBER + {base + 4}",
            },
        )
    with ServerProcess(tmp_path, f"--backend-config=python,isolation={isolation}") as server:
        one = np.zeros(1, np.float32)
        for _ in range(2):
            assert infer(server, "one", one) == [1, 2, 2, 4, 4, 6, 4, 6]
            assert infer(server, "two", one) == [100, 200, 101, 103, 103, 204, 202, 105]
    assert not list(tmp_path.rglob("__pycache__"))


def test_auto_complete_config(tmp_path: Path) -> None:
    own = 'parameters { key: "own" value { string_value: "stated" } }'
    python_model(tmp_path, "completing", COMPLETING, f'backend: "python" {own}')
    with ServerProcess(tmp_path) as server:
        assert infer(server, "completing", np.zeros((1, 3), np.float32)) == [[1, 1, 1]]
        with httpclient.InferenceServerClient(server.http) as client:
            found = client.get_model_config("completing")
            assert found["max_batch_size"] == 4
            assert {key: value["string_value"] for key, value in found["parameters"].items()} == {
                "own": "stated",
                "added": "told",
            }
            assert found["dynamic_batching"]["preferred_batch_size"] == [4]
            assert client.get_model_metadata("completing")["inputs"] == [
                {"name": "IN", "datatype": "FP32", "shape": ["-1", "-1"]}
            ] or client.get_model_metadata("completing")["inputs"] == [
                {"name": "IN", "datatype": "FP32", "shape": [-1, -1]}
            ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "text", "reason"),
    [
        (COMPLETING, config(max_batch_size=8), "specified max_batch_size 4"),
        (
            COMPLETING,
            config(inputs="IN:TYPE_INT8:-1"),
            "configuration expects datatype TYPE_INT8 for input 'IN'",
        ),
        ("class Model: pass", config(), "has no class TritonPythonModel"),
        ("class TritonPythonModel: pass", config(), "has no method execute"),
        ("import no_such_module_here", config(), "No module named 'no_such_module_here'"),
        ("import os\nos._exit(7)", config(), "its process exited with status 7"),
        (
            "class TritonPythonModel:\n    def initialize(self, args):\n        raise ValueError('no weights')\n"
            "    def execute(self, requests): pass",
            config(),
            "ValueError: no weights",
        ),
    ],
)
def test_a_model_that_does_not_load_says_why(tmp_path: Path, code: str, text: str, reason: str) -> None:
    python_model(tmp_path, "completing", code, text)
    with ServerProcess(tmp_path, "--exit-on-error=false") as server:
        with httpclient.InferenceServerClient(server.http) as client:
            (row,) = client.get_model_repository_index()
        assert row["state"] == "UNAVAILABLE"
        assert reason in row["reason"]
        assert not re.search(r"neptrio/backends", row["reason"])
        assert not children(server.process.pid), "processes end with the loads that have failed"


def test_no_model_file(tmp_path: Path) -> None:
    write_model(tmp_path, "empty", config())
    with ServerProcess(tmp_path, "--exit-on-error=false") as server:
        with httpclient.InferenceServerClient(server.http) as client:
            (row,) = client.get_model_repository_index()
        assert "has no file" in row["reason"] and row["reason"].endswith("model.py")


@pytest.mark.slow
def test_reload_takes_new_code_and_finalizes_the_old(tmp_path: Path) -> None:
    code = """
import numpy as np, helper

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full(1, helper.VALUE, np.float32))])]

    def finalize(self):
        pb_utils.Logger.log_warn(f"goodbye from {helper.VALUE}")
"""
    python_model(tmp_path, "changing", code, files={"1/helper.py": "VALUE = 1"})
    with ServerProcess(tmp_path, "--model-control-mode=explicit", "--load-model=changing") as server:
        with httpclient.InferenceServerClient(server.http) as client:
            assert infer(server, "changing", np.zeros(1, np.float32)) == [1]
            (tmp_path / "changing/1/helper.py").write_text("VALUE = 2")
            client.load_model("changing")
            assert infer(server, "changing", np.zeros(1, np.float32)) == [2]
            client.unload_model("changing")
            with pytest.raises(InferenceServerException, match="has no available versions"):
                infer(server, "changing", np.zeros(1, np.float32))
        server.stop()
        server.until_logged("goodbye from 1")
        server.until_logged("goodbye from 2")
        assert re.search(r"model.py:\d+\] goodbye", server.log())


@pytest.mark.slow
def test_python_based_backend(tmp_path: Path) -> None:
    repository, backends = tmp_path / "models", tmp_path / "backends"
    folder = backends / "scale"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(HEAD + SHARED)
    for name, factor in (("twice", 2), ("thrice", 3)):
        parameter = f'parameters {{ key: "factor" value: {{ string_value: "{factor}" }} }}'
        write_model(repository, name, f'backend: "scale" {parameter}')
    with ServerProcess(repository, f"--backend-directory={backends}") as server:
        assert infer(server, "twice", np.ones(2, np.float32)) == [2, 2]
        assert infer(server, "thrice", np.ones(2, np.float32)) == [3, 3]
        with httpclient.InferenceServerClient(server.http) as client:
            assert client.get_model_config("twice")["backend"] == "scale"
            assert client.get_model_metadata("twice")["platform"] == "scale"


def test_an_unknown_backend_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "m", 'backend: "../scale"')
    (tmp_path / "scale").mkdir()
    (tmp_path / "scale/model.py").write_text(HEAD + SHARED)
    (tmp_path / "backends").mkdir()
    flags = ("--exit-on-error=false", f"--backend-directory={tmp_path / 'backends'}")
    with ServerProcess(tmp_path / "models", *flags) as server:
        with httpclient.InferenceServerClient(server.http) as client:
            (row,) = client.get_model_repository_index()
        assert "unable to find backend library for backend '../scale'" in row["reason"]


@pytest.mark.slow
def test_is_ready_is_asked(tmp_path: Path) -> None:
    python_model(tmp_path, "moody", READY)
    flag = tmp_path / "moody/flag"
    flag.write_text("no")
    with ServerProcess(tmp_path, failures="is_ready of model 'moody' failed") as server:
        with (
            httpclient.InferenceServerClient(server.http) as http,
            grpcclient.InferenceServerClient(server.grpc) as grpc,
        ):
            assert not http.is_model_ready("moody") and not grpc.is_model_ready("moody")
            flag.write_text("yes")
            assert http.is_model_ready("moody") and grpc.is_model_ready("moody")
            flag.unlink()
            assert not http.is_model_ready("moody") and not grpc.is_model_ready("moody")


HANGING = """
import pathlib

class TritonPythonModel:
    def initialize(self, args):
        self.folder = pathlib.Path(args["model_repository"])
        self.hangs = True

    def is_ready(self):
        if self.hangs:
            with (self.folder / "pipe").open() as pipe:  # until somebody writes
                pipe.read()
            self.hangs = False
        return True

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["none", "process"])
def test_is_ready_has_a_limit(tmp_path: Path, isolation: str) -> None:
    """A model that hangs in is_ready() is not ready, serves, and takes no thread per question."""
    extra = f'parameters {{ key: "isolation" value: {{ string_value: "{isolation}" }} }}'
    folder = python_model(tmp_path, "hanging", HANGING, config(extra=extra))
    os.mkfifo(folder / "pipe")
    with ServerProcess(tmp_path, "--backend-config=python,is-ready-timeout-seconds=0.02") as server:
        with (
            httpclient.InferenceServerClient(server.http) as http,
            grpcclient.InferenceServerClient(server.grpc) as grpc,
        ):
            for _ in range(25):
                assert not http.is_model_ready("hanging") and not grpc.is_model_ready("hanging")
            assert len(os.listdir(f"/proc/{server.process.pid}/task")) < 25
            assert infer(server, "hanging", np.ones(1, np.float32)) is not None
            with (folder / "pipe").open("w") as pipe:
                pipe.write("go on")
            until(lambda: http.is_model_ready("hanging") and grpc.is_model_ready("hanging"), server.log)


@pytest.mark.slow
def test_the_limit_of_is_ready_is_tritons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert READY_SECONDS == 5
    python_model(tmp_path, "moody", READY)
    flag = "--backend-config=python,is-ready-timeout-seconds=soon"
    with ServerProcess(tmp_path, "--exit-on-error=false", flag) as server:
        with httpclient.InferenceServerClient(server.http) as client:
            (row,) = client.get_model_repository_index()
    assert "is-ready-timeout-seconds must be a number of seconds > 0, got 'soon'" in row["reason"]


@pytest.mark.slow
def test_instances_do_not_share_module_globals(tmp_path: Path) -> None:
    code = """
import numpy as np, threading
count = 0

class TritonPythonModel:
    def initialize(self, args):
        global count
        count += 1

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full(1, count, np.float32))])]
"""
    python_model(tmp_path, "several", code, config(extra="instance_group { count: 3 kind: KIND_CPU }"))
    with ServerProcess(tmp_path) as server:
        assert [infer(server, "several", np.zeros(1, np.float32)) for _ in range(4)] == [[1]] * 4


SAYS = """
import json

class TritonPythonModel:
    def initialize(self, args):
        self.answer = eval(json.loads(args["model_config"])["parameters"]["answer"]["string_value"])

    {ready} is_ready(self):
        return self.answer

    {execute} execute(self, requests):
        raise RuntimeError("not here")
"""


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["none", "process"])
def test_only_true_is_ready(tmp_path: Path, isolation: str) -> None:
    answers = {"yes": "True", "no": "False", "one": "1", "text": "'ready'", "nothing": "None"}
    for name, answer in answers.items():
        extra = f'parameters {{ key: "answer" value: {{ string_value: "{answer}" }} }}'
        for way, ready, execute in (
            ("plain", "def", "def"),
            ("coroutine", "async def", "def"),
            ("loop", "async def", "async def"),
        ):
            code = SAYS.format(ready=ready, execute=execute)
            python_model(tmp_path, f"{name}_{way}", code, config(extra=extra))
    with ServerProcess(tmp_path, f"--backend-config=python,isolation={isolation}") as server:
        with (
            httpclient.InferenceServerClient(server.http) as http,
            grpcclient.InferenceServerClient(server.grpc) as grpc,
        ):
            models = [directory.name for directory in tmp_path.iterdir()]
            for client in (http, grpc):
                assert sorted(filter(client.is_model_ready, models)) == [
                    "yes_coroutine",
                    "yes_loop",
                    "yes_plain",
                ]
        server.until_logged("is_ready() must return a bool, got str")


SLOW = """
import asyncio, pathlib

class TritonPythonModel:
    def initialize(self, args):
        self.folder = pathlib.Path(args["model_repository"])

    def asked(self):
        pb_utils.Logger.log_info("is_ready begins")
        with (self.folder / "pipe").open() as pipe:  # until somebody writes
            return pipe.read() == "yes"
{ways}
"""
PLAIN = """
    def is_ready(self):
        return self.asked()

    def execute(self, requests):
        raise RuntimeError("not here")
"""
ON_LOOP = """
    async def is_ready(self):
        return await asyncio.to_thread(self.asked)

    async def execute(self, requests):
        raise RuntimeError("not here")
"""


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["none", "process"])
@pytest.mark.parametrize("ways", [PLAIN, ON_LOOP])
def test_who_asks_while_an_answer_is_under_way_waits_for_that_one(
    tmp_path: Path, isolation: str, ways: str
) -> None:
    folder = python_model(tmp_path, "slow", SLOW.format(ways=ways))
    os.mkfifo(folder / "pipe")
    flags = (
        f"--backend-config=python,isolation={isolation}",
        "--backend-config=python,is-ready-timeout-seconds=60",
    )
    request = service_pb2.ModelReadyRequest(name="slow")
    with (
        ServerProcess(tmp_path, *flags) as server,
        ThreadPoolExecutor(1) as thread,
        httpclient.InferenceServerClient(server.http, network_timeout=60) as http,
        grpc.insecure_channel(server.grpc) as channel,
    ):
        first = thread.submit(http.is_model_ready, "slow")
        server.until_logged("is_ready begins")
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        others = [stub.ModelReady.future(request) for _ in range(5)]
        for _ in range(3):  # behind them on the same connection: when these are answered, those are waiting
            assert stub.ServerLive(service_pb2.ServerLiveRequest()).live
        with (folder / "pipe").open("w") as pipe:
            pipe.write("yes")
        assert first.result(60) and all(other.result(60).ready for other in others)
        assert server.log().count("is_ready begins") == 1


COMPLETES = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        good = {{"name": "T", "data_type": "TYPE_FP32", "dims": [-1]}}
        config.{call}
        return {returned}

    def execute(self, requests):
        raise RuntimeError("not here")
"""
WHERE = "in auto-complete-config function for model 'm'"
WRONG = {
    'add_input({"data_type": "TYPE_FP32", "dims": [1]})': f"input {WHERE} is missing 'name' property.",
    'add_input({"name": "T", "dims": [1]})': f"input 'T' {WHERE} is missing 'data_type' property.",
    'add_output({"name": "T", "data_type": "TYPE_FP32"})': f"output 'T' {WHERE} is missing 'dims' property.",
    "add_input(dict(good, size=1))": f"input 'T' {WHERE} contains property other than 'name', 'data_type', 'dims', ",
    "add_output(dict(good, optional=True))": f"output 'T' {WHERE} contains property other than 'name', 'data_type', ",
    'add_input(dict(good, data_type="TYPE_FP99"))': f"input 'T' {WHERE} has a 'data_type' property that is no datatype",
    "add_output(dict(good, dims=4))": f"output 'T' {WHERE} has a 'dims' property that is no list of integers: 4",
    "add_input(dict(good, dims=[1.5]))": f"input 'T' {WHERE} has a 'dims' property that is no list of integers: [1.5]",
    "add_input(dict(good, name=3))": f"input '3' {WHERE} has a 'name' property that is no text: 3",
    "add_input(None)": f"input {WHERE} must be a dict, got NoneType",
    'set_model_transaction_policy({"x": 1})': f"model transaction property {WHERE} contains property other than 'decou",
    "set_max_batch_size(True)": f"max_batch_size {WHERE} must be an integer >= 0, got True",
}
NO_CONFIG = "auto_complete_config function in model 'm' must return a valid pb.ModelConfig object, got "


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["none", "process"])
def test_wrong_completions_name_property_tensor_and_model(tmp_path: Path, isolation: str) -> None:
    cases = [(call, "config", f"ValueError: {reason}") for call, reason in WRONG.items()]
    cases += [
        ("add_input(good)", value, NO_CONFIG + kind) for value, kind in (("None", "NoneType"), ("{}", "dict"))
    ]
    flags = ("--model-control-mode=explicit", f"--backend-config=python,isolation={isolation}")
    with ServerProcess(tmp_path, *flags) as server, httpclient.InferenceServerClient(server.http) as client:
        for call, returned, reason in cases:
            python_model(tmp_path, "m", COMPLETES.format(call=call, returned=returned), 'backend: "python"')
            with pytest.raises(InferenceServerException) as failure:
                client.load_model("m")
            assert f"version 1 is at UNAVAILABLE state: Internal: {reason}" in failure.value.message()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runtime", "reason"),
    [
        (
            "../python/libtriton_python.so",
            "must be the name of a file in the folder of backend 'python', not a path",
        ),
        (
            "/lib/libtriton_python.so",
            "must be the name of a file in the folder of backend 'python', not a path",
        ),
        (
            "libnope.so",
            "unable to find backend library 'libnope.so' for model 'm': backend 'python' has 'libtriton_py",
        ),
        ("libtriton_python.so", ""),
    ],
)
def test_a_runtime_that_is_not_the_backends_is_refused(
    tmp_path: Path, runtime: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = "\nclass TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
    python_model(tmp_path, "m", model, config(extra=f'runtime: "{runtime}"'))
    with ServerProcess(tmp_path, "--model-control-mode=explicit") as server:
        with httpclient.InferenceServerClient(server.http) as client:
            if not reason:
                client.load_model("m")
                return
            with pytest.raises(InferenceServerException) as failure:
                client.load_model("m")
    assert "version 1 is at UNAVAILABLE state: Invalid argument: " in failure.value.message()
    assert reason in failure.value.message()
    assert cli.main(["check", str(tmp_path)]) == 1 and reason in capsys.readouterr().out


# each opens its end of a pipe, which waits for the other: only loads that run side by side get past it
MEETS = """
import json, os

def meet(config):
    with open(os.environ["MEETING"], "w" if config["name"] == "one" else "r"):
        pass

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        {complete}
        return config

    def initialize(self, args):
        {initialize}

    def execute(self, requests):
        raise RuntimeError("not here")
"""


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["none", "process"])
@pytest.mark.parametrize("where", ["auto_complete_config", "initialize"])
def test_two_models_load_side_by_side(tmp_path: Path, isolation: str, where: str) -> None:
    code = MEETS.format(
        complete="meet(config.as_dict())" if where == "auto_complete_config" else "pass",
        initialize='meet(json.loads(args["model_config"]))' if where == "initialize" else "pass",
    )
    repository = tmp_path / "models"
    for name in ("one", "two"):
        python_model(repository, name, code)
    os.mkfifo(tmp_path / "pipe")
    flags = (f"--backend-config=python,isolation={isolation}", "--backend-config=python,environment=MEETING")
    environment = dict(os.environ, MEETING=str(tmp_path / "pipe"))
    with ServerProcess(repository, *flags, env=environment) as server:
        with httpclient.InferenceServerClient(server.http) as client:
            assert client.is_model_ready("one") and client.is_model_ready("two")
