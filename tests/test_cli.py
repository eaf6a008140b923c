"""The command line: forms of flags, defaults, refusals that help."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient

from neptrio import cli, commands, flags, serving
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

REPOSITORY = "--model-repository=models"
TRITONSERVER = """
    id exit-timeout-secs exit-on-error strict-readiness disable-auto-complete-config strict-model-config
    model-repository model-store model-control-mode repository-poll-secs load-model model-load-thread-count
    model-load-retry-count model-load-gpu-limit model-namespacing model-config-name enable-peer-access
    allow-http http-address http-port reuse-http-port http-thread-count http-max-input-size
    http-header-forward-pattern http-restricted-api
    allow-grpc grpc-address grpc-port reuse-grpc-port grpc-header-forward-pattern grpc-infer-thread-count
    grpc-infer-allocation-pool-size grpc-max-response-pool-size grpc-use-ssl grpc-use-ssl-mutual
    grpc-server-cert grpc-server-key grpc-root-cert grpc-infer-response-compression-level
    grpc-keepalive-time grpc-keepalive-timeout grpc-keepalive-permit-without-calls
    grpc-http2-max-pings-without-data grpc-http2-min-recv-ping-interval-without-data
    grpc-http2-max-ping-strikes grpc-max-connection-age grpc-max-connection-age-grace grpc-restricted-protocol
    allow-metrics allow-gpu-metrics allow-cpu-metrics metrics-address metrics-port metrics-interval-ms
    metrics-config trace-config trace-file trace-level trace-rate trace-count trace-log-frequency
    log-verbose log-info log-warning log-error log-format log-file
    cache-config cache-directory response-cache-byte-size rate-limit rate-limit-resource
    pinned-memory-pool-byte-size cuda-memory-pool-byte-size cuda-virtual-address-size
    min-supported-compute-capability buffer-manager-thread-count allow-client-shm host-policy backend-config
    backend-directory repoagent-directory
    allow-sagemaker sagemaker-port sagemaker-safe-port-range sagemaker-thread-count
    allow-vertex-ai vertex-ai-port vertex-ai-thread-count vertex-ai-default-model
