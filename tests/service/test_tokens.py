"""The file of tokens: what it may say, and whose a token is."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from neptrio import commands
from neptrio.errors import Denied, TooManyRequests, Unauthenticated
from neptrio.service.auth_config import SCOPES, parse
from neptrio.service.certificates import Certificate, of_peer
from neptrio.service.tokens import Tokens, digest, make

H1, H2 = ("sha256:" + digest(secret).hex() for secret in (b"one", b"two"))
ONE = f'[[token]]\nname = "one"\nhash = "{H1}"\nscopes = ["infer", "read"]\n'
TWO = f'[[token]]\nname = "two"\nhash = "{H2}"\nscopes = ["infer"]\nmodels = ["bert-*", "x"]\n'

CERTIFICATE = '[[certificate]]\nname = "c"\ncommon_name = ["a*"]\nscopes = ["infer"]\n'


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
        (ONE + "requests_per_second = -1", "token 'one': expected requests_per_second"),
        (ONE + "concurrent_requests = true", "token 'one': expected concurrent_requests"),
        (ONE + "concurrent_requests = 1.5", "token 'one': expected concurrent_requests"),
        (
            CERTIFICATE.replace('common_name = ["a*"]', ""),
            "certificate 'c': expected patterns of one or more of",
        ),
        (CERTIFICATE.replace('["a*"]', "[]"), "certificate 'c': expected patterns"),
        (CERTIFICATE.replace('["a*"]', '"a*"'), "certificate 'c': expected common_name"),
        (CERTIFICATE + f'hash = "{H1}"', "certificate 'c': unknown key 'hash'"),
        (CERTIFICATE + ONE.replace('"one"', '"c"'), "the name is there twice"),
        ("certificate = 1", r"tables \[\[certificate\]\]"),
    ],
)
def test_a_wrong_file_is_refused_without_telling_secrets(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected) as error:
        parse(text)
    assert H1[7:] not in str(error.value)


YAML = f"""
open_health: false
token:
  - name: one
    hash: {H1}
    scopes: [infer, read]
    requests_per_second: 5
  - {{name: two, hash: "{H2}", scopes: [infer], models: ["bert-*", x]}}
certificate:
  - name: c
    dns: ["*.example"]
    scopes: [admin]
    concurrent_requests: 2
anonymous:
  scopes: [read]
