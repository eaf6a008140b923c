"""Hugging Face folders through the server. `make test-backends` runs these, where torch and transformers are installed."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.backends.transformers import tiny_models
from tests.support.control import load, post
from tests.support.http import Http1
from tests.support.repository import write_model
from tests.support.server import ServerProcess

torch = pytest.importorskip("torch", reason="make test-backends")
transformers = pytest.importorskip("transformers", reason="make test-backends")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

NAMES = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC"}
MODELS: dict[str, Any] = {
    "labels": lambda folder: tiny_models.bert(folder, "ForSequenceClassification", num_labels=3, id2label={0: "a", 1: "b", 2: "c"}),
    "words": lambda folder: tiny_models.bert(folder, "ForTokenClassification", num_labels=4, id2label=NAMES),
    "masks": lambda folder: tiny_models.bert(folder, "ForMaskedLM"),
    "vectors": lambda folder: tiny_models.bert(folder, "Model"),
    "images": tiny_models.vit,
    "text": tiny_models.llama,
    "window": tiny_models.mistral,
}  # fmt: skip
DELAY = "dynamic_batching { max_queue_delay_microseconds: 300000 preferred_batch_size: 32 }"
CONFIGS = {
    "labels": f'backend: "transformers" {DELAY} instance_group {{ count: 2 kind: KIND_CPU }}',
    "words": 'backend: "transformers" parameters { key: "aggregation" value { string_value: "simple" } }',
    "vectors": 'backend: "transformers" output [ { name: "EMBEDDING" data_type: TYPE_FP32 dims: [ 16 ] }, '
    '{ name: "HIDDEN_STATES" data_type: TYPE_FP32 dims: [ -1, 16 ] } ]',
}
REFUSED = {
    "pickle": "pytorch_model.bin: that is a pickle",
    "code": "the model type 'mine', which transformers",
    "untrained": "has no weights for classifier",
    "trusting": "code in a model's folder is never run",
    "misfit": "weights that do not fit its config.json: classifier.",
    "unknown": "text-classification has no output 'SCORES': its outputs are RESULT, LOGITS",
}


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return {}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, made: dict[str, Any]) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("models")
    for name, make in MODELS.items():
        folder = write_model(repository, name, CONFIGS.get(name, ""))
        if name not in CONFIGS:
            (folder / "config.pbtxt").unlink()
        made[name] = make(folder / "1")
    parameter = 'backend: "transformers" parameters {{ key: "{}" value {{ string_value: "{}" }} }}'
    for name in REFUSED:
        folder = write_model(repository, name, 'backend: "transformers"')
        tiny_models.bert(folder / "1", "Model" if name == "untrained" else "ForSequenceClassification")
    (repository / "pickle/1/model.safetensors").rename(repository / "pickle/1/pytorch_model.bin")
    config = repository / "code/1/config.json"
    text = config.read_text().replace('"model_type": "bert"', '"model_type": "mine"')
    config.write_text(text.replace("{", '{"auto_map": {"AutoModel": "mine.Mine"},', 1))
    (repository / "code/1/mine.py").write_text("raise SystemExit('code of the folder runs')")
    misfit = repository / "misfit/1/config.json"
    labels = {str(i): f"label {i}" for i in range(5)}
    misfit.write_text(json.dumps(json.loads(misfit.read_text()) | {"id2label": labels}))
    (repository / "untrained/config.pbtxt").write_text(parameter.format("task", "text-classification"))
    (repository / "trusting/config.pbtxt").write_text(parameter.format("trust_remote_code", "true"))
    (repository / "unknown/config.pbtxt").write_text(
        'backend: "transformers" output { name: "SCORES" data_type: TYPE_FP32 dims: [ 2 ] }'
    )
    flags = ("--exit-on-error=false", "--model-control-mode=explicit")
    with ServerProcess(repository, *flags, env=dict(os.environ, PYTHONWARNINGS="")) as server:
        for folder in sorted(
            repository.iterdir()
        ):  # one after the other: each imports torch, most of them twice
            load(server, folder.name)
        yield server


def ask(server: ServerProcess, model: str, *outputs: str, **arrays: Any) -> Any:
    """The response of a model. Lists of texts have a row each."""
    inputs = []
    for name, value in arrays.items():
        array = np.array(value, object).reshape(-1, 1) if isinstance(value, list) else value
        kind = {"O": "BYTES", "f": "FP32", "i": "INT64"}[array.dtype.kind]
        inputs.append(httpclient.InferInput(name, list(array.shape), kind))
        inputs[-1].set_data_from_numpy(array)
    with httpclient.InferenceServerClient(server.http) as client:
        return client.infer(
            model, inputs, outputs=[httpclient.InferRequestedOutput(name) for name in outputs] or None
        )


def result(response: Any) -> list[Any]:
    return [json.loads(text) for text in response.as_numpy("RESULT").ravel()]


def alone(made: dict[str, Any], name: str, text: str, pair: str | None = None) -> tuple[Any, list[int]]:
    """What the model makes of one text without us, and its tokens."""
    model = made[name]
    reader = (
        transformers.AutoTokenizer.from_pretrained(model.name_or_path) if model.name_or_path else READER[0]
    )
    tokens = reader(text, pair, return_tensors="pt")
    with torch.no_grad():
        return model(**tokens), tokens["input_ids"][0].tolist()


READER: list[Any] = []


@pytest.fixture(scope="module", autouse=True)
def reader(tmp_path_factory: pytest.TempPathFactory) -> None:
    READER.append(tiny_models.tokenizer(tmp_path_factory.mktemp("tokenizer")))


TEXTS = [
    "the cat sat .",
    "fish",
    "a very long dream of milk and sun and rain in paris !",
    "anna looked at me",
]


def test_a_folder_alone_is_enough(server: ServerProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        found = {name: client.get_model_config(name) for name in MODELS}
    for name, config in found.items():
        assert config["backend"] == "transformers"
        assert config["max_batch_size"] == (0 if name in ("text", "window") else 32), name
        assert "dynamic_batching" in config or config["model_transaction_policy"]["decoupled"]
    assert [row["name"] for row in found["masks"]["output"]] == ["RESULT"]
    assert (
        "openai.messages" in found["text"]["parameters"]
        and "openai.messages" not in found["window"]["parameters"]
    )


def test_texts_of_many_lengths_are_one_batch(server: ServerProcess, made: dict[str, Any]) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda text: ask(server, "labels", TEXT=[text]), TEXTS * 2))
    for text, answer in zip(TEXTS * 2, answers, strict=True):
        expected, _ = alone(made, "labels", text)
        np.testing.assert_allclose(answer.as_numpy("LOGITS"), expected.logits.numpy(), 1e-4, 1e-4)
        (rows,) = result(answer)
        chances = torch.softmax(expected.logits[0], 0).tolist()
        assert [row["label"] for row in rows] == ["abc"[i] for i in np.argsort(chances)[::-1]]
        np.testing.assert_allclose([row["score"] for row in rows], sorted(chances, reverse=True), 1e-4, 1e-5)
    with httpclient.InferenceServerClient(server.http) as client:
        (row,) = client.get_inference_statistics("labels")["model_stats"]
    assert row["inference_count"] == 8 and row["execution_count"] < 8


def test_pairs_and_tokens(server: ServerProcess, made: dict[str, Any]) -> None:
    expected, ids = alone(made, "labels", "the cat", "sat !")
    found = ask(server, "labels", "LOGITS", TEXT=["the cat", "fish"], TEXT_PAIR=["sat !", "milk"]).as_numpy(
        "LOGITS"
    )
    np.testing.assert_allclose(found[:1], expected.logits.numpy(), 1e-4, 1e-4)
    expected, ids = alone(made, "labels", "a cat")
    padded = np.array([[*ids, 0, 0]])
    found = ask(server, "labels", INPUT_IDS=padded, ATTENTION_MASK=(padded > 0).astype(np.int64)).as_numpy(
        "LOGITS"
    )
    np.testing.assert_allclose(found, expected.logits.numpy(), 1e-4, 1e-4)


def test_what_words_are(server: ServerProcess, made: dict[str, Any]) -> None:
    answer = ask(server, "words", TEXT=TEXTS)
    logits = answer.as_numpy("LOGITS")
    for text, rows, found in zip(TEXTS, result(answer), logits, strict=True):
        expected, ids = alone(made, "words", text)
        np.testing.assert_allclose(found[: len(ids)], expected.logits[0].numpy(), 1e-4, 1e-4)
        assert not found[len(ids) :].any()
        labels = [NAMES[i] for i in expected.logits[0].argmax(-1).tolist()][1:-1]
        covered = "".join(text[row["start"] : row["end"]].replace(" ", "") for row in rows)
        words = [word for word, label in zip(text.split(), labels, strict=True) if label != "O"]
        assert covered == "".join(words)
        assert {row["entity_group"] for row in rows} == {label[2:] for label in labels if label != "O"}


def test_missing_words(server: ServerProcess, made: dict[str, Any]) -> None:
    text = "the [MASK] sat on a mat"
    expected, ids = alone(made, "masks", text)
    chances = torch.softmax(expected.logits[0, ids.index(4)], 0)
    best = chances.topk(5)
    one, two = result(ask(server, "masks", TEXT=[text, "[MASK] [MASK] fish"]))
    assert [row["token"] for row in one] == best.indices.tolist()
    np.testing.assert_allclose([row["score"] for row in one], best.values.numpy(), 1e-4)
    assert len(two) == 2 and [len(rows) for rows in two] == [5, 5]
    with pytest.raises(InferenceServerException, match=r"the text has no \[MASK\]"):
        ask(server, "masks", TEXT=["no mask"])


def test_vectors(server: ServerProcess, made: dict[str, Any]) -> None:
    answer = ask(server, "vectors", TEXT=TEXTS)
    for text, vector, states in zip(
        TEXTS, answer.as_numpy("EMBEDDING"), answer.as_numpy("HIDDEN_STATES"), strict=True
    ):
        expected, ids = alone(made, "vectors", text)
        hidden = expected.last_hidden_state[0].numpy()
        np.testing.assert_allclose(states[: len(ids)], hidden, 1e-4, 1e-4)
        np.testing.assert_allclose(vector, hidden.mean(0), 1e-4, 1e-4)


def test_images(server: ServerProcess, made: dict[str, Any]) -> None:
    from PIL import Image

    pixels = np.random.default_rng(2).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    values = ((pixels.astype(np.float32) / 255 - 0.5) / 0.5).transpose(2, 0, 1)[None]
    with torch.no_grad():
        expected = made["images"](torch.from_numpy(values)).logits.numpy()
    for given in ({"IMAGE": [content.getvalue()]}, {"PIXEL_VALUES": np.ascontiguousarray(values)}):
        answer = ask(server, "images", **given)
        np.testing.assert_allclose(answer.as_numpy("LOGITS"), expected, 1e-3, 1e-3)
        (rows,) = result(answer)
        assert rows[0]["label"] == ["cat", "dog", "fish"][int(expected[0].argmax())]
    with pytest.raises(InferenceServerException, match="is no image of PNG, JPEG"):
        ask(server, "images", IMAGE=[b"GIF8 and more"])
    thin = io.BytesIO()
    Image.new("RGB", (1, 100)).save(thin, "PNG")
    with pytest.raises(InferenceServerException, match="an image of 1 x 100 pixels is too large or too thin"):
        ask(server, "images", IMAGE=[thin.getvalue()])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "one of the inputs TEXT or INPUT_IDS"),
        ({"TEXT": ["fish " * 30]}, "a text of 32 tokens: the model takes 24; the parameter 'truncation'"),
        ({"TEXT": [b"\xff"]}, "input 'TEXT' is no UTF-8"),
        ({"INPUT_IDS": np.array([[64]])}, "tokens must be numbers from 0 to 63, got 64 to 64"),
        ({"INPUT_IDS": np.array([[-1]])}, "got -1 to -1"),
        ({"INPUT_IDS": np.array([[1]]), "ATTENTION_MASK": np.array([[2]])}, "must be 0 or 1 for each"),
    ],
)
def test_what_is_wrong_in_a_request(server: ServerProcess, given: dict[str, Any], text: str) -> None:
    if not given:
        with Http1(server.http) as http:
            reply = http.request("POST", "/v2/models/labels/infer", b'{"inputs": []}')
        assert reply.status == 400 and text in reply.body.decode(), reply.body
        return
    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(ask, server, "labels", TEXT=["fish"])  # of the same batch
        with pytest.raises(InferenceServerException, match=text) as raised:
            ask(server, "labels", **given)
        assert raised.value.status() == "400" and len(result(good.result())) == 1


def test_what_cannot_be_served_says_why(server: ServerProcess) -> None:
    rows = {row["name"]: row.get("reason", "") for row in json.loads(post(server, "index").body)}
    assert {name for name, reason in rows.items() if reason} == set(REFUSED)
    for name, reason in REFUSED.items():
        assert reason in rows[name]
