"""Tokens on the fast path: it takes what a known client sends, and what it takes ends as on the parser's path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from neptrio.cli import settings_of
from neptrio.service.auth_config import parse
from neptrio.service.tokens import Tokens
from neptrio.transport.header_policy import HeaderPolicy, http_policy
from tests.support.embedded import EmbeddedServer
from tests.support.http import Http1
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.transport.http1.test_fast_path import both, request
from tests.transport.test_tokens import BODY, ask, row

FILE = (
    row("one", "infer")
    + row("two", "infer", models='models = ["other"]')
    + row("reader", "read")
    + row("counted", "infer")
    + "requests_per_second = 1000000\n"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    repository = tmp_path_factory.mktemp("models")
    for name in ("identity", "other"):
        write_model(repository, name, identity_config())
    with EmbeddedServer(Path(repository)) as running:
        yield running


def policy(tmp_path: Path, text: str, *flags: str) -> HeaderPolicy:
    (tmp_path / "auth.toml").write_text(text)
    settings, _ = settings_of(["--model-repository=m", *flags])
    made = http_policy(settings, Tokens(tmp_path / "auth.toml"))
    assert made is not None
    return made


def sent(*tokens: str | None, model: str = "identity", name: str = "Authorization") -> bytes:
    return b"".join(
        request(
            *([f"{name}: Bearer {token}".encode()] if token is not None else []),
            path=f"/v2/models/{model}/infer".encode(),
        )
        for token in tokens
    )


def test_a_known_client_takes_the_fast_path(server: EmbeddedServer, tmp_path: Path) -> None:
    (answer, _, closing), passed = both(server, sent("one", "one", "one"), policy=policy(tmp_path, FILE))
    assert passed == 3
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert not closing
    both(server, sent("one", name="aUTHORIZATION"), policy=policy(tmp_path, FILE))
    assert both(server, sent("counted", "counted"), policy=policy(tmp_path, FILE))[1] == 2


@pytest.mark.parametrize(
    ("data", "statuses", "passed"),
    [
        (sent(None), [b"401"], 0),
        (sent("wrong"), [b"401"], 0),
        (sent(""), [b"401"], 0),
        (sent("reader"), [b"403"], 0),
        (sent("two"), [b"403"], 0),
        (sent("two", model="other"), [b"200"], 1),
        (sent("one", "wrong"), [b"200", b"401"], 1),
        (sent("one", "one "), [b"200", b"200"], 2),
        (sent("one", "onf"), [b"200", b"401"], 1),
        (sent("one", "one1"), [b"200", b"401"], 1),
        (sent("one", "on"), [b"200", b"401"], 1),
        (sent("one", None), [b"200", b"401"], 1),
        (sent("one") + sent("one", model="other"), [b"200", b"200"], 2),
        (sent("two", model="other") + sent("two"), [b"200", b"403"], 1),
        (sent("one") + request(b"Authorization: Bearer one", b"Authorization: Bearer one"), [b"200", b"401"], 1),
        (request(b"Authorization: Basic b25l"), [b"401"], 0),
        (request(b"Proxy-Authorization: Bearer one"), [b"401"], 0),
        (request(b"Authorizatiom: Bearer one"), [b"401"], 0),
    ],
)  # fmt: skip
def test_it_decides_as_the_parsers_path(
    server: EmbeddedServer, tmp_path: Path, data: bytes, statuses: list[bytes], passed: int
) -> None:
    (answer, _, _), found = both(server, data, policy=policy(tmp_path, FILE))
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == statuses
    assert found == passed


def test_clients_without_a_token(server: EmbeddedServer, tmp_path: Path) -> None:
    open_to_all = policy(tmp_path, FILE + '[anonymous]\nscopes = ["infer"]\n')
    (answer, _, _), passed = both(server, sent(None, "one", None, "wrong"), policy=open_to_all)
    assert passed == 3
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"200", b"401"]


@pytest.mark.parametrize(
    "flag", ["--http-restricted-api=inference:key=secret", "--http-header-forward-pattern=x.*"]
)
def test_other_headers_that_matter_are_the_parsers(server: EmbeddedServer, tmp_path: Path, flag: str) -> None:
    assert both(server, sent("one"), policy=policy(tmp_path, FILE, flag))[1] == 0


@pytest.mark.slow
def test_what_is_remembered_ends_with_the_file(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "simple", identity_config())
    file = tmp_path / "auth.toml"
    file.write_text(FILE)
    with ServerProcess(tmp_path / "models", f"--auth-config={file}") as server, Http1(server.http) as client:
        path = "/v2/models/simple/infer"
        assert ask(client, "one", "POST", path, BODY).status == 200
        for number, (text, status) in enumerate(
            [
                (FILE.replace('["infer"]', '["read"]', 1), 403),
                (FILE, 200),
                (row("one", "infer", models='models = ["other"]'), 403),
                (FILE, 200),
                (FILE.replace(row("one", "infer"), ""), 401),
            ]
        ):
            (tmp_path / "new").write_text(text)
            (tmp_path / "new").replace(file)
            server.until_logged("tokens now, and", times=number + 1)
            assert ask(client, "one", "POST", path, BODY).status == status


def test_only_the_owner_is_remembered(server: EmbeddedServer, tmp_path: Path) -> None:
    """The same connection for two clients, as of a proxy: each request is its own client's."""
    tokens = Tokens(_written(tmp_path, FILE.replace('models = ["other"]', "")))
    settings, _ = settings_of(["--model-repository=m"])
    made = http_policy(settings, tokens)
    (answer, _, _), passed = both(server, sent("one", "two", "one", "reader", "two"), policy=made)
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"200", b"403", b"200"]
    assert passed == 3  # what follows a request of the parser in the same bytes is the parser's
    assert (tokens.find(b"one").open, tokens.find(b"two").open) == (0, 0)


def _written(tmp_path: Path, text: str) -> Path:
    (tmp_path / "auth.toml").write_text(text)
    parse(text)
    return tmp_path / "auth.toml"
