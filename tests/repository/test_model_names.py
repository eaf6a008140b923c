"""Labels of versions and aliases, without a server (repository.model_names, config.version_labels)."""

from __future__ import annotations

from typing import Any

import pytest

from neptrio.config import model_config, version_labels
from neptrio.errors import InvalidArgument
from neptrio.repository.model_names import Change, Names, parse


def config(labels: str = "", aliases: str = "") -> Any:
    text = "".join(
        f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}'
        for key, value in (("version_labels", labels), ("aliases", aliases))
        if value
    )
    return model_config.parse_text(text, "config.pbtxt")


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def names(told: list[str]) -> Names:
    return Names(told.append)


def test_the_configuration_is_read() -> None:
    assert version_labels.labels(config(" stable = 3 , canary=4")) == {"stable": 3, "canary": 4}
    assert version_labels.labels(config()) == {}
    assert version_labels.aliases(config(aliases="prod, main,prod")) == ("prod", "main")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("stable", "with the numbers of versions, got 'stable'"),
        ("stable=", "with the numbers of versions, got 'stable='"),
        ("stable=0", "got 'stable=0'"),
        ("stable=-1", "got 'stable=-1'"),
        ("stable=" + "9" * 19, "with the numbers of versions"),
        ("stable=3,", "a version label has letters"),
        ("3=4", "does not begin with a digit and is no longer than 128 characters, got '3'"),
        ("+3=4", "got '\\+3'"),
        ("a/b=4", "got 'a/b'"),
        ("l" * 129 + "=4", "no longer than 128"),
        ("stable=3,stable=4", "has the label 'stable' twice"),
        (",".join(f"l{i}=1" for i in range(65)), "at most 64 version labels, got 65"),
    ],
)
def test_wrong_labels_are_refused(text: str, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        version_labels.labels(config(text))


@pytest.mark.parametrize("text", ["a/b", "..", "a,,b", "a b", "é", "a" * 129])
def test_wrong_aliases_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="an alias of a model has letters"):
        version_labels.aliases(config(aliases=text))
    with pytest.raises(InvalidArgument, match="at most 64 aliases, got 65"):
        version_labels.aliases(config(aliases=",".join(f"a{i}" for i in range(65))))


def test_a_call_is_read() -> None:
    change = parse(
        {"labels": {"stable": 3, "canary": "4", "old": None}, "aliases": {"prod": True, "x": None}}
    )
    assert change == Change({"stable": 3, "canary": 4, "old": None}, {"prod": True, "x": False})
    assert not parse({})


@pytest.mark.parametrize(
    "document",
    [
        {"labels": []},
        {"aliases": ["prod"]},
        {"label": {}},
        {"labels": {"stable": True}},
        {"labels": {"stable": 1.0}},
        {"labels": {"stable": "x"}},
        {"labels": {"stable": 0}},
        {"labels": {"stable": 1 << 63}},
        {"labels": {"7": 1}},
        {"aliases": {"prod": 1}},
        {"aliases": {"prod": False}},
        {"aliases": {"a/b": True}},
        {"labels": {f"l{i}": None for i in range(65)}},
        {"aliases": {f"l{i}": None for i in range(65)}},
    ],
)
def test_a_wrong_call_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        parse(document)


def test_what_is_set_counts_before_the_configuration(names: Names, told: list[str]) -> None:
    names.configure("m", config("stable=3,canary=4", "prod"))
    names.change("m", Change({"stable": 4, "extra": 3}))
    assert names.labels("m") == {"stable": 4, "canary": 4, "extra": 3}
    assert names.label("m", "stable") == 4 and names.label("m", "none") is None
    names.configure("m", config("stable=1", "main"))
    assert names.labels("m") == {"stable": 4, "extra": 3}
    assert names.aliased == {"main": "m"}
    assert names.document("m") == {
        "labels": {"extra": 3, "stable": 4},
        "aliases": ["main"],
        "set": {"labels": ["extra", "stable"], "aliases": []},
    }
    names.change("m", Change({"stable": None}))
    assert names.labels("m") == {"stable": 1, "extra": 3}, "the configuration's counts again"
    names.unset("m")
    assert names.labels("m") == {"stable": 1}
    assert set(told) == {"m", "prod", "main"}


def test_an_alias_moves(names: Names, told: list[str]) -> None:
    names.configure("a", config(aliases="prod"))
    names.configure("b", config(aliases="prod"))
    assert names.aliased == {"prod": "a"}, "the first keeps it"
    names.change("b", Change(aliases={"prod": True}))
    assert names.aliased == {"prod": "b"} and names.aliases("a") == [] and names.aliases("b") == ["prod"]
    told.clear()
    names.change("c", Change(aliases={"prod": True}))
    assert names.aliased == {"prod": "c"} and sorted(told) == ["c", "prod"]
    names.change("b", Change(aliases={"prod": False}))
    assert names.aliased == {"prod": "c"}, "it was no longer that model's to remove"
    names.forget("c")
    assert names.aliased == {"prod": "a"}
    names.forget("a")
    assert names.aliased == {"prod": "b"}, "whose configuration says it still"
    names.forget("b")
    assert names.aliased == {}


def test_labels_name_versions_that_are_there(names: Names) -> None:
    with pytest.raises(InvalidArgument, match=r"'stable' of model 'm' names version 3, .* it has 1, 4"):
        names.check("m", {4, 1}, Change(), config("stable=3"))
    names.configure("m", config("stable=3"))
    names.change("m", Change({"canary": 4}))
    with pytest.raises(InvalidArgument, match=r"'canary' .* names version 4, which is not there: it has 3"):
        names.check("m", [3], Change(), config("stable=3"))
    names.check("m", [3], Change({"canary": 3}), config("stable=3"))
    names.check("m", [3], Change({"canary": None}), config("stable=3"))
    with pytest.raises(InvalidArgument, match="names version 5, which is not there: it has none"):
        names.check("m", [], Change({"stable": 5}))
    names.check("m", [3], Change({"stable": 3}))  # a call is not refused for the label that it leaves
    names.change("m", Change({"stable": 4}))
    with pytest.raises(InvalidArgument, match="'stable' of model 'm' names version 3"):
        names.check("m", [4], Change({"stable": None}))  # which the configuration says


def test_aliases_are_one_models(names: Names) -> None:
    names.configure("a", config(aliases="prod"))
    with pytest.raises(InvalidArgument, match="alias 'prod' of model 'b' is one of model 'a' already"):
        names.check("b", [1], Change(), config(aliases="prod"))
    names.check("a", [1], Change(), config(aliases="prod"))
    with pytest.raises(InvalidArgument, match="is the model's own name"):
        names.check("b", [1], Change(aliases={"b": True}))
    with pytest.raises(InvalidArgument, match="at most 64 aliases, got 65"):
        names.check("b", [1], Change(aliases={f"x{i}": True for i in range(65)}))


def test_of_several_that_claim_an_alias_the_next_has_it(names: Names) -> None:
    names.tell("b", {}, ())
    names.tell("a", {}, ("prod", "x"))
    names.tell("b", {}, ("prod",))
    assert names.aliased["prod"] == "a"
    names.tell("a", {}, ("prod",))
    assert names.aliased == {"prod": "a"}, "it has kept what it says still"
    names.tell("a", {}, ())
    assert names.aliased == {"prod": "b"} and names.aliases("b") == ["prod"]
    names.forget("b")
    assert names.aliased == {}
