"""The file of tokens: what it may say, and whose a token is."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from neptrio import commands
from neptrio.errors import Denied, Unauthenticated
from neptrio.service.auth_config import SCOPES, parse
from neptrio.service.tokens import Tokens, digest, make

H1, H2 = ("sha256:" + digest(secret).hex() for secret in (b"one", b"two"))
ONE = f'[[token]]\nname = "one"\nhash = "{H1}"\nscopes = ["infer", "read"]\n'
TWO = f'[[token]]\nname = "two"\nhash = "{H2}"\nscopes = ["infer"]\nmodels = ["bert-*", "x"]\n'


def tokens(tmp_path: Path, text: str) -> Tokens:
    path = tmp_path / "auth.toml"
    path.write_text(text)
    return Tokens(path)


def test_a_token_may_do_what_its_scopes_and_models_say(tmp_path: Path) -> None:
    found = tokens(tmp_path, ONE + TWO)
    assert found.check(b"one", ("infer",), "any").name == "one"
    assert found.check(b"one", ("read",), "").name == "one"
    assert found.check(b"one", ("operate", "read"), "").name == "one"
    for scope in ("operate", "admin"):
        with pytest.raises(Denied, match=f"token 'one' may not do this: it needs the scope {scope}"):
            found.check(b"one", (scope,), "any")
    for model in ("bert-large", "x", None):
        assert found.check(b"two", ("infer",), model).name == "two"
    for model in ("resnet", "bert", "xx", ""):
        with pytest.raises(Denied, match="token 'two' is limited"):
            found.check(b"two", ("infer",), model)


@pytest.mark.parametrize("secret", [None, b"", b"three", b"one ", b"o" * 100_000, H1.encode(), "é".encode()])
def test_nobody_else_may_do_anything(tmp_path: Path, secret: bytes | None) -> None:
    found = tokens(tmp_path, ONE + TWO)
    for scope in SCOPES:
        with pytest.raises(Unauthenticated) as error:
            found.check(secret, (scope,), "any")
        assert dict(error.value.headers)[b"www-authenticate"] == b"Bearer"


def test_a_token_longer_than_one_may_be_is_not_cut_to_a_valid_one(tmp_path: Path) -> None:
    long = b"a" * 4096
    found = tokens(tmp_path, ONE.replace(H1, "sha256:" + digest(long).hex()))
    assert found.check(long, ("infer",), "any").name == "one"
    with pytest.raises(Unauthenticated):
        found.check(long + b"b", ("infer",), "any")


def test_what_clients_without_a_token_may(tmp_path: Path) -> None:
    found = tokens(tmp_path, ONE + '[anonymous]\nscopes = ["read"]\nmodels = ["open"]\n')
    assert found.check(None, ("read",), "open").name == "anonymous"
    with pytest.raises(Denied, match="a client without a token"):
        found.check(None, ("infer",), "open")
    with pytest.raises(Denied, match="limited"):
        found.check(None, ("read",), "closed")
    with pytest.raises(Unauthenticated):  # a token that is wrong is no missing one
        found.check(b"three", ("read",), "open")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1", "unknown key 'x'"),
        ("token = 1", r"tables \[\[token\]\]"),
        ("[[token]", "no TOML"),
        ("[[token]]", "token 1: expected name"),
        (ONE.replace('"one"', '"anonymous"'), "expected name"),
        (ONE.replace("sha256:", "md5:"), "token 'one': expected hash"),
        (ONE.replace(H1, H1[:-1]), "token 'one': expected hash"),
        (ONE + ONE, "token 'one': the name is there twice"),
        (ONE + ONE.replace('"one"', '"other"'), "token 'other': it has the hash of token 'one'"),
        (
            ONE.replace('"read"', '"write"'),
            "unknown scope 'write', expected one of infer, read, operate, admin",
        ),
        (ONE.replace('["infer", "read"]', "[]"), "expected scopes"),
        (ONE.replace('["infer", "read"]', '"infer"'), "expected scopes"),
        (ONE + "models = [1]", "expected models"),
        (ONE + 'model = ["a"]', "unknown key 'model'"),
        ("open_health = 1", "expected open_health"),
        ("[anonymous]", "anonymous: expected scopes"),
    ],
)
def test_a_wrong_file_is_refused_without_telling_secrets(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected) as error:
        parse(text)
    assert H1[7:] not in str(error.value)


def test_a_file_that_changes_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = tokens(tmp_path, ONE)
    path = tmp_path / "auth.toml"
    assert found.changed() is None

    def write(text: str) -> None:
        new = tmp_path / "new"
        new.write_text(text)
        os.replace(new, path)

    write(TWO)
    changed = found.changed()
    assert changed is not None
    found.take(changed)
    assert found.check(b"two", ("infer",), "x")
    with pytest.raises(Unauthenticated):
        found.check(b"one", ("infer",), "x")
    write("x = 1")
    assert found.changed() is None
    assert "unknown key 'x'" in caplog.text
    assert found.changed() is None  # told once
    path.unlink()
    assert found.changed() is None
    assert found.check(b"two", ("infer",), "x")
    write(ONE)
    assert found.changed() is not None


def test_tokens_are_made_for_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run("token", ['a "b"', "--scope", "read", "--model", "m*"]) == 0
    out, err = capsys.readouterr()
    token = out.strip()
    assert len(token) > 40
    assert token not in err
    (row,) = tomllib.loads(err)["token"]
    assert (row["name"], row["scopes"], row["models"]) == ('a "b"', ["read"], ["m*"])
    assert parse(err).tokens[digest(token.encode())].name == 'a "b"'
    assert make()[0] != make()[0]
    assert commands.run("token", ["anonymous"]) == 2
    assert "error: token 1: expected name" in capsys.readouterr().err
