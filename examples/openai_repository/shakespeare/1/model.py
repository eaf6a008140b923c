"""Writes on as Shakespeare might have: each word is drawn from those that follow the last two in text.txt.

One response for each word, so that clients of OpenAI's API can stream it. A temperature of 0 takes the most frequent
word; a seed makes the draw repeatable.
"""

import random
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

import triton_python_backend_utils as pb_utils

USUAL_TOKENS = 32


def value(request, name, default):
    """The first element of an optional input."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy().reshape(-1)[0]


class TritonPythonModel:
    def initialize(self, args):
        text = (Path(args["model_repository"]) / "text.txt").read_text()
        self.words = text.split()
        self.after = defaultdict(Counter)
        for i, word in enumerate(self.words[1:], 1):
            for n in (1, 2):
                self.after[tuple(self.words[max(0, i - n) : i])][word] += 1

    def next_word(self, past, temperature, chance):
        found = self.after.get(tuple(past[-2:])) or self.after.get(tuple(past[-1:]))
        if found is None:
            return chance.choice(self.words) if temperature else self.words[0]
        if not temperature:
            return found.most_common(1)[0][0]
        weights = [count ** (1 / temperature) for count in found.values()]
        return chance.choices(list(found), weights)[0]

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            past = value(request, "PROMPT", b"").decode().split()
            read = len(past)
            seed = value(request, "SEED", None)
            chance = random.Random(None if seed is None else int(seed))
            temperature = float(value(request, "TEMPERATURE", 1.0))
            most = int(value(request, "MAX_TOKENS", USUAL_TOKENS))
            for i in range(most):
                if request.is_cancelled():
                    break
                word = self.next_word(past, temperature, chance)
                past.append(word)
                last = word[-1] in ".?!" or i == most - 1
                reason = ("stop" if word[-1] in ".?!" else "length") if last else ""
                piece = word if not read and not i else f" {word}"
                sender.send(
                    pb_utils.InferenceResponse(
                        [
                            pb_utils.Tensor("TEXT", np.array([piece.encode()], dtype=object)),
                            pb_utils.Tensor("FINISH_REASON", np.array([reason.encode()], dtype=object)),
                            pb_utils.Tensor("PROMPT_TOKENS", np.array([read], np.int32)),
                            pb_utils.Tensor("COMPLETION_TOKENS", np.array([1], np.int32)),
                        ]
                    )
                )
                if last:
                    break
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
