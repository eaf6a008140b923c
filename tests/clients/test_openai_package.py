"""The public package `openai` against the test models and against the example that is in the repository."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.servers import EXAMPLES, PYTHON
from tests.support.openai_models import write_models
from tests.support.server import ServerProcess

openai = pytest.importorskip("openai", reason="run by make test-clients")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("openai")
    write_models(folder)
    examples = f"--model-repository={EXAMPLES.parent / 'openai_repository'}"
    flags = [
        "--model-control-mode=explicit",
        *(f"--load-model={n}" for n in ("echo", "embed", "shakespeare")),
    ]
    with ServerProcess(folder, examples, *flags, python=PYTHON) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["echo", "embed", "shakespeare"]
    assert client.models.retrieve("echo").id == "echo"
    with pytest.raises(openai.NotFoundError) as info:
        client.models.retrieve("nothing")
    assert info.value.code == "model_not_found"


def test_completions(client: Any) -> None:
    made = client.completions.create(model="echo", prompt="abc", max_tokens=2, n=2)
    assert [choice.text for choice in made.choices] == ["ab", "ab"]
    assert made.choices[0].finish_reason == "length" and made.usage.total_tokens == 7
    chunks = list(client.completions.create(model="echo", prompt="abc", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abc"


def test_chat(client: Any) -> None:
    messages = [{"role": "user", "content": "hello"}]
    made = client.chat.completions.create(model="echo", messages=messages, stop=["lo"])
    assert made.choices[0].message.content == "user:hel"
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model="echo", messages=messages, stream=True, stream_options=options
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "user:hello;"
    assert chunks[-1].usage.completion_tokens == len("user:hello;")


def test_embeddings(client: Any) -> None:
    made = client.embeddings.create(model="embed", input=["banana", "kiwi"])  # it asks for base64 by itself
    assert [row.embedding for row in made.data] == [[6.0, 3.0, 0.5], [4.0, 0.0, 0.5]]
    made = client.embeddings.create(model="embed", input="kiwi", encoding_format="float")
    assert made.data[0].embedding == [4.0, 0.0, 0.5] and made.usage.prompt_tokens == 4


def test_errors(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="'temperature' is not supported by model 'echo'"):
        client.completions.create(model="echo", prompt="a", temperature=0.1)
    with pytest.raises(openai.InternalServerError, match="no shouting"):
        client.completions.create(model="echo", prompt="!")
    with pytest.raises(openai.APIError, match="no shouting"):
        list(client.completions.create(model="echo", prompt="a!", stream=True))


def test_the_example_writes_on(client: Any) -> None:
    ask = {"model": "shakespeare", "prompt": "Shall I compare", "max_tokens": 5, "temperature": 0}
    made = client.completions.create(**ask)
    assert made.choices[0].text == " thee to a summer's day?" and made.choices[0].finish_reason == "stop"
    assert made.usage.completion_tokens == 5
    drawn = [
        client.completions.create(**{**ask, "seed": 7, "temperature": 1.5}).choices[0].text for _ in "ab"
    ]
    assert drawn[0] == drawn[1]
    messages = [{"role": "user", "content": "To sleep, perchance to"}]
    made = client.chat.completions.create(model="shakespeare", messages=messages, temperature=0, max_tokens=1)
    assert made.choices[0].message.content.split() == ["dream:"]


def test_the_asynchronous_client(server: ServerProcess) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"http://{server.http}/v1", api_key="none") as client:

            async def one(i: int) -> str:
                stream = await client.completions.create(model="echo", prompt=f"text {i}", stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            assert await asyncio.gather(*(one(i) for i in range(8))) == [f"text {i}" for i in range(8)]

    asyncio.run(main())
