"""Storage URIs of KServe as repositories: what each becomes."""

from __future__ import annotations

from pathlib import Path

import pytest

from neptrio import Server
from neptrio.serving import settings_of
from neptrio.storage_uri import resolve


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("/mnt/models", Path("/mnt/models")),
        ("models", Path("models")),
        ("odd/a://b", Path("odd/a://b")),
        ("file:///mnt/models", Path("/mnt/models")),
        ("local:///mnt/models", Path("/mnt/models")),
        ("pvc://claim/models/one", Path("/mnt/pvc/models/one")),
        ("pvc://claim", Path("/mnt/pvc")),
        ("s3://bucket/models", "s3://bucket/models"),
        ("gs://bucket/models", "gs://bucket/models"),
        ("https://models.example/repository", "https://models.example/repository"),
        ("https://store.blob.core.windows.net/box/a/b", "abfs://box@store.dfs.core.windows.net/a/b"),
        ("https://store.blob.core.windows.net/box", "abfs://box@store.dfs.core.windows.net"),
        ("hf://org/model:abc", "hf://org/model@abc"),
        ("hf://org/model", "hf://org/model"),
    ],
)
def test_what_a_uri_becomes(uri: str, expected: Path | str) -> None:
    assert resolve(uri) == expected
    settings, _ = settings_of([f"--model-repository={uri}"])
    assert settings.model_repository == (expected,)


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("oci://registry/image:1", "give --model-repository=/mnt/models"),
        ("https://models.example/m.tar.gz", "is an archive"),
        ("https://models.example/m.zip?version=1", "is an archive"),
        ("", "expected a folder or a URL, got ''"),
        ("file://", "expected a folder or a URL"),
        ("pvc://", "expected pvc://CLAIM/PATH"),
        ("pvc://claim/../../etc", "expected pvc://CLAIM/PATH"),
    ],
)
def test_what_is_refused_says_what_to_do(uri: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=problem):
        resolve(uri)
    with pytest.raises(ValueError, match=problem):
        Server(uri)
    with pytest.raises(SystemExit, match="2"):
        settings_of([f"--model-repository={uri}"])
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("name", [".hidden", "a/b", "a\0b"])
def test_names_that_no_model_can_have(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        settings_of(["--model-repository=models", f"--model-name={name}"])
    assert "expected a model's name" in capsys.readouterr().err
