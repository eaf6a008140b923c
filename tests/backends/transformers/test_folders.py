"""What is decided without torch: what a folder holds, who is padded with whom, which token is next, what a piece of text is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neptrio.config import defaults, model_config
from neptrio.config.model_config import ConfigSource
from neptrio.errors import InvalidArgument
from neptrio_backends.transformers import hf_folder, hf_lengths, hf_results
from neptrio_backends.transformers.hf_folder import Parameters
from neptrio_backends.transformers.hf_sampling import Chooser, Pieces, Sampling

BERT = {"architectures": ["BertForSequenceClassification"], "model_type": "bert", "hidden_size": 8}


def folder(path: Path, config: dict[str, Any], **files: Any) -> Path:
    """A folder with such a config.json; `files`: names with _ in place of the dot."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    for name, content in {"model_safetensors": "", "tokenizer_json": {}, **files}.items():
        if content is not None:
            place = path / ".".join(name.rsplit("_", 1))
            place.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("BertForSequenceClassification", "text-classification"),
        ("XLMRobertaForTokenClassification", "token-classification"),
        ("BertForMaskedLM", "fill-mask"),
        ("BertModel", "feature-extraction"),
        ("GPT2LMHeadModel", "text-generation"),
        ("LlamaForCausalLM", "text-generation"),
        ("ViTForImageClassification", "image-classification"),
    ],
)
def test_the_architecture_tells_the_task(tmp_path: Path, name: str, task: str) -> None:
    found = hf_folder.read(str(folder(tmp_path, {**BERT, "architectures": [name]})), Parameters())
    assert (found.task, found.architecture) == (task, name)
    assert found.tokenizer == (task != "image-classification")
    inputs, outputs = hf_folder.tensors(found)
    assert all(row.get("optional") for row in inputs) and not any(row.get("optional") for row in outputs)


