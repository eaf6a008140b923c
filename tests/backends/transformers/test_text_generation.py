"""Text of Hugging Face decoders: token by token, together, and by OpenAI's API. `make test-backends` runs these."""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neptrio_backends import transformers as backend
from neptrio_backends.transformers.hf_sampling import Chooser, Sampling
from tests.backends.transformers import tiny_models
from tests.support.control import load
from tests.support.http import Http1
from tests.support.repository import write_model
from tests.support.server import ServerProcess

torch = pytest.importorskip("torch", reason="make test-backends")
transformers = pytest.importorskip("transformers", reason="make test-backends")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PROMPTS = [
    "the cat",
    "a very long dream of fish and milk",
    "sun",
    "anna looked at me in paris !",
    "rain on a mat .",
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    repository = tmp_path_factory.mktemp("models")
    models: dict[str, Any] = {"repository": repository}
    kinds = (("text", tiny_models.llama), ("window", tiny_models.mistral), ("state", tiny_models.mamba))
    for name, make in kinds:
        folder = write_model(repository, name, "")
        (folder / "config.pbtxt").unlink()
        models[name] = make(folder / "1")
        models["reader"] = transformers.AutoTokenizer.from_pretrained(folder / "1")
    return models


@pytest.fixture(scope="module")
def server(made: dict[str, Any]) -> Iterator[ServerProcess]:
    flags = ("--model-control-mode=explicit",)
    with ServerProcess(made["repository"], *flags, env=dict(os.environ, PYTHONWARNINGS="")) as server:
        for name in ("text", "window", "state"):  # one after the other: each imports torch twice
            load(server, name)
        yield server


def expected(made: dict[str, Any], name: str, prompt: str, most: int) -> tuple[str, int]:
    """The text that the library itself makes, and its number of tokens."""
    reader = made["reader"]
    ids = reader(prompt, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        found = made[name].generate(ids, max_new_tokens=most, do_sample=False, pad_token_id=0)
    new = found[0, ids.shape[1] :].tolist()
    whole = reader.decode(found[0], skip_special_tokens=True)
    return whole[len(reader.decode(ids[0], skip_special_tokens=True)) :], len(new)


def complete(server: ServerProcess, path: str = "completions", **members: Any) -> Any:
    with Http1(server.http) as http:
        reply = http.request("POST", f"/v1/{path}", json.dumps(members).encode())
    assert reply.status == 200, reply.body
    return json.loads(reply.body)


@pytest.mark.parametrize("name", ["text", "window", "state"])
def test_text_made_together_is_that_of_each_alone(
    server: ServerProcess, made: dict[str, Any], name: str
) -> None:
    most = [30, 3, 17, 8, 25]
    asked = list(zip(PROMPTS, most, strict=True)) * 2
    with ThreadPoolExecutor(10) as pool:
        answers = list(
            pool.map(lambda one: complete(server, model=name, prompt=one[0], max_tokens=one[1]), asked)
        )
    for (prompt, count), answer in zip(asked, answers, strict=True):
        text, tokens = expected(made, name, prompt, count)
        (choice,) = answer["choices"]
        assert choice["text"] == text, prompt
        assert answer["usage"]["completion_tokens"] == tokens
        assert answer["usage"]["prompt_tokens"] == len(made["reader"](prompt)["input_ids"])
        assert choice["finish_reason"] == ("length" if tokens == count else "stop")


def test_conversations(server: ServerProcess, made: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    made_text = complete(server, "chat/completions", model="text", messages=messages, max_tokens=9)
    prompt = made["reader"].decode([2]) + "the cat sat . "
    ids = made["reader"](prompt, add_special_tokens=False)["input_ids"]
    assert ids[0] == 2 and made_text["usage"]["prompt_tokens"] == len(ids)
    with torch.no_grad():
        found = made["text"].generate(torch.tensor([ids]), max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert made_text["choices"][0]["message"]["content"].strip() == made["reader"].decode(
        found[0, len(ids) :], skip_special_tokens=True
    )
    with Http1(server.http) as http:
        body = {"model": "text", "messages": [{"role": "tool", "content": "x"}]}
        reply = http.request("POST", "/v1/chat/completions", json.dumps(body).encode())
        assert reply.status == 400 and "no tools here" in reply.body.decode(), reply.body
        reply = http.request("POST", "/v1/chat/completions", json.dumps({**body, "model": "window"}).encode())
        assert reply.status == 400 and "has no chat template" in reply.body.decode()


def test_a_stream_and_seeds(server: ServerProcess) -> None:
    asked = {"model": "text", "prompt": "the cat", "max_tokens": 12, "temperature": 1.5, "seed": 11}
    whole = complete(server, **asked)["choices"][0]["text"]
    assert complete(server, **asked)["choices"][0]["text"] == whole
    others = {complete(server, **{**asked, "seed": seed})["choices"][0]["text"] for seed in range(4)}
    assert len(others) > 1
    with Http1(server.http) as http:
        reply = http.request("POST", "/v1/completions", json.dumps({**asked, "stream": True}).encode())
    events = [json.loads(block[6:]) for block in reply.body.decode().split("\n\n")[:-2]]
    pieces = [event["choices"][0]["text"] for event in events]
    assert "".join(pieces) == whole and sum(map(bool, pieces)) > 3


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"prompt": "fish " * 80}, "a prompt of 80 tokens leaves no room for text: the model takes 64"),
        ({"prompt": "fish", "temperature": 3}, "'temperature' must be a number from 0 to 2"),
    ],
)
def test_refusals(server: ServerProcess, members: dict[str, Any], text: str) -> None:
    with Http1(server.http) as http:
        reply = http.request("POST", "/v1/completions", json.dumps({"model": "text", **members}).encode())
    assert reply.status == 400 and text in reply.body.decode(), reply.body


