"""Models for tests of OpenAI's API: `echo` (streams the prompt's letters), `bytes` (its bytes), `endless`,
`whole`, `embed`, `talks` (takes conversations itself), and `plain` without a mapping."""

from __future__ import annotations

from pathlib import Path

from tests.support.repository import write_model

ECHO = """
import numpy as np
import triton_python_backend_utils as pb_utils

END = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def text(name, value):
    return pb_utils.Tensor(name, np.array([value.encode()], dtype=object))


def count(name, value):
    return pb_utils.Tensor(name, np.array([value], np.int32))


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            prompt = pb_utils.get_input_tensor_by_name(request, "P").as_numpy().reshape(-1)[0].decode()
            limit = pb_utils.get_input_tensor_by_name(request, "M")
            limit = len(prompt) if limit is None else int(limit.as_numpy().reshape(-1)[0])
            sender = request.get_response_sender()
            for letter in prompt[:limit]:
                if letter == "!":
                    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("no shouting")))
                    break
                sender.send(pb_utils.InferenceResponse(
                    [text("T", letter), count("R", len(prompt)), count("W", 1)]
                ))
            sender.send(pb_utils.InferenceResponse([text("F", "length" if limit < len(prompt) else "stop")]))
            sender.send(flags=END)
"""
ENDLESS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            piece = np.array([b"ab" * (1 << 16)], dtype=object)
            while not request.is_cancelled():
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("T", piece)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
WHOLE = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        made = []
        for request in requests:
            prompt = pb_utils.get_input_tensor_by_name(request, "P").as_numpy()
            upper = np.array([p.decode().upper().encode() for p in prompt.reshape(-1)], dtype=object)
            made.append(pb_utils.InferenceResponse([pb_utils.Tensor("T", upper.reshape(prompt.shape))]))
        return made
"""
EMBED = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        made = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "P").as_numpy()
            rows = np.array(
                [[len(t), np.nan if t == b"nan" else t.count(b"a"), 0.5] for t in texts.reshape(-1)], np.float32
            )
            read = np.array([[len(t)] for t in texts.reshape(-1)], np.int32)
            made.append(pb_utils.InferenceResponse([pb_utils.Tensor("E", rows), pb_utils.Tensor("R", read)]))
        return made
"""
BYTES = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            prompt = pb_utils.get_input_tensor_by_name(request, "P").as_numpy().reshape(-1)[0]
            sender = request.get_response_sender()
            for byte in prompt:
                piece = np.array([bytes([byte])], dtype=object)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("T", piece)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
TALKS = """
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        made = []
        for request in requests:
            prompt = pb_utils.get_input_tensor_by_name(request, "P")
            messages = pb_utils.get_input_tensor_by_name(request, "C")
            if messages is None:
                text = "prompt " + prompt.as_numpy().item().decode()
            else:
                assert prompt is None
                text = " ".join(f"{m['role']}={m['content']}" for m in json.loads(messages.as_numpy().item()))
            made.append(pb_utils.InferenceResponse([pb_utils.Tensor("T", np.array([[text.encode()]], object))]))
        return made
"""
PROMPT = 'input [ { name: "P" data_type: TYPE_STRING dims: [ 1 ] } %s ]'
DECOUPLED = "model_transaction_policy { decoupled: true }"


def role(name: str, tensor: str) -> str:
    """A parameter `openai.NAME` of a configuration."""
    return f'parameters {{ key: "openai.{name}" value {{ string_value: "{tensor}" }} }} '


def write_models(folder: Path) -> None:
    """Writes the models named above."""
    limit = ', { name: "M" data_type: TYPE_INT32 dims: [ 1 ] optional: true }'
    outputs = "".join(
        f'{{ name: "{name}" data_type: {kind} dims: [ 1 ] }},'
        for name, kind in (
            ("T", "TYPE_STRING"),
            ("F", "TYPE_STRING"),
            ("R", "TYPE_INT32"),
            ("W", "TYPE_INT32"),
        )
    )
    roles = {"prompt": "P", "max_tokens": "M", "text": "T", "finish_reason": "F"}
    roles |= {"prompt_tokens": "R", "completion_tokens": "W", "chat_template": "chat.jinja"}
    echo = f'backend: "python" {DECOUPLED} {PROMPT % limit} output [ {outputs[:-1]} ] '
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.content == 'no' %}"
    template += "{{ raise_exception('not this') }}{% endif %};{% endfor %}"
    files = {"1/model.py": ECHO, "chat.jinja": template}
    write_model(folder, "echo", echo + "".join(role(*one) for one in roles.items()), files)
    text = (
        'output [ { name: "T" data_type: TYPE_STRING dims: [ 1 ] } ] '
        + role("prompt", "P")
        + role("text", "T")
    )
    endless = f'backend: "python" {DECOUPLED} {PROMPT % ""} {text}'
    write_model(folder, "endless", endless, {"1/model.py": ENDLESS})
    write_model(folder, "bytes", endless, {"1/model.py": BYTES})
    whole = f'backend: "python" max_batch_size: 4 {PROMPT % ""} {text}'
    write_model(folder, "whole", whole, {"1/model.py": WHOLE})
    either = ", ".join(
        f'{{ name: "{name}" data_type: TYPE_STRING dims: [ 1 ] optional: true }}' for name in "PC"
    )
    talks = f'backend: "python" max_batch_size: 4 input [ {either} ] {text}' + role("messages", "C")
    write_model(folder, "talks", talks, {"1/model.py": TALKS})
    embed = f'backend: "python" max_batch_size: 4 dynamic_batching {{ }} {PROMPT % ""} '
    embed += 'output [ { name: "E" data_type: TYPE_FP32 dims: [ 3 ] }, { name: "R" data_type: TYPE_INT32 dims: [ 1 ] } ]'
    embed += role("input", "P") + role("embedding", "E") + role("prompt_tokens", "R")
    write_model(folder, "embed", embed, {"1/model.py": EMBED})
    plain = f'backend: "python" max_batch_size: 4 {PROMPT % ""} output [ {{ name: "T" data_type: TYPE_STRING dims: [ 1 ] }} ]'
    write_model(folder, "plain", plain, {"1/model.py": WHOLE})
