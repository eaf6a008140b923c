"""What may be changed over the network: --read-only, file overrides, check, trace files, and who is told."""

from __future__ import annotations

import base64
import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from neptrio import startup
from neptrio.flags import Restriction
from neptrio.settings import Settings
from tests.support.control import CONFIG, load, post, refused
from tests.support.http import Http1
from tests.support.infer_messages import IDENTITY_JSON
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

SEQUENCES = identity_config(extra="sequence_batching { max_sequence_idle_microseconds: 60000000 direct { } }")
FILES = {"file:1/model.py": base64.b64encode(b"").decode(), "config": json.dumps(CONFIG)}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "simple", identity_config())
    write_model(folder, "sequences", SEQUENCES)
    return folder


@pytest.fixture(scope="module")
def read_only(repository: Path) -> Iterator[ServerProcess]:
    with ServerProcess(
        repository,
        "--read-only",
        "--model-control-mode=explicit",
        "--load-model=*",
        "--allow-client-shm=true",
    ) as server:
        yield server


CHANGES: list[tuple[str, Any]] = [
    ("/v2/repository/models/simple/load", {}),
    ("/v2/repository/models/simple/unload", {}),
    ("/v2/repository/models/simple/check", {}),
    ("/v2/logging", {"log_verbose_level": 1}),
    ("/v2/trace/setting", {"trace_rate": "5"}),
    ("/v2/models/simple/trace/setting", {"trace_rate": "5"}),
    ("/v2/models/sequences/sequences/1/end", {}),
    ("/v2/systemsharedmemory/region/a/register", {"key": "/a", "offset": 0, "byte_size": 1}),
    ("/v2/systemsharedmemory/region/a/unregister", {}),
    ("/v2/cudasharedmemory/region/a/register", {"raw_handle": {"b64": ""}, "device_id": 0, "byte_size": 1}),
    ("/v2/cudasharedmemory/region/a/unregister", {}),
]


@pytest.mark.parametrize(("path", "body"), CHANGES, ids=[path for path, _ in CHANGES])
def test_a_read_only_server_changes_nothing_over_rest(
    read_only: ServerProcess, path: str, body: dict[str, Any]
) -> None:
    with Http1(read_only.http) as client:
        reply = client.request("POST", path, json.dumps(body).encode())
        assert "--read-only" in refused(reply, 403)
        assert client.request("GET", "/v2/models/simple/ready").status == 200
        assert json.loads(client.request("GET", "/v2/logging").body)["log_verbose_level"] == 0
        assert json.loads(client.request("GET", "/v2/trace/setting").body)["trace_rate"] == "1000"
        assert client.request("GET", "/v2/models/sequences/sequences").status == 200


def test_a_read_only_server_changes_nothing_over_grpc(read_only: ServerProcess) -> None:
    client = triton_grpc.InferenceServerClient(read_only.grpc)
    for call in (
        lambda: client.load_model("simple"),
        lambda: client.unload_model("simple"),
        lambda: client.update_log_settings({"log_verbose_level": 1}),
        lambda: client.update_trace_settings(None, {"trace_rate": "5"}),
        lambda: client.register_system_shared_memory("a", "/a", 1),
        lambda: client.unregister_system_shared_memory(),
        lambda: client.register_cuda_shared_memory("a", b"", 0, 1),
        lambda: client.unregister_cuda_shared_memory(),
    ):
        with pytest.raises(InferenceServerException, match="--read-only") as error:
            call()
        assert error.value.status() == "StatusCode.PERMISSION_DENIED"
    assert client.get_log_settings(as_json=True)["settings"]["log_verbose_level"]["uint32_param"] == 0
    assert client.get_trace_settings(as_json=True)["settings"]["trace_rate"]["value"] == ["1000"]
    assert client.get_system_shared_memory_status(as_json=True) == {}
    client.close()


def test_check_needs_repository_control(repository: Path) -> None:
    with ServerProcess(repository, "--allow-trace-file-update=false") as server:
        assert "explicit" in refused(post(server, "models/simple/check"), 503)
        # and where that is forbidden nobody chooses where traces are written
        with Http1(server.http) as client:
            reply = client.request("POST", "/v2/trace/setting", b'{"trace_file": "t.json"}')
        assert "--allow-trace-file-update=false" in refused(reply, 501)