"""


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as info:
        serving.settings_of([REPOSITORY, *argv])
    assert info.value.code == 2
    return capsys.readouterr().err


def test_defaults_are_tritonservers() -> None:
    settings, warnings = serving.settings_of([REPOSITORY])
    assert warnings == []
    assert settings.id == "triton"
    assert settings.model_repository == (Path("models"),)
    assert (settings.http_port, settings.grpc_port) == (8000, 8001)
    assert settings.exit_timeout_secs == 30
    assert settings.strict_readiness and settings.exit_on_error and not settings.disable_auto_complete_config
    assert settings.http_max_input_size == 64 << 20
    assert settings.model_load_thread_count == 4
    assert not settings.reuse_http_port and not settings.reuse_grpc_port


def test_both_value_forms_and_repeated_flags() -> None:
    settings, _ = serving.settings_of(
        [
            "--model-store",
            "a",
            "--model-repository=b",
            "--http-port",
            "9000",
            "--grpc-port=9001",
            "--model-control-mode=explicit",
            "--load-model=x",
            "--load-model",
            "y",
        ]
    )
    assert settings.model_repository == (Path("a"), Path("b"))
    assert (settings.http_port, settings.grpc_port) == (9000, 9001)
    assert settings.load_model == ("x", "y")


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("1", True), ("on", True), ("False", False), ("0", False), ("OFF", False)],
)
def test_boolean_spellings(text: str, value: bool) -> None:
    assert serving.settings_of([REPOSITORY, f"--strict-readiness={text}"])[0].strict_readiness is value
    assert serving.settings_of([REPOSITORY, "--strict-readiness", text])[0].strict_readiness is value


def test_auto_complete_switches() -> None:
    assert serving.settings_of([REPOSITORY, "--disable-auto-complete-config"])[0].disable_auto_complete_config
    settings, warnings = serving.settings_of([REPOSITORY, "--strict-model-config=true"])
    assert settings.disable_auto_complete_config and "deprecated" in warnings[0]


def test_backend_config() -> None:
    settings, _ = serving.settings_of(
        [
            REPOSITORY,
            "--backend-config=onnxruntime,default-max-batch-size=8",
            "--backend-config",
            "a=1,2",
            "--backend-config=onnxruntime,a=3",
        ]
    )
    assert settings.backend_settings("onnxruntime") == {"default-max-batch-size": "8", "a": "3"}
    assert settings.backend_settings("python") == {"a": "1,2"}


def test_names_in_any_case_and_numbers_as_a_triton_server_takes_them() -> None:
    settings, _ = serving.settings_of(
        [
            REPOSITORY,
            "--model-control-mode=EXPLICIT",
            "--rate-limit=Off",
            "--grpc-infer-response-compression-level=HIGH",
            "--log-format=iso8601",
            "--log-verbose=true",
            "--model-load-thread-count=0",
            "--trace-config=level=timestamps",
            "--trace-config=rate=0",
        ]
    )
    assert (settings.model_control_mode, settings.rate_limit) == ("explicit", "off")
    assert (settings.grpc_infer_response_compression_level, settings.log_format) == ("high", "ISO8601")
    assert (settings.log_verbose, settings.model_load_thread_count) == (1, 1)
    assert serving.settings_of([REPOSITORY, "--log-verbose=False"])[0].log_verbose == 0


@pytest.mark.parametrize(
    ("argv", "texts"),
    [
        (["--http-prot=1"], ["unknown flag '--http-prot'", "did you mean '--http-port'?"]),
        (["--http-por=1"], ["flags are written in full: '--http-por' begins --http-port"]),
        (["--xyzzy"], ["unknown flag '--xyzzy'", "--help"]),
        (["--log-verb=1"], ["flags are written in full: '--log-verb' begins --log-verbose"]),
        (["--log-e", "true"], ["'--log-e' begins --log-error"]),
        (["--http-thread=1"], ["'--http-thread' begins --http-thread-count"]),
        (
            ["--cache-config=local,size=100", "--response-cache-byte-size=100"],
            ["--cache-config replaces --response-cache-byte-size: use only one of them"],
        ),
        (["--cache-config=size=100"], ["--cache-config: expected NAME,KEY=VALUE, got 'size=100'"]),
        (["--cache-config=a,b=1", "--cache-config=c"], ["there is one response cache, got 'a' and 'c'"]),
        (["--log-verbose=loud"], ["--log-verbose", "0 or more", "'loud'"]),
        (["--model-load-thread-count=-1"], ["0 or more", "'-1'"]),
        (["stray"], ["unexpected argument 'stray'"]),
        (
            ["--http-port=8000", "/"],
            ["'/' stands behind flags: a folder of models is the first argument, or --model-repository=/"],
        ),
        (["-p", "8000"], ["unknown flag '-p'; see 'neptrio --help'"]),
        (["--http-port=x"], ["--http-port", "an integer from 0 to 65535", "'x'"]),
        (["--http-port=65536"], ["0 to 65535"]),
        (["--http-max-input-size=0"], ["1 or more", "'0'"]),
        (["--exit-timeout-secs=-1"], ["0 or more", "'-1'"]),
        (["--allow-http=maybe"], ["--allow-http", "true, 1, on, false, 0, off", "'maybe'"]),
        (["--model-control-mode=sometimes"], ["--model-control-mode", "'sometimes'", "'explicit'"]),
        (["--backend-config=onnxruntime"], ["NAME,KEY=VALUE", "'onnxruntime'"]),
        (
            ["--http-restricted-api=foo:k=v"],
            ["unknown restricted api 'foo'", "expected one of health, metadata"],
        ),
        (["--grpc-restricted-protocol=foo:k=v"], ["unknown restricted protocol 'foo'"]),
        (
            ["--http-restricted-api=health:k"],
            ["option format is '<config name>:<setting>=<value>'. Got health:k"],
        ),
        (["--http-restricted-api=health:=v"], ["Got health:=v", "CATEGORY[,CATEGORY...]:HEADER=VALUE"]),
        (["--http-restricted-api=:k=v"], ["Got :k=v"]),
        (["--http-restricted-api=health:k="], ["Got health:k="]),
        (["--http-restricted-api=health:a b=v"], ["'a b' cannot be the name of a header"]),
        (["--http-restricted-api=health:k=\n"], ["cannot be the value of a header"]),
        (
            ["--http-restricted-api=health:k=v", "--http-restricted-api=trace,health:b=c"],
            ["restricted api 'health' can not be specified in multiple config groups"],
        ),
        (
            ["--grpc-restricted-protocol=health,health:k=v"],
            ["restricted protocol 'health' can not be specified in multiple config groups"],
        ),
        (["--http-header-forward-pattern=("], ["--http-header-forward-pattern", "'(' is not a regular"]),
        (["--grpc-header-forward-pattern=*"], ["'*' is not a regular expression"]),
        (
            ["--http-header-forward-pattern=(a)\\1"],
            ["is not a regular expression (RE2): invalid escape sequence"],
        ),
        (["--grpc-header-forward-pattern=a(?=b)"], ["(RE2): invalid perl operator: (?="]),
        (["--allow-sagemaker=true"], ["does not have the SageMaker endpoint yet"]),
        (["--backend-directory=/no/such"], ["--backend-directory: there is no folder '/no/such'"]),
        (["--model-namespacing", "true"], ["does not have model namespaces yet"]),
    ],
)
def test_refusals_say_what_to_do(
    capsys: pytest.CaptureFixture[str], argv: list[str], texts: list[str]
) -> None:
    message = refused(capsys, *argv)
    for text in texts:
        assert text in message


def test_restrictions_and_patterns() -> None:
    settings, warnings = serving.settings_of(
        [
            REPOSITORY,
            "--http-restricted-api=health,trace:Key=a=b:c",
            "--http-restricted-api",
            "logging:k2=v",
            "--http-header-forward-pattern=(?-i)(X_.*)",
        ]
    )
    assert warnings == []
    assert settings.http_restricted_api == (
        flags.Restriction(("health", "trace"), "Key", "a=b:c"),
        flags.Restriction(("logging",), "k2", "v"),
    )
    assert settings.http_header_forward_pattern == "(?-i)(X_.*)"
    assert settings.grpc_restricted_protocol == () and settings.grpc_header_forward_pattern == ""


def test_missing_repository(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serving.settings_of([])
    assert "--model-repository=DIR is missing" in capsys.readouterr().err


def test_off_values_of_missing_features_and_hints_are_accepted() -> None:
    _, warnings = serving.settings_of(
        [REPOSITORY, "--allow-sagemaker=off", "--model-namespacing", "false", "--http-thread-count=8"]
    )
    assert warnings == ["--http-thread-count has no effect: one thread serves all connections"]


@pytest.mark.parametrize(
    "flag",
    [
        "--cuda-memory-pool-byte-size=0:67108864",
        "--cuda-virtual-address-size=0:1",
        "--host-policy=p,numa-node=0",
        "--model-load-gpu-limit=0:0.5",
    ],
)
def test_placement_that_this_server_does_not_have_does_not_end_a_start(flag: str) -> None:
    _, (warning,) = serving.settings_of([REPOSITORY, flag])
    assert warning.startswith(f"{flag.partition('=')[0]} has no effect: ")


@pytest.mark.parametrize(
    ("given", "warned"),
    [
        (
            "python,isolatoin=none",
            ["--backend-config=python,isolatoin is no setting of this server, did you mean 'isolation'?"],
        ),
        (
            "enviroment=minimal",
            ["--backend-config=enviroment is no setting of this server, did you mean 'environment'?"],
        ),
        ("python,isolation=none", []),
        ("python,shm-default-byte-size=1", []),  # one of Triton's
    ],
)
def test_a_misspelt_backend_setting_is_said(given: str, warned: list[str]) -> None:
    assert serving.settings_of([REPOSITORY, f"--backend-config={given}"])[1] == warned


def test_a_folder_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = []
    monkeypatch.setattr(cli, "serve", lambda settings, warnings: served.append(settings) or 0)
    assert cli.main([str(tmp_path), "--http-port=7"]) == 0
    assert cli.main(["s3://bucket/models"]) == 0
    assert [settings.model_repository for settings in served] == [(tmp_path,), ("s3://bucket/models",)]
    assert served[0].http_port == 7
    assert cli.main(["chek"]) == 2
    assert (
        "'chek' is neither a subcommand nor a folder of models, did you mean 'check'?"
        in capsys.readouterr().err
    )


def test_what_is_no_folder_is_told_what_it_may_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (
        ("nothere", "'nothere' is neither a subcommand nor a folder of models; see 'neptrio --help'"),
        ("app.py", "app.py' is a file and not a folder of models: 'neptrio serve "),
        ("net.onnx", "net.onnx' is a file and not a folder of models: 'neptrio import "),
    ):
        given = name if name == "nothere" else str(tmp_path / name)
        if name != "nothere":
            (tmp_path / name).write_text("")
        assert cli.main([given]) == 2
        assert text in capsys.readouterr().err


def test_help_begins_with_examples_and_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    examples = text[text.index("examples:") : text.index("subcommands")]
    assert len(re.findall(r"^  neptrio ", examples, re.M)) == 5
    assert text.index("subcommands") < text.index("general:")


def test_a_file_for_an_access_log_that_is_off_is_not_silent() -> None:
    _, warnings = serving.settings_of([REPOSITORY, "--access-log-file=x"])
    assert warnings == ["--access-log-file has no effect without --access-log=json or combined"]


def test_resources_without_a_rate_limit_are_not_silent() -> None:
    _, warnings = serving.settings_of([REPOSITORY, "--rate-limit-resource=R:4"])
    assert warnings == ["--rate-limit-resource has no effect without --rate-limit=execution_count"]
    assert (
        serving.settings_of([REPOSITORY, "--rate-limit-resource=R:4", "--rate-limit=execution_count"])[1]
        == []
    )


def actions() -> list[argparse.Action]:
    """Every flag of the server."""
    return list(serving.parser()._actions)


def test_tritonservers_flags_are_served_refused_or_said_to_have_no_effect() -> None:
    """Each in exactly one way (docs/protocol/features.md A8)."""
    known = {flag for action in actions() for flag in action.option_strings}
    assert not known & set(flags.NO_EFFECT) and not known & set(flags.MISSING)
    assert not set(flags.NO_EFFECT) & set(flags.MISSING)
    given = {f"--{name}" for name in TRITONSERVER.split()}
    assert given - known - set(flags.NO_EFFECT) - set(flags.MISSING) == set()
    assert set(flags.NO_EFFECT) | set(flags.MISSING) <= given


def test_help_is_grouped_and_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        cli.main(["--help"])
    assert info.value.code == 0
    text = capsys.readouterr().out
    for group in ("general:", "model repository:", "HTTP/REST:", "gRPC:", "logging:"):
        assert group in text
    assert "%%" not in text and not re.search(r"\(default[^)]*\)\s*\(default", text)
    for action in actions():
        if action.help != "==SUPPRESS==":
            assert action.help, f"{action.option_strings} has no help text"
    for name in commands.names():
        assert commands.load(name).HELP in text


def test_subcommands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "say_hello.py").write_text(
        'HELP = "greets"\n'
        'def add_arguments(p): p.add_argument("--name", required=True)\n'
        'def run(options): print("hello", options.name); return 3\n'
    )
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
    try:
        assert cli.main(["say-hello", "--name=you"]) == 3
        assert capsys.readouterr().out == "hello you\n"
        assert "say-hello   greets" in commands.summary()
        assert cli.main(["say-helo"]) == 2
        assert "did you mean 'say-hello'?" in capsys.readouterr().err
    finally:
        sys.modules.pop("neptrio.commands.say_hello", None)


@pytest.mark.slow
def test_ctrl_c_before_anything_is_served_shows_no_traceback(tmp_path: Path) -> None:
    """What a shell does with a program that was interrupted depends on its status."""
    (tmp_path / "app.py").write_text(
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job does not have\n"
        "signal.raise_signal(signal.SIGINT)\n"
    )
    command = [sys.executable, "-m", "neptrio", "serve", "app.py:server"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")


def test_the_command_reports_a_bad_repository() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "neptrio",
            "--model-repository=/nonexistent",
            "--http-port=0",
            "--grpc-port=0",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "error: creating server: Invalid argument - failed to open model repository" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_trace_directory_is_made(tmp_path: Path) -> None:
    """Its first trace_file is not refused because of it, and what is written lies in it."""
    write_model(tmp_path / "models", "m", identity_config(pairs=1))
    folder = tmp_path / "not" / "there"
    with ServerProcess(tmp_path / "models", f"--trace-dir={folder}") as server:
        with httpclient.InferenceServerClient(server.http) as client:
            settings = {"trace_file": f"{folder}/t.json", "trace_level": ["TIMESTAMPS"], "trace_rate": "1"}
            client.update_trace_settings(None, settings)
            tensor = httpclient.InferInput("INPUT0", [1, 16], "INT32")
            tensor.set_data_from_numpy(np.zeros((1, 16), np.int32))
            client.infer("m", [tensor])
            client.update_trace_settings(None, {"trace_level": ["OFF"]})
            assert "REQUEST_START" in (folder / "t.json").read_text()


@pytest.mark.slow
def test_a_trace_directory_that_cannot_be_made_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "neptrio",
            f"--model-repository={tmp_path}",
            f"--trace-dir={tmp_path}/file/below",
            "--http-port=0",
            "--grpc-port=0",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert (
        f"error: creating server: Invalid argument - --trace-dir: the folder '{tmp_path}/file/below' cannot be made: "
        "Not a directory" in done.stderr
    )
    assert "Traceback" not in done.stderr


def test_a_cache_that_is_given_takes_the_place_of_the_one_there_was() -> None:
    """Several flags are settings of one cache; an empty one is none."""
    before = {"cache_config": ("local,size=100",)}
    assert serving.settings_of([REPOSITORY], before)[0].cache_config == ("local,size=100",)
    given = ["--cache-config=redis,host=a", "--cache-config=redis,port=1", "--cache-directory=caches"]
    settings = serving.settings_of([REPOSITORY, *given], before)[0]
    assert settings.cache_config == ("redis,host=a", "redis,port=1")
    assert settings.cache_directory == Path("caches")
    assert serving.settings_of([REPOSITORY, "--cache-config="], before)[0].cache_config == ()
