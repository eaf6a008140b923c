"""How a model answers OpenAI's API: which of its tensors are the prompt, the text and so on (docs/openai.md).

The parameters `openai.ROLE` of a configuration name tensors, and `openai.chat_template` a file in the model's folder. A
model with `openai.prompt` completes text, one with `openai.input` embeds it. One with `openai.messages` makes a prompt of a
conversation itself, as models do that come with their tokenizer: it is given the messages as JSON, in place of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn

from neptrio import extras
from neptrio.config.isolation import parameter
from neptrio.errors import InvalidArgument

PREFIX = "openai."
TEMPLATE = "chat_template"
TEXT = ("TYPE_STRING",)
WHOLE = ("TYPE_INT32", "TYPE_INT64", "TYPE_UINT32", "TYPE_UINT64")
REAL = ("TYPE_FP32", "TYPE_FP64")
# role -> the datatypes that its tensor may have
INPUTS = {
    "prompt": TEXT,
    "messages": TEXT,
    "input": TEXT,
    "max_tokens": WHOLE,
    "seed": WHOLE,
    "temperature": REAL,
    "top_p": REAL,
    "stop": TEXT,
}
OUTPUTS = {
    "text": TEXT,
    "finish_reason": TEXT,
    "embedding": REAL,
    "prompt_tokens": WHOLE,
    "completion_tokens": WHOLE,
}
NEEDS = {
    "prompt": "text",
    "text": "prompt",
    "messages": "prompt",
    TEMPLATE: "prompt",
    "input": "embedding",
    "embedding": "input",
}
LARGEST_TEMPLATE = 1 << 20  # bytes
RENDER_SECONDS = (
    5.0  # for a conversation, which takes microseconds: a template may loop over messages within messages
)
STILL_WANTED = (
    "_neptrio_still_wanted"  # called at the beginning of each round of a template's loops, and of its macros
)


# (messages, whether anybody still waits for the prompt) -> the prompt; raises InvalidArgument
Render = Callable[[list[dict[str, str]], Callable[[], bool]], str]


@dataclass(frozen=True)
class OpenAiMapping:
    """role -> tensor name, and the function that makes a prompt of messages where there is a chat template."""

    inputs: dict[str, str]
    outputs: dict[str, str]
    render: Render | None

    @property
    def completes(self) -> bool:
        """Whether the model completes text."""
        return "prompt" in self.inputs

    @property
    def chats(self) -> bool:
        """Whether the model completes conversations."""
        return self.render is not None or "messages" in self.inputs

    @property
    def embeds(self) -> bool:
        """Whether the model embeds text."""
        return "input" in self.inputs

    @property
    def counts(self) -> bool:
        """Whether the model says how many tokens it has read and, if it completes text, written."""
        return "prompt_tokens" in self.outputs and (not self.completes or "completion_tokens" in self.outputs)


def mapping(config: Any, folder: Path) -> OpenAiMapping | None:
    """The mapping that a complete configuration gives, None without one. Raises InvalidArgument."""
    given = {
        key.removeprefix(PREFIX): parameter(config, key)
        for key in sorted(config.parameters)
        if key.startswith(PREFIX)
    }
    if not given:
        return None
    known = {*INPUTS, *OUTPUTS, TEMPLATE}
    for role, name in given.items():
        if role not in known:
            raise InvalidArgument(
                f"parameter '{PREFIX}{role}' is unknown, expected {PREFIX} and one of {', '.join(sorted(known))}"
            )
        if role in NEEDS and NEEDS[role] not in given:
            raise InvalidArgument(f"parameter '{PREFIX}{role}' needs '{PREFIX}{NEEDS[role]}' beside it")
        if not name:
            raise InvalidArgument(f"parameter '{PREFIX}{role}' is empty")
    if "prompt" not in given and "input" not in given:
        raise InvalidArgument(f"parameters '{PREFIX}...' need '{PREFIX}prompt' or '{PREFIX}input'")
    if "prompt" in given and "input" in given:
        raise InvalidArgument(f"a model has '{PREFIX}prompt' or '{PREFIX}input', not both")
    if "messages" in given and TEMPLATE in given:
        raise InvalidArgument(f"a model has '{PREFIX}messages' or '{PREFIX}{TEMPLATE}', not both")
    inputs = _tensors(given, INPUTS, config.input, "input")
    outputs = _tensors(given, OUTPUTS, config.output, "output")
    for tensor in config.input:
        if tensor.optional:
            continue
        if tensor.name not in inputs.values():
            raise InvalidArgument(
                f"input '{tensor.name}' is neither optional nor named by a parameter '{PREFIX}...'"
            )
        if "messages" in inputs and tensor.name in (inputs["prompt"], inputs["messages"]):
            raise InvalidArgument(
                f"input '{tensor.name}' must be optional: a request has '{PREFIX}prompt' or '{PREFIX}messages'"
            )
    render = _template(folder, given[TEMPLATE]) if TEMPLATE in given else None
    return OpenAiMapping(inputs, outputs, render)


def _tensors(
    given: dict[str, str], roles: dict[str, tuple[str, ...]], tensors: Any, what: str
) -> dict[str, str]:
    found = {}
    by_name = {tensor.name: tensor for tensor in tensors}
    for role, allowed in roles.items():
        name = given.get(role)
        if name is None:
            continue
        tensor = by_name.get(name)
        if tensor is None:
            raise InvalidArgument(
                f"parameter '{PREFIX}{role}' names {what} '{name}', which the model does not have"
            )
        kind = _type_name(tensor)
        if kind not in allowed:
            raise InvalidArgument(
                f"{what} '{name}' of '{PREFIX}{role}' must be {' or '.join(allowed)}, is {kind}"
            )
        found[role] = name
    return found


def _type_name(tensor: Any) -> str:
    values = tensor.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    return str(values[tensor.data_type].name)


def _template(folder: Path, name: str) -> Render:
    if Path(name).name != name:
        raise InvalidArgument(
            f"parameter '{PREFIX}{TEMPLATE}' must name a file in the model's folder, got '{name}'"
        )
    try:
        with (folder / name).open("rb") as file:
            raw = file.read(LARGEST_TEMPLATE + 1)
    except OSError as error:
        raise InvalidArgument(f"the chat template '{name}' cannot be read: {error.strerror}") from None
    if len(raw) > LARGEST_TEMPLATE:
        raise InvalidArgument(f"the chat template '{name}' is larger than {LARGEST_TEMPLATE} bytes")
    try:
        import jinja2
        from jinja2 import nodes
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise InvalidArgument(
            f"parameter '{PREFIX}{TEMPLATE}' needs the package jinja2: {extras.install('openai')}"
        ) from None

    def refuse(message: str) -> None:
        raise InvalidArgument(str(message))

    class Environment(ImmutableSandboxedEnvironment):
        def handle_exception(self, source: str | None = None) -> NoReturn:
            if source is None:
                raise  # as it is: the frames that jinja adds refer to each other, and with them to the request
            super().handle_exception(source)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.globals["raise_exception"] = (
        refuse  # what templates of public models call for a wrong conversation
    )
    try:
        tree = environment.parse(raw.decode())
        repeated: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
        for node in repeated:
            asked = nodes.Call(nodes.Name(STILL_WANTED, "load"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(asked).set_lineno(node.lineno))
        tree.set_environment(environment)
        code = environment.compile(tree)
        template = jinja2.Template.from_code(environment, code, environment.make_globals(None))
    except (jinja2.TemplateError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the chat template '{name}' is no template: {error}") from None

    def render(messages: list[dict[str, str]], wanted: Callable[[], bool]) -> str:
        deadline = monotonic() + RENDER_SECONDS

        def still_wanted() -> str:
            if monotonic() > deadline or not wanted():
                raise InvalidArgument(
                    f"the chat template takes longer than {RENDER_SECONDS:g} seconds for this conversation"
                )
            return ""

        try:
            return template.render(
                messages=messages,
                add_generation_prompt=True,
                bos_token="",
                eos_token="",
                **{STILL_WANTED: still_wanted},
            )
        except InvalidArgument:
            raise
        except Exception as error:
            raise InvalidArgument(f"the chat template refuses the messages: {error}") from None

    return render