@pytest.mark.slow
def test_files_in_load_calls_are_taken_on_loopback_alone(repository: Path) -> None:
    explicit = ("--model-control-mode=explicit", "--load-model=simple")
    for flags, rest, grpc in (
        ((), True, True),
        (
            ("--grpc-address=0.0.0.0",),
            True,
            False,
        ),  # by the listener that a call comes by, whatever others there are
        (("--http-address=0.0.0.0",), False, True),
        (("--frontends=2", "--grpc-address=0.0.0.0"), True, False),
        (("--allow-file-override=false",), False, False),
        (("--http-address=0.0.0.0", "--grpc-address=0.0.0.0", "--allow-file-override=true"), True, True),
    ):
        with ServerProcess(repository, *explicit, *flags) as server:
            for verb in ("check", "load"):
                reply = post(server, f"models/brought/{verb}", {"parameters": FILES})
                if rest:
                    assert reply.status == 200, (flags, reply.body)
                else:
                    assert "--allow-file-override" in refused(reply, 403)
            with triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc.rsplit(':')[-1]}") as client:
                files = {"file:1/model.py": b""}
                if grpc:
                    client.load_model("brought", config=json.dumps(CONFIG), files=files)
                else:
                    with pytest.raises(InferenceServerException, match="--allow-file-override") as error:
                        client.load_model("brought", config=json.dumps(CONFIG), files=files)
                    assert error.value.status() == "StatusCode.PERMISSION_DENIED"
            assert load(server, "simple", config=json.dumps(CONFIG)).status == 200
            assert not server.log().count("Traceback")


@pytest.mark.slow
def test_a_configuration_over_the_network_brings_no_code(repository: Path) -> None:
    """What decides which code runs is taken from the model's own configuration."""
    own = {"string_value": "A=1"}
    write_model(
        repository,
        "own",
        identity_config(extra='parameters { key: "ENVIRONMENT" value { string_value: "A=1" } }'),
    )
    code = (
        {"model_operations": {"op_library_filename": ["/tmp/evil.so"]}},
        {"parameters": {"EXECUTION_ENV_PATH": {"string_value": "/tmp/evil"}}},
        {"parameters": {"ENVIRONMENT": {"string_value": "LD_PRELOAD=/tmp/evil.so"}}},
        {"parameters": {"compile_options": {"string_value": "-Dfloat=evil"}}},
        {"parameters": {"compiled": {"string_value": "true"}}},
        {"parameters": {"TRITON_BATCH_STRATEGY_PATH": {"string_value": "/tmp/evil.so"}}},
        {"runtime": "libevil.so"},
    )
    explicit = ("--model-control-mode=explicit", "--load-model=own")
    with ServerProcess(repository, *explicit, "--http-address=0.0.0.0") as server:
        for brought in code:
            for verb in ("load", "check"):
                config = json.dumps({**CONFIG, **brought})
                reply = post(server, f"models/own/{verb}", {"parameters": {"config": config}})
                assert "decides what code runs" in refused(reply, 403), (brought, verb)
        for verb in ("load", "check"):
            reply = post(server, f"models/own/{verb}", {"parameters": {"config": json.dumps(CONFIG)}})
            assert "ENVIRONMENT confines the model's code" in refused(reply, 403), verb
        kept = json.dumps({**CONFIG, "parameters": {"ENVIRONMENT": own}})
        assert load(server, "own", config=kept).status == 200
    with ServerProcess(repository, *explicit) as server:
        config = json.dumps({**CONFIG, **code[2]})
        assert load(server, "own", config=config).status == 200


def test_an_open_server_says_so_at_start(repository: Path) -> None:
    with ServerProcess(repository, "--grpc-address=0.0.0.0") as server:
        server.until_logged("whoever can reach 0.0.0.0:0 may use the control verbs of trace, logging:")
    with ServerProcess(repository) as server:
        assert "whoever can reach" not in server.log()


def test_who_is_told_what_is_open() -> None:
    closed = (Restriction(("trace", "logging"), "h", "v"),)
    told = startup.open_controls
    assert "trace, logging:" in told(Settings())
    assert "model-repository, trace, logging:" in told(Settings(model_control_mode="explicit"))
    assert "shared-memory" in told(Settings(allow_client_shm=True))
    assert told(Settings(http_restricted_api=closed))  # gRPC is open still
    assert not told(Settings(http_restricted_api=closed, grpc_restricted_protocol=closed))
    assert not told(Settings(http_restricted_api=closed, allow_grpc=False))
    assert not told(Settings(read_only=True))
    assert not told(Settings(http_address="127.0.0.1", grpc_address="localhost"))
    assert "[" not in told(Settings(http_address="::1", grpc_address="10.0.0.1"))


def test_files_with_tensors_are_their_owners_alone(repository: Path, tmp_path: Path) -> None:
    from neptrio import commands

    trace = tmp_path / "trace.json"
    with ServerProcess(
        repository,
        "--trace-config=level=TENSORS",
        "--trace-config=rate=1",
        f"--trace-config=triton,file={trace}",
    ) as server:
        with Http1(server.http) as client:
            assert client.request("POST", "/v2/models/simple/infer", IDENTITY_JSON).status == 200
    assert stat.S_IMODE(trace.stat().st_mode) == 0o600
    for action in ("view", "export"):
        output = tmp_path / action
        assert commands.run("trace", [action, str(trace), "-o", str(output)]) == 0
        assert stat.S_IMODE(output.stat().st_mode) == 0o600