def test_limits_of_a_text(tmp_path: Path) -> None:
    def longest(config: dict[str, Any], *, most: int = 0, **files: Any) -> tuple[int, bool]:
        found = hf_folder.read(
            str(folder(tmp_path, {**BERT, **config}, **files)), Parameters(max_length=most)
        )
        return found.longest, found.truncates

    assert longest({}) == (0, False)
    assert longest({"max_position_embeddings": 512}) == (512, False)
    roberta = {"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}
    assert longest(roberta) == (512, False)
    unlimited = {"model_max_length": 10**30}
    assert longest({"max_position_embeddings": 512}, tokenizer_config_json=unlimited) == (512, False)
    assert longest({"max_position_embeddings": 512}, tokenizer_config_json={"model_max_length": 128}) == (
        128,
        False,
    )
    assert longest({"max_position_embeddings": 512}, most=64) == (64, False)
    assert longest({}, sentence_bert_config_json={"max_seq_length": 100}) == (100, True)


def test_how_sentences_are_pooled(tmp_path: Path) -> None:
    path = folder(tmp_path, {**BERT, "architectures": ["BertModel"]})
    found = hf_folder.read(str(path), Parameters())
    assert (found.pooling, found.normalizes) == ("mean", False)
    modules = [
        {"path": name, "type": f"sentence_transformers.models.{kind}"}
        for name, kind in (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    pooling = path / "1_Pooling/config.json"
    pooling.write_text(json.dumps({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}))
    found = hf_folder.read(str(path), Parameters())
    assert (found.pooling, found.normalizes) == ("cls", True)
    found = hf_folder.read(str(path), Parameters(pooling="max", normalize="false"))
    assert (found.pooling, found.normalizes) == ("max", False)
    pooling.write_text(json.dumps({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}))
    with pytest.raises(ValueError, match="in a way that is not served: the parameter 'pooling' names"):
        hf_folder.read(str(path), Parameters())
    (path / "modules.json").write_text(json.dumps([*modules, {"type": "sentence_transformers.models.Dense"}]))
    with pytest.raises(ValueError, match="has a module 'Dense', which is not served"):
        hf_folder.read(str(path), Parameters())


@pytest.mark.parametrize(
    ("config", "files", "text"),
    [
        (BERT, {"model_safetensors": None, "pytorch_model_bin": "x"}, "pytorch_model.bin: that is a pickle, which runs"),
        (
            BERT,
            {"model.safetensors.index_json": {"weight_map": {"a": "../../x.safetensors"}}},
            "names '../../x.safetensors': expected files of this folder",
        ),
        (BERT, {"model_safetensors": None}, "has no model.safetensors or model.safetensors.index.json"),
        (BERT, {"adapter_config_json": {}}, "holds an adapter: merge it into its model"),
        ({"architectures": ["T5ForConditionalGeneration"]}, {}, "the architecture 'T5ForConditionalGeneration': served are"),
        ({}, {}, "has no architecture: served are text-classification"),
        ({"architectures": ["GPT2LMHeadModel"]}, {"tokenizer_json": None}, "text cannot be made without one"),
        (BERT, {"tokenizer_config_json": "{"}, "tokenizer_config.json cannot be read"),
        (BERT, {"tokenizer_config_json": "[]"}, "tokenizer_config.json is no JSON object"),
    ],
)  # fmt: skip
def test_folders_that_are_refused(tmp_path: Path, config: Any, files: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        hf_folder.read(str(folder(tmp_path, config, **files)), Parameters())


def test_parameters() -> None:
    def read(**given: str) -> Parameters:
        return hf_folder.parameters(
            {"parameters": {key: {"string_value": value} for key, value in given.items()}}
        )

    assert read() == Parameters()
    assert read(task="fill-mask", top_k="3", other="x") == Parameters(task="fill-mask", top_k=3)
    for given, text in (
        ({"task": "translation"}, "parameter 'task' must be one of text-classification"),
        ({"top_k": "0"}, "parameter 'top_k' must be a number above 0"),
        ({"trust_remote_code": "true"}, "code in a model's folder is never run"),
    ):
        with pytest.raises(ValueError, match=text):
            read(**given)


def test_the_server_knows_such_a_folder(tmp_path: Path) -> None:
    def backend() -> str:
        source = ConfigSource(model_config.new_config(), "c", "")
        defaults.identify(source, "m", tmp_path, True)
        return str(source.config.backend)

    folder(tmp_path / "1", BERT)
    assert backend() == "transformers"
    (tmp_path / "1/model.safetensors").rename(tmp_path / "1/pytorch_model.bin")
    assert backend() == "transformers"  # which says why it is refused
    (tmp_path / "1/config.json").unlink()
    with pytest.raises(InvalidArgument, match="must specify 'backend'"):
        backend()


def test_rows_are_padded_with_those_of_their_length() -> None:
    assert hf_lengths.groups([]) == []
    assert hf_lengths.groups([3, 1, 2]) == [[1, 2, 0]]
    # one long row among short ones costs a call of its own, not their padding
    assert hf_lengths.groups([500, *[4] * 8, 490]) == [[1, 2, 3, 4, 5, 6, 7, 8], [9, 0]]
    assert hf_lengths.groups([5, 4, 5, 4], pads=False) == [[1, 3], [0, 2]]
    assert hf_lengths.groups([6, 6, 6], most=12) == [[0, 1], [2]]
    assert hf_lengths.groups([60], most=12) == [[0]]
    lengths = np.random.default_rng(1).integers(1, 2000, 200).tolist()
    groups = hf_lengths.groups(lengths)
    assert sorted(i for group in groups for i in group) == list(range(200))
    for group in groups:
        places = len(group) * max(lengths[i] for i in group)
        padding = places - sum(lengths[i] for i in group)
        assert (places <= 1 << 14 or len(group) == 1) and padding <= max(256, places // 4)


def test_what_is_made_of_scores() -> None:
    scores = np.array([1.0, 3.0, 2.0])
    assert hf_results.chances(scores, "").sum() == pytest.approx(1)
    assert hf_results.chances(scores, "regression") is scores
    assert hf_results.chances(scores, "multi_label_classification")[0] == pytest.approx(1 / (1 + np.exp(-1)))
    assert hf_results.chances(np.array([-2000.0]), "").tolist() == [0]
    assert [row["label"] for row in hf_results.ranked(scores, ["a", "b", "c"], 2)] == ["b", "c"]
    text, labels = "anna b paris now", ["O", "B-PER", "I-PER", "B-LOC"]
    best = np.eye(4)[[0, 1, 2, 3, 0, 0]]
    offsets = [(0, 0), (0, 4), (5, 6), (7, 12), (13, 16), (0, 0)]
    found = hf_results.words(best, labels, offsets, [1, 0, 0, 0, 0, 1], text)
    assert [(row["entity"], row["word"], row["index"]) for row in found] == [
        ("B-PER", "anna", 1), ("I-PER", "b", 2), ("B-LOC", "paris", 3),
    ]  # fmt: skip
    assert [(row["entity_group"], row["word"], row["start"], row["end"]) for row in hf_results.joined(found, text)] == [
        ("PER", "anna b", 0, 6), ("LOC", "paris", 7, 12),
    ]  # fmt: skip


def test_tokens_are_chosen_as_asked() -> None:
    scores = np.log(np.array([0.1, 0.2, 0.3, 0.4]))

    def drawn(count: int = 4000, **how: Any) -> np.ndarray:
        chooser = Chooser(Sampling(seed=5, **how))
        return np.bincount([chooser.choose(scores, []) for _ in range(count)], minlength=4) / count

    assert drawn(1).tolist() == [0, 0, 0, 1]
    np.testing.assert_allclose(drawn(temperature=1.0), [0.1, 0.2, 0.3, 0.4], atol=0.03)
    np.testing.assert_allclose(drawn(temperature=0.5), np.array([1, 4, 9, 16]) / 30, atol=0.03)
    np.testing.assert_allclose(drawn(temperature=1.0, top_k=2), [0, 0, 3 / 7, 4 / 7], atol=0.03)
    np.testing.assert_allclose(drawn(temperature=1.0, top_p=0.6), [0, 0, 3 / 7, 4 / 7], atol=0.03)
    assert drawn(50, temperature=1.0, top_p=0.0).tolist() == [0, 0, 0, 1]
    assert Chooser(Sampling(penalty=9.0)).choose(np.array([1.0, 2.0, 3.0]), [2, 2]) == 1
    assert Chooser(Sampling(penalty=9.0)).choose(np.array([-3.0, -1.0]), [1]) == 0
    # more tokens than are looked at first
    flat = np.zeros(5000)
    chosen = {Chooser(Sampling(1.0, top_p=0.99, seed=seed)).choose(flat, []) for seed in range(300)}
    assert max(chosen) > 1100
    same = [Chooser(Sampling(1.0, seed=3)).choose(flat, []) for _ in range(2)]
    assert same[0] == same[1]


def test_pieces_of_text_are_whole_characters() -> None:
    parts = [b"a", *[bytes([byte]) for byte in "€".encode()], b"b", b"\xff", b"c", b""]

    def decode(ids: list[int]) -> str:
        return b"".join(parts[i] for i in ids).decode(errors="replace")

    pieces = Pieces(decode, [0])
    assert [pieces.add(i) for i in (1, 2, 3, 4)] == ["", "", "€", "b"]
    assert pieces.add(7) == ""
    assert [pieces.add(5), pieces.add(6)] == ["", "�c"]
    assert pieces.add(1) == "" and pieces.add(2, True) == "�"
    # a space before a word is known by what stands before it
    pieces = Pieces(lambda ids: " ".join("xyz"[i] for i in ids), [0])
    assert [pieces.add(1), pieces.add(2)] == [" y", " z"]
