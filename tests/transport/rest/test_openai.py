"""OpenAI's API over every HTTP front: answers, streams, stops, refusals, cancellation, tokens."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neptrio.codec.openai import Stops
from neptrio.service.tokens import digest
from tests.support.http import Http1, Http2, Reply
from tests.support.openai_models import role, write_models
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.statistics import stats
from tests.support.waiting import until


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("openai")
    write_models(folder)
    return folder


@pytest.fixture(scope="module", params=["lean", "hypercorn"])
def server(repository: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with ServerProcess(repository, f"--http-lean={str(request.param == 'lean').lower()}") as process:
        yield process


@pytest.fixture(params=["http/1.1", "http/2"])
def http(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Http1 | Http2]:
    with (Http1 if request.param == "http/1.1" else Http2)(server.http) as client:
        yield client


def ask(http: Http1 | Http2, path: str, **members: Any) -> Reply:
    return http.request("POST", f"/v1/{path}", json.dumps(members).encode())


def answer(reply: Reply) -> Any:
    assert reply.status == 200, reply.body
    return json.loads(reply.body)


def events(reply: Reply) -> list[Any]:
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = reply.body.decode().split("\n\n")[:-1]
    assert all(block.startswith("data: ") for block in blocks)
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


def live(server: ServerProcess, model: str) -> int:
    return int(stats(server, model)["live"]["executing"])


def test_models(http: Http1 | Http2) -> None:
    found = answer(http.request("GET", "/v1/models"))
    assert found["object"] == "list"
    assert [row["id"] for row in found["data"]] == ["bytes", "echo", "embed", "endless", "talks", "whole"]
    one = answer(http.request("GET", "/v1/models/echo"))
    assert one == found["data"][1] and one["object"] == "model" and one["created"] > 0
    for name in ("plain", "nothing"):
        reply = http.request("GET", f"/v1/models/{name}")
        assert (reply.status, json.loads(reply.body)["error"]["code"]) == (404, "model_not_found")


def test_completions(http: Http1 | Http2) -> None:
    made = answer(ask(http, "completions", model="echo", prompt=["abc", "de"], n=2, max_tokens=2))
    assert [(c["index"], c["text"], c["finish_reason"]) for c in made["choices"]] == [
        (0, "ab", "length"), (1, "ab", "length"), (2, "de", "stop"), (3, "de", "stop"),
    ]  # fmt: skip
    assert made["object"] == "text_completion" and made["model"] == "echo" and made["id"].startswith("cmpl-")
    # prompts are read once for all their choices
    assert made["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}
    made = answer(ask(http, "completions", model="whole", prompt="abc", stop=["C", "x"]))
    assert [c["text"] for c in made["choices"]] == ["AB"]
    assert "usage" not in made  # it does not count


def test_chat(http: Http1 | Http2) -> None:
    messages = [
        {"role": "system", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "y"}, {"type": "text", "text": "ä"}]},
    ]
    made = answer(ask(http, "chat/completions", model="echo", messages=messages))
    (choice,) = made["choices"]
    assert choice["message"] == {"role": "assistant", "content": "system:x;user:yä;", "refusal": None}
    assert made["object"] == "chat.completion"
    cut = ask(http, "chat/completions", model="echo", messages=messages, max_completion_tokens=3)
    assert answer(cut)["choices"][0]["message"]["content"] == "sys"
    # a model that makes the prompt itself
    made = answer(ask(http, "chat/completions", model="talks", messages=messages, n=2))
    assert [choice["message"]["content"] for choice in made["choices"]] == ["system=x user=yä"] * 2
    made = answer(ask(http, "completions", model="talks", prompt="z"))
    assert made["choices"][0]["text"] == "prompt z"


def test_streams(http: Http1 | Http2) -> None:
    reply = ask(http, "completions", model="echo", prompt="abcd", stream=True, stop="cd", n=2)
    found = events(reply)
    assert found.pop() == "[DONE]"
    for index in (0, 1):
        choices = [c for event in found for c in event["choices"] if c["index"] == index]
        assert [c["text"] for c in choices] == ["a", "b", ""]
        assert [c["finish_reason"] for c in choices] == [None, None, "stop"]
    assert len({event["id"] for event in found}) == 1 and all("usage" not in event for event in found)
    options = {"include_usage": True}
    message = {"role": "user", "content": "é"}
    reply = ask(
        http, "chat/completions", model="echo", messages=[message], stream=True, stream_options=options
    )
    found = events(reply)
    assert found.pop() == "[DONE]"
    assert found[-1]["choices"] == [] and found[-1]["usage"]["completion_tokens"] == len("user:é;")
    assert all(event["usage"] is None for event in found[:-1])
    deltas = [event["choices"][0]["delta"] for event in found[:-1]]
    assert deltas[0] == {"role": "assistant", "content": "u"} and deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == "user:é;"
    assert {event["object"] for event in found} == {"chat.completion.chunk"}
    (chunk, end, done) = events(ask(http, "completions", model="whole", prompt="abc", stream=True))
    assert (chunk["choices"][0]["text"], end["choices"][0]["finish_reason"], done) == (
        "ABC",
        "stop",
        "[DONE]",
    )


def test_errors_of_the_model(http: Http1 | Http2) -> None:
    reply = ask(http, "completions", model="echo", prompt="!", stream=True)
    assert reply.status == 500 and json.loads(reply.body)["error"]["type"] == "server_error"
    reply = ask(http, "completions", model="echo", prompt="a!b", stream=True)
    first, second = events(reply)
    assert first["choices"][0]["text"] == "a" and second["error"]["message"] == "no shouting"
    reply = ask(http, "completions", model="echo", prompt="a!b")
    assert reply.status == 500 and json.loads(reply.body)["error"]["message"] == "no shouting"


def test_embeddings(http: Http1 | Http2) -> None:
    made = answer(ask(http, "embeddings", model="embed", input=["banana", "kiwi"]))
    assert [row["embedding"] for row in made["data"]] == [[6.0, 3.0, 0.5], [4.0, 0.0, 0.5]]
    assert [row["index"] for row in made["data"]] == [0, 1]
    assert made["usage"] == {"prompt_tokens": 10, "total_tokens": 10}
    made = answer(ask(http, "embeddings", model="embed", input="a", encoding_format="base64"))
    raw = base64.b64decode(made["data"][0]["embedding"])
    assert np.frombuffer(raw, "<f4").tolist() == [1.0, 1.0, 0.5]


def test_many_embeddings(http: Http1 | Http2) -> None:
    made = answer(ask(http, "embeddings", model="embed", input=["a" * (i % 7) for i in range(2048)]))
    assert [row["embedding"][0] for row in made["data"]] == [i % 7 for i in range(2048)]


@pytest.mark.parametrize("form", ["float", "base64"])
def test_an_embedding_that_is_no_number(http: Http1 | Http2, form: str) -> None:
    reply = ask(http, "embeddings", model="embed", input=["a", "nan"], encoding_format=form)
    made = json.loads(reply.body)["error"]
    assert (reply.status, made["type"], made["message"]) == (
        500,
        "server_error",
        "the model has made an embedding with nan in it",
    )


COMPLETE: dict[str, Any] = {"model": "echo", "prompt": "a"}
CHAT: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "a"}]}
REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("completions", {}, 400, "'model' must be the name of a model, got 'None'"),
    (
        "completions",
        {"model": "echo"},
        400,
        "'prompt' must be a text or 1 to 128 texts (tokens are not taken)",
    ),
    ("completions", {**COMPLETE, "prompt": [1, 2]}, 400, "tokens are not taken"),
    ("completions", {**COMPLETE, "model": "nothing"}, 404, "'nothing'"),
    ("completions", {**COMPLETE, "model": "plain"}, 404, "is not configured for OpenAI's API"),
    ("completions", {**COMPLETE, "model": "embed"}, 400, "does not complete text"),
    ("completions", {**COMPLETE, "temperature": 0.5}, 400, "'temperature' is not supported by model 'echo'"),
    ("completions", {**COMPLETE, "seed": 1}, 400, "'seed' is not supported by model 'echo'"),
    ("completions", {**COMPLETE, "model": "whole", "max_tokens": 3}, 400, "'max_tokens' is not supported"),
    ("completions", {**COMPLETE, "max_tokens": 0}, 400, "'max_tokens' must be an integer from 1"),
    ("completions", {**COMPLETE, "echo": True}, 400, "'echo' is not supported by model 'echo'"),
    ("completions", {**COMPLETE, "logprobs": 0}, 400, "'logprobs' is not supported"),
    ("completions", {**COMPLETE, "top_k": 3}, 400, "'top_k' is not supported"),
    ("completions", {**COMPLETE, "n": 17}, 400, "'n' must be an integer from 1 to 16, got '17'"),
    ("completions", {**COMPLETE, "n": 16, "prompt": ["a"] * 9}, 400, "more than 128 choices"),
    ("completions", {**COMPLETE, "stop": ["a", ""]}, 400, "'stop' must be texts that are not empty"),
    ("completions", {**COMPLETE, "stop": list("abcde")}, 400, "'stop' must be a text or 1 to 4 texts"),
    ("completions", {**COMPLETE, "stream": 1}, 400, "'stream' must be true or false"),
    ("completions", {**COMPLETE, "stream_options": {}}, 400, "goes with 'stream': true only"),
    (
        "completions",
        {"model": "whole", "prompt": "a", "stream": True, "stream_options": {"include_usage": True}},
        400,
        "model 'whole' does not count tokens",
    ),
    ("chat/completions", {**CHAT, "model": "whole"}, 400, "model 'whole' has no chat template"),
    ("chat/completions", {**CHAT, "messages": []}, 400, "'messages' must be a list of at least one message"),
    (
        "chat/completions",
        {**CHAT, "messages": [{"content": "a"}]},
        400,
        "'messages[0]' must be an object with a role",
    ),
    ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": "no"}]}, 400, "not this"),
    (
        "chat/completions",
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "'messages[0].content' must be text",
    ),
    ("chat/completions", {**CHAT, "tools": [{"type": "function"}]}, 400, "'tools' is not supported"),
    ("embeddings", {"model": "echo", "input": "a"}, 400, "model 'echo' does not embed text"),
    ("embeddings", {"model": "embed", "input": "a", "dimensions": 2}, 400, "'dimensions' is not supported"),
    ("embeddings", {"model": "embed", "input": "a", "encoding_format": "x"}, 400, "must be float or base64"),
    ("embeddings", {"model": "embed", "input": []}, 400, "'input' must be a text or 1 to 2048 texts"),
    ("embeddings", {"model": "embed", "input": ["a"] * 2049}, 400, "1 to 2048 texts, got 2049 of them"),
    (
        "chat/completions",
        {**CHAT, "max_tokens": 1, "max_completion_tokens": 1},
        400,
        "'max_tokens' and 'max_completion_tokens' are the same limit",
    ),
]
# the beginning of an error's text -> its `param` and `code`
REASONS = {
    "'model' must be": ("model", "missing_required_parameter"),
    "'n' must be": ("n", "invalid_value"),
    "'temperature' is": ("temperature", "unsupported_parameter"),
    "'top_k' is": ("top_k", "unknown_parameter"),
    "'max_tokens' and": ("max_tokens", "invalid_value"),
    "'input' must": ("input", "invalid_value"),
    "'messages[0].content'": ("messages[0].content", "invalid_value"),
    "model 'echo' does not embed": ("model", "invalid_value"),
    "not this": (None, None),
}


@pytest.mark.parametrize(("path", "members", "status", "text"), REFUSED)
def test_refusals(http: Http1 | Http2, path: str, members: dict[str, Any], status: int, text: str) -> None:
    reply = ask(http, path, **members)
    made = json.loads(reply.body)
    assert (reply.status, list(made)) == (status, ["error"])
    assert set(made["error"]) == {"message", "type", "param", "code"}
    assert text in made["error"]["message"]
    assert made["error"]["type"] == "invalid_request_error"
    if status == 404:
        assert (made["error"]["param"], made["error"]["code"]) == ("model", "model_not_found")
    for beginning, reason in REASONS.items():
        if text.startswith(beginning):
            assert (made["error"]["param"], made["error"]["code"]) == reason


def test_refusals_of_the_route_have_the_shape_too(http: Http1 | Http2) -> None:
    for method, path, body, status in (
        ("GET", "/v1/completions", b"", 405),
        ("POST", "/v1/nothing", b"{}", 404),
        ("POST", "/v1/completions", b"no json", 400),
        ("POST", "/v1/embeddings", b"3", 400),
    ):
        reply = http.request(method, path, body)
        assert reply.status == status
        assert json.loads(reply.body)["error"]["type"] == "invalid_request_error"


def test_usual_values_are_taken(http: Http1 | Http2) -> None:
    usual = {
        "temperature": 1,
        "top_p": 1.0,
        "presence_penalty": 0,
        "logit_bias": {},
        "user": "me",
        "seed": None,
    }
    assert answer(ask(http, "completions", **COMPLETE, **usual))["choices"][0]["text"] == "a"


def test_a_stop_text_ends_a_model_that_would_go_on(http: Http1 | Http2, server: ServerProcess) -> None:
    made = answer(ask(http, "completions", model="endless", prompt="", stop="ba"))
    assert made["choices"][0]["text"] == "a" and made["choices"][0]["finish_reason"] == "stop"
    until(lambda: live(server, "endless") == 0, "the model is told")


def test_a_model_without_end_must_be_streamed(http: Http1 | Http2, server: ServerProcess) -> None:
    reply = ask(http, "completions", model="endless", prompt="")
    assert reply.status == 500
    assert "more than 16777216 characters: stream them" in json.loads(reply.body)["error"]["message"]
    until(lambda: live(server, "endless") == 0, "the model is told")


def test_characters_may_be_cut_in_pieces(http: Http1 | Http2) -> None:
    reply = ask(http, "completions", model="bytes", prompt="aä€\U0001f600", stream=True)
    found = events(reply)
    pieces = [event["choices"][0]["text"] for event in found[:-2]]
    assert pieces == ["a", "ä", "€", "\U0001f600"]
    made = answer(ask(http, "completions", model="bytes", prompt="é\x00", stop="\x00"))
    assert made["choices"][0]["text"] == "é"


def test_a_client_that_leaves_cancels_its_choices(server: ServerProcess) -> None:
    body = json.dumps({"model": "endless", "prompt": "", "stream": True}).encode()
    client = Http1(server.http)
    client.start("POST", "/v1/completions", body)
    assert client.sock.recv(12) == b"HTTP/1.1 200"
    assert (
        live(server, "endless") == 1
    )  # it waits for its reader: what it could send without end takes no memory
    client.close()
    until(lambda: live(server, "endless") == 0, "the model is told")


@pytest.mark.slow
def test_a_token_for_some_models(repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "auth.toml"
    rows = [("one", ["infer", "read"], 'models = ["echo"]'), ("reader", ["read"], "")]
    file.write_text(
        "\n".join(
            f'[[token]]\nname = "{name}"\nhash = "sha256:{digest(name.encode()).hex()}"\n'
            f"scopes = {json.dumps(scopes)}\n{more}\n"
            for name, scopes, more in rows
        )
    )
    file.chmod(0o600)
    with ServerProcess(repository, f"--auth-config={file}") as server, Http1(server.http) as http:

        def status(path: str, token: str = "", **members: Any) -> int:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            body = json.dumps(members).encode()
            reply = http.request("POST" if members else "GET", f"/v1/{path}", body, headers)
            assert reply.status == 200 or "message" in json.loads(reply.body)["error"]
            return reply.status

        assert status("completions", "one", **COMPLETE) == 200
        assert status("completions", "one", model="whole", prompt="a") == 403
        assert status("embeddings", "one", model="embed", input="a") == 403
        assert status("completions", "reader", **COMPLETE) == 403
        assert status("completions", **COMPLETE) == 401
        reply = http.request("GET", "/v1/models", b"", {"Authorization": "Bearer one"})
        assert [row["id"] for row in json.loads(reply.body)["data"]] == ["echo"]


@pytest.mark.parametrize(
    ("roles", "text"),
    [
        ({"promt": "P"}, "parameter 'openai.promt' is unknown, expected openai. and one of"),
        ({"prompt": "P"}, "parameter 'openai.prompt' needs 'openai.text' beside it"),
        (
            {"prompt": "X", "text": "T"},
            "parameter 'openai.prompt' names input 'X', which the model does not have",
        ),
        ({"prompt": "P", "text": "T", "seed": "P"}, "input 'P' of 'openai.seed' must be TYPE_INT32 or"),
        ({"prompt": "P", "text": "T", "chat_template": "../x"}, "must name a file in the model's folder"),
        ({"prompt": "P", "text": "T", "chat_template": "none"}, "chat template 'none' cannot be read"),
        ({"prompt": "P", "text": "T", "chat_template": "bad"}, "chat template 'bad' is no template"),
        ({"messages": "P"}, "parameter 'openai.messages' needs 'openai.prompt' beside it"),
        (
            {"prompt": "P", "text": "T", "messages": "P", "chat_template": "bad"},
            "'openai.chat_template', not both",
        ),
        (
            {"prompt": "P", "text": "T", "messages": "P"},
            "input 'P' must be optional: a request has 'openai.prompt' or",
        ),
        ({"max_tokens": "P"}, "need 'openai.prompt' or 'openai.input'"),
    ],
)
def test_wrong_mappings_fail_the_load(tmp_path: Path, roles: dict[str, str], text: str) -> None:
    tensors = [
        f'{what} [ {{ name: "{name}" data_type: TYPE_STRING dims: [ 1 ] }} ]'
        for what, name in (("input", "P"), ("output", "T"))
    ]
    config = f'backend: "identity" {" ".join(tensors)} ' + "".join(role(*one) for one in roles.items())
    write_model(tmp_path, "m", config, {"bad": "{% for %}"})
    with ServerProcess(tmp_path, "--exit-on-error=false", "--strict-readiness=false") as server:
        with Http1(server.http) as http:
            (row,) = json.loads(http.request("POST", "/v2/repository/index").body)
    assert text in row["reason"]


@pytest.mark.parametrize(
    ("pieces", "stops", "sent"),
    [
        (["ab", "cd"], [], ["ab", "cd"]),
        (["ab", "cd"], ["bc"], ["a", ""]),
        (["ab", "xcd"], ["bc"], ["a", "bxcd"]),
        (["a", "b", "c", "e"], ["abcd"], ["", "", "", "abce"]),
        (["xaab"], ["b", "aa"], ["x"]),
        (["aa", "ab"], ["aab"], ["", "a"]),
    ],
)
def test_stops(pieces: list[str], stops: list[str], sent: list[str]) -> None:
    made = Stops(stops)
    assert [made.take(piece) for piece in pieces] == sent
    assert made.stopped == any(stop in "".join(pieces) for stop in stops)


def test_what_was_kept_back_is_sent_at_the_end() -> None:
    made = Stops(["abc"])
    assert made.take("xab") == "x" and made.rest() == "ab" and made.rest() == "" and not made.stopped


@pytest.mark.parametrize("stops", [["aab", "ab"], ["aaaa"], ["abcabd", "cab"], ["b"]])
def test_what_is_kept_back_is_the_longest_beginning_of_a_stop(stops: list[str]) -> None:
    for letters in itertools.product("abcd", repeat=5):
        text = "".join(letters)
        if any(stop in text for stop in stops):
            continue
        beginnings = [stop[:size] for stop in stops for size in range(1, len(stop))]
        kept = max((b for b in beginnings if text.endswith(b)), key=len, default="")
        made = Stops(stops)
        assert (made.take(text), made.rest()) == (text[: len(text) - len(kept)], kept)


@pytest.mark.slow
def test_sizes_of_what_is_asked(http: Http1 | Http2) -> None:
    longest = ask(http, "completions", model="whole", prompt="abc", stop="x" * 1024)
    assert answer(longest)["choices"][0]["text"] == "ABC"
    message = {"role": "user", "content": ""}
    many = [message] * 16385
    parts = {"role": "user", "content": [{"type": "text", "text": ""}] * 16384}
    long = {"role": "user", "content": "x" * ((4 << 20) + 1)}
    for path, members, said in (
        (
            "completions",
            {"prompt": "x", "stop": ["a", "x" * 1025]},
            "texts of at most 1024 characters, got one of 1025",
        ),
        ("chat/completions", {"messages": many}, "16385 messages, of at most 16384"),
        ("chat/completions", {"messages": [parts]}, "more than 16384 messages and parts"),
        ("chat/completions", {"messages": [long]}, "more than 4194304 characters"),
        ("completions", {"prompt": [["x" * 100] * 1000] * 20}, "(tokens are not taken)"),
    ):
        reply = ask(http, path, model="echo", **members)
        assert reply.status == 400 and said in json.loads(reply.body)["error"]["message"], reply.body[:500]
        assert len(reply.body) < 500


@pytest.mark.slow
def test_each_choice_counts_in_the_limits_of_an_address(repository: Path) -> None:
    with ServerProcess(repository, "--max-concurrent-requests-per-address=4") as server:
        with Http1(server.http) as http:
            assert (
                len(answer(ask(http, "completions", model="whole", prompt=["a", "b"], n=2))["choices"]) == 4
            )
            for path, members in (
                ("completions", {"model": "whole", "prompt": "a", "n": 5}),
                ("embeddings", {"model": "embed", "input": ["a"] * 128}),
            ):
                reply = ask(http, path, **members)
                assert reply.status == 429, reply.body
                assert "of 4 that it may have" in json.loads(reply.body)["error"]["message"]
            # nothing of what was refused or answered is under way any more
            assert len(answer(ask(http, "completions", model="whole", prompt="a", n=4))["choices"]) == 4


@pytest.mark.slow
def test_the_bytes_of_a_prompt_are_counted_once(repository: Path) -> None:
    with ServerProcess(repository, "--max-held-bytes=8000000") as server, Http1(server.http) as http:
        prompt = "x" * 1000000
        made = answer(ask(http, "completions", model="echo", prompt=prompt, n=16, max_tokens=1))
        assert [choice["text"] for choice in made["choices"]] == ["x"] * 16
        reply = ask(
            http, "completions", model="echo", prompt=[letter * 1000000 for letter in "abcd"], max_tokens=1
        )
        assert reply.status == 503 and "(--max-held-bytes)" in json.loads(reply.body)["error"]["message"]
        assert (
            len(answer(ask(http, "completions", model="echo", prompt=prompt, max_tokens=1))["choices"]) == 1
        )
