"""Commands that ask a server show it the token in NEPTRIO_TOKEN."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from neptrio import commands
from neptrio.client.client import InferenceError
from neptrio.client.http import HttpClient
from tests.sequences.models import Caller, sequence_config
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.transport.test_tokens import auth, row


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("asked")
    write_model(folder / "models", "sum", sequence_config("direct { }", 4, idle_us=3_600_000_000))
    (folder / "auth.toml").write_text(
        row("boss", "read", "operate") + row("one", "infer") + row("two", "infer")
    )
    with ServerProcess(folder / "models", f"--auth-config={folder}/auth.toml") as process:
        yield process


def test_sequences_are_listed_with_their_tokens_and_ended(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Caller(server, "grpc") as caller:
        for token in ("one", "two"):
            caller("sum", 5, "s", 1, headers=auth(token))
    listing = ["sum", "--url", server.http]
    assert commands.run("sequences", listing) == 1
    assert "a token is needed" in capsys.readouterr().err
    monkeypatch.setenv("NEPTRIO_TOKEN", "boss")
    assert commands.run("sequences", listing) == 0
    capsys.readouterr()
    monkeypatch.setenv("NEPTRIO_TOKEN", "boss\n")  # as a file has it, of which a variable was made
    assert commands.run("sequences", listing) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [["token", "id"], ["one", "5"], ["two", "5"]]
    assert commands.run("sequences", [*listing, "--end", "5"]) == 1
    assert "say whose with ?token=NAME" in capsys.readouterr().err
    assert commands.run("sequences", [*listing, "--end", "5", "--token", "one"]) == 0
    assert capsys.readouterr().out.startswith("ended 5")
    assert commands.run("sequences", listing) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:2]] == [["two", "5"]]


@pytest.mark.slow
def test_statistics_and_configurations_are_read(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = HttpClient(server.http)
    with pytest.raises(InferenceError, match="a token is needed"):
        client.call("GET", "/v2")
    for command, arguments in (("top", [server.http, "--once"]), ("explain", ["sum", "--url", server.http])):
        monkeypatch.delenv("NEPTRIO_TOKEN", raising=False)
        assert commands.run(command, arguments) != 0
        assert "a token is needed" in capsys.readouterr().err
        monkeypatch.setenv("NEPTRIO_TOKEN", "boss")
        assert commands.run(command, arguments) == 0
    assert client.call("GET", "/v2")[0]
    client.close()