def test_tensors_in_and_out(server: ServerProcess, made: dict[str, Any]) -> None:
    ids = made["reader"]("the cat")["input_ids"]
    body = json.dumps({"INPUT_IDS": ids, "MAX_TOKENS": 5}).encode()
    with Http1(server.http) as http:
        reply = http.request("POST", "/v2/models/text/generate_stream", body)
    assert reply.status == 200, reply.body
    events = [json.loads(block[6:]) for block in reply.body.decode().split("\n\n") if block]
    with torch.no_grad():
        found = made["text"].generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert np.ravel([event["TOKENS"] for event in events]).tolist() == found[0, len(ids) :].tolist()
    assert [event["FINISH_REASON"] for event in events][-1] in ("stop", "length")


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with those beside it where it looks for them."""
    monkeypatch.syspath_prepend(str(Path(backend.__file__).parent))
    from neptrio_backends.transformers import hf_generate

    return hf_generate


def test_one_call_makes_a_token_for_each(made: dict[str, Any], generate: Any) -> None:
    model, ready, told = made["text"], threading.Event(), queue.SimpleQueue[Any]()
    calls: list[int] = []

    def called(module: Any, given: Any, named: Any, result: Any) -> None:
        ready.wait()
        calls.append(len(named["input_ids"]))

    hook = model.register_forward_hook(called, with_kwargs=True)
    generator = generate.Generator(model, set(), 4)
    assert generator.joins

    def add(prompt: list[int], most: int, wanted: Any = lambda: True) -> None:
        end = lambda token, why: why and told.put(why)  # noqa: E731
        generator.add(generate.Sequence(prompt, most, Chooser(Sampling()), wanted, end, told.put))

    try:
        add([5], 10)
        for most in (2, 4, 6):
            add([6, 7, 8], most)
        add([9], 5)  # waits for a place
        left = iter([True, True, False])
        add([9], 50, lambda: next(left))
        ready.set()
        ends = [told.get(timeout=60) for _ in range(6)]
    finally:
        generator.close()
        hook.remove()
    assert (
        sorted(map(str, ends)) == ["", *["length"] * 5]
        and sum(isinstance(end, generate.Unwanted) for end in ends) == 1
    )
    assert sum(calls) == 10 + 2 + 4 + 6 + 5 + 2 and max(calls) == 4 and len(calls) <= 16


def test_a_model_that_keeps_a_state_in_itself_is_refused(generate: Any) -> None:
    config = transformers.RecurrentGemmaConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        lru_width=16,
    )
    with pytest.raises(ValueError, match="keeps the state of one text in itself, which is not served"):
        generate.Generator(transformers.RecurrentGemmaForCausalLM(config), {3}, 4)


def test_a_failing_call_is_told_to_its_sequences_alone(made: dict[str, Any], generate: Any) -> None:
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    generator = generate.Generator(made["text"], set(), 4)
    try:
        for prompt in ([1 << 20], [5]):  # a token that the table has not
            generator.add(
                generate.Sequence(
                    prompt, 1, Chooser(Sampling()), lambda: True, lambda token, why: told.put(why), told.put
                )
            )
            found = told.get(timeout=60)
            assert isinstance(found, IndexError) if prompt[0] > 5 else found == "length"
    finally:
        generator.close()
