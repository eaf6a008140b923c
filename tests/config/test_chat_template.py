"""Chat templates: what they may do with a conversation, and that none of them runs for ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf import text_format

from neptrio.codec.descriptors import message_class
from neptrio.config import openai
from neptrio.errors import InvalidArgument
from tests.support.openai_models import role

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
NESTED = "{% for a in range(99999) %}" * 6 + "{% endfor %}" * 6
RECURSIVE = (
    "{% for a in [range(99999)] recursive %}{{ loop(a) if a is iterable else '' }}" + NESTED + "{% endfor %}"
)
DOUBLING = "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"


def rendering(folder: Path, template: str) -> openai.Render:
    """The function of a model whose template this is."""
    (folder / "chat.jinja").write_text(template)
    text = 'name: "m" input [ { name: "P" data_type: TYPE_STRING dims: [ 1 ] } ] '
    text += 'output [ { name: "T" data_type: TYPE_STRING dims: [ 1 ] } ] '
    text += role("prompt", "P") + role("text", "T") + role("chat_template", "chat.jinja")
    config = text_format.Parse(text, message_class("inference.ModelConfig")())
    mapping = openai.mapping(config, folder)
    assert mapping is not None and mapping.render is not None
    return mapping.render


def rounds(most: int) -> Callable[[], bool]:
    """Somebody who waits for so many rounds."""
    left = iter(range(most))
    return lambda: next(left, None) is not None


@pytest.mark.parametrize("template", [NESTED, RECURSIVE, DOUBLING])
def test_a_template_ends_when_nobody_waits_for_it(tmp_path: Path, template: str) -> None:
    render = rendering(tmp_path, template)
    with pytest.raises(InvalidArgument, match="takes longer than 5 seconds"):
        render(MESSAGES, rounds(1000))


@pytest.mark.parametrize("template", [NESTED, RECURSIVE, DOUBLING])
def test_a_template_ends_at_its_time(tmp_path: Path, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "RENDER_SECONDS", 0.01)
    with pytest.raises(InvalidArgument, match=r"takes longer than 0\.01 seconds"):
        rendering(tmp_path, template)(MESSAGES, lambda: True)


def test_what_templates_do(tmp_path: Path) -> None:
    template = (
        "{% macro one(m) %}{{ m.role }}={{ m.content }}{% endmacro %}"
        "{% for m in messages if m.content %}{% set x = loop.index %}{{ one(m) }}/{{ x }};{% else %}none{% endfor %}"
        "{% for a in [] %}{% else %}else{% endfor %}{{ add_generation_prompt }}"
    )
    assert rendering(tmp_path, template)(MESSAGES, lambda: True) == "user=a/1;assistant=b/2;elseTrue"
    with pytest.raises(InvalidArgument, match="not this"):
        rendering(tmp_path, "{{ raise_exception('not this') }}")(MESSAGES, lambda: True)
    with pytest.raises(InvalidArgument, match="is no template"):
        rendering(tmp_path, "{% for a in %}")