"""


def test_toml_and_yaml_say_the_same() -> None:
    toml = (
        "open_health = false\n"
        + ONE
        + "requests_per_second = 5\n"
        + TWO
        + '[[certificate]]\nname = "c"\ndns = ["*.example"]\nscopes = ["admin"]\nconcurrent_requests = 2\n'
        + '[anonymous]\nscopes = ["read"]\n'
    )
    found = parse(YAML, yaml=True)
    assert found == parse(toml)
    assert [client.name for client in found.clients()] == ["one", "two", "c", "anonymous"]
    assert parse("", yaml=True) == parse("")


def test_the_name_of_the_file_decides(tmp_path: Path) -> None:
    for name in ("auth.yaml", "auth.yml", "auth.YAML"):
        (tmp_path / name).write_text(YAML)
        assert Tokens(tmp_path / name).find(b"one").name == "one"
    (tmp_path / "auth.toml").write_text(YAML)
    with pytest.raises(ValueError, match="no TOML"):
        Tokens(tmp_path / "auth.toml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- 1", "expected a mapping"),
        ("token: 1", "tables"),
        ("1: 2", "unknown key '1'"),
        ("token: [", "no YAML: .*line 1"),
        ("!!python/object/apply:os.system [true]", "no YAML: could not determine a constructor"),
        ("open_health: true\nopen_health: false", "a key is there twice"),
        (f"token: [{{name: one, hash: {H1}, hash: {H1}, scopes: [infer]}}]", "a key is there twice"),
        (f"token: [{{name: one, hash: {H1}, scopes: infer}}]", "expected scopes"),
        (f"token: [{{name: no, hash: {H1}, scopes: [infer]}}]", "expected name"),  # YAML takes it for false
        (f"token: [{{name: one, hash: {H1}, scopes: [infer]}} x", "no YAML"),
        ("[" * 5000, "no YAML"),
    ],
)
def test_a_wrong_yaml_file_is_refused_without_telling_secrets(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected) as error:
        parse(text, yaml=True)
    assert H1[7:] not in str(error.value)


def shown(**names: tuple[str, ...]) -> Certificate:
    return Certificate("CN=x", names)


def test_what_a_certificate_may_do_is_that_of_the_first_entry_for_it(tmp_path: Path) -> None:
    found = tokens(
        tmp_path,
        CERTIFICATE
        + '[[certificate]]\nname = "d"\ncommon_name = ["a*", "b"]\ndns = ["*.x", "y"]\nscopes = ["read"]\n'
        + '[[certificate]]\nname = "e"\nuri = ["spiffe://mesh/*"]\nip = ["10.0.0.?"]\nscopes = ["admin"]\n',
    )
    assert found.find(None, shown(common_name=("a1",), dns=("a.x",))).name == "c"
    assert found.find(None, shown(common_name=("z", "b"), dns=("q", "a.x"))).name == "d"
    assert found.find(None, shown(uri=("spiffe://mesh/a/b",), ip=("10.0.0.7",))).name == "e"
    for names in (
        {"common_name": ("b",)},
        {"dns": ("y",)},
        {"uri": ("spiffe://mesh/a",), "ip": ("10.0.0.77",)},
        {},
    ):
        with pytest.raises(Unauthenticated, match="no entry for this certificate"):
            found.find(None, shown(**names))
    with pytest.raises(Denied, match="certificate 'c' may not do this"):
        found.check(None, ("read",), "m", shown(common_name=("a",)))


def test_names_of_a_certificate_as_the_ssl_module_gives_them() -> None:
    assert of_peer(None) is None
    assert of_peer({}) is None
    found = of_peer(
        {
            "subject": ((("organizationName", "o"),), (("commonName", "a"),), (("commonName", "b"),)),
            "subjectAltName": (
                ("DNS", "d"),
                ("URI", "u"),
                ("email", "e"),
                ("IP Address", "::1"),
                ("DNS", "f"),
            ),
        }
    )
    assert found is not None
    assert found.subject == "organizationName=o, commonName=a, commonName=b"
    assert found.names == {
        "common_name": ("a", "b"),
        "dns": ("d", "f"),
        "uri": ("u",),
        "email": ("e",),
        "ip": ("::1",),
    }


def test_what_was_used_of_a_limit_stays_used_when_the_file_is_read_again(tmp_path: Path) -> None:
    found = tokens(tmp_path, ONE + "requests_per_second = 2\nconcurrent_requests = 3\n")
    account = found.find(b"one")
    now = 10**12
    for _ in range(2):
        found.count(account, ("infer",), now)
    for scope in ("infer", "read"):
        with pytest.raises(TooManyRequests, match=r"token 'one' may make 2 requests per second"):
            found.count(account, (scope,), now)
    for scope in ("operate", "admin"):
        found.count(account, (scope,), now)
    (tmp_path / "auth.toml").write_text(
        ONE.replace(H1, H2) + "requests_per_second = 2\nconcurrent_requests = 1\n"
    )
    changed = found.changed()
    assert changed is not None
    found.take(changed)
    assert found.find(b"two") is account
    assert account.most == 1
    with pytest.raises(TooManyRequests):
        found.count(account, ("infer",), now + 10**8)
    found.count(account, ("infer",), now + 5 * 10**8)


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
    assert (
        commands.run("token", ["b: 'c'", "--format", "yaml", "--requests-per-second", "7", "--model", "*"])
        == 0
    )
    out, err = capsys.readouterr()
    made = parse("token:\n" + err, yaml=True).tokens[digest(out.strip().encode())]
    assert (made.name, made.requests_per_second, made.models) == ("b: 'c'", 7, ("*",))
    assert commands.run("token", ["x", "--concurrent-requests", "-1"]) == 2
    assert "expected concurrent_requests" in capsys.readouterr().err
    assert commands.run("token", ["anonymous"]) == 2
    assert "error: token 1: expected name" in capsys.readouterr().err
