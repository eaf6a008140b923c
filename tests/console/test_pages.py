"""The console's files: complete, of the right types, without anything from elsewhere or inline."""

from __future__ import annotations

import re
from pathlib import Path

from neptrio.console import pages

ASSETS = Path(pages.__file__).parent / "assets"
FILES = {item.name: item.read_text(encoding="utf-8") for item in ASSETS.iterdir()}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}


def test_every_file_has_a_path_and_a_type() -> None:
    found = pages.read()
    assert set(found) == {"/console/"} | {f"/console/{name}" for name in FILES if name != "index.html"}
    assert found["/console/main.js"].content_type == b"text/javascript; charset=utf-8"
    assert found["/console/console.css"].content_type == b"text/css; charset=utf-8"
    assert len({page.etag for page in found.values()}) == len(found)


def test_a_known_etag_is_answered_without_the_body() -> None:
    page = pages.read()["/console/main.js"]
    assert page.answer(None)[0] == 200
    for known in (page.etag, b'"other", W/' + page.etag, b"*"):
        status, headers, body = page.answer(known)
        assert (status, body) == (304, b"") and (b"etag", page.etag) in headers
    assert page.answer(b'"other"')[0] == 200


def test_what_the_files_name_exists() -> None:
    for name, text in FILES.items():
        for path in re.findall(r'(?:href|src)="(/[^"]*)"', text):
            assert path in pages.read(), f"{name} names {path}"
        for other in re.findall(r'from "\./([^"]+)"', text):
            assert other in FILES, f"{name} imports {other}"
    reached, waiting = set[str](), ["main.js"]
    while waiting:
        name = waiting.pop()
        reached.add(name)
        waiting += [other for other in re.findall(r'from "\./([^"]+)"', FILES[name]) if other not in reached]
    assert reached == set(SCRIPTS), "scripts that nothing imports"


def test_every_imported_name_is_exported() -> None:
    for name, text in SCRIPTS.items():
        for names, other in re.findall(r'import \{([^}]*)\} from "\./([^"]+)"', text):
            for wanted in (part.strip() for part in names.split(",")):
                pattern = rf"export (?:async )?(?:function|const|class) {wanted}\b"
                assert re.search(pattern, FILES[other]), f"{name} imports {wanted} from {other}"
                body = text.split(f'from "./{other}"', 1)[1]
                assert re.search(rf"\b{wanted}\b", body), f"{name} does not use {wanted}"


def test_nothing_comes_from_elsewhere() -> None:
    for name, text in FILES.items():
        text = text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:(?://|\\/)[a-z0-9]|[\"'`]//[a-z]", text), f"{name} names another host"
        assert not re.search(r"@import|\burl\(", text), name


def test_nothing_is_inline_and_no_text_becomes_markup() -> None:
    page = FILES["index.html"]
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|javascript:", page)
    for name, text in SCRIPTS.items():
        forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser"
        assert not re.search(forbidden, text), name
        assert "localStorage.setItem" not in text or name == "main.js", "only the colours are kept for ever"


def test_the_policy_allows_this_origin_alone() -> None:
    rules = dict(rule.strip().split(b" ", 1) for rule in pages.POLICY.split(b";"))
    assert rules[b"default-src"] == b"'none'" and rules[b"frame-ancestors"] == b"'none'"
    assert rules[b"script-src"] == rules[b"style-src"] == rules[b"connect-src"] == b"'self'"
    assert b"unsafe" not in pages.POLICY
