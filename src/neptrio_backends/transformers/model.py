"""backend: "transformers": serves folders of Hugging Face models (docs/transformers.md).

Rules:
 1. The folder of the version is the model's folder as save_pretrained() writes it; nothing else is asked for, nothing fetched.
 2. Weights are loaded once for all instances on the CPU: in the process that theirs are forked from (preload).
 3. Text is made by one thread for all requests of an instance (hf_generate). Its responses are sent by coroutines, so that a
    client that reads slowly keeps nobody else waiting; an instance takes no more requests than it may have under way, so
    that the others wait in the server's queue, with its priorities and time limits.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from typing import Any

import numpy as np

os.environ.update(
    HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false"
)  # before what reads them is imported
import torch
import transformers

import hf_folder
import hf_loading
import triton_python_backend_utils as pb_utils
from hf_generate import Generator, Sequence, Unwanted
from hf_sampling import Chooser, Pieces, Sampling
from hf_tasks import Answering, Refused, array, checked_ids, one_of, texts

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
EXTRA = {
    "feature-extraction": ("HIDDEN_STATES",),
    "fill-mask": ("LOGITS",),
}  # outputs that are made where they are configured
NEW_TOKENS = 256  # of a text, where neither the request, the configuration nor the folder has a number
SEQUENCES = 16  # texts under way together
UNUSED = (
    "num_beams",
    "no_repeat_ngram_size",
    "penalty_alpha",
    "typical_p",
    "min_p",
    "bad_words_ids",
    "forced_eos_token_id",
)
_shared: dict[str, Any] = {}  # what preload() has loaded: path -> model


def _found(args: dict[str, str], config: dict[str, Any]) -> tuple[hf_folder.Folder, hf_folder.Parameters]:
    given = hf_folder.parameters(config)
    return hf_folder.read(os.path.join(args["model_repository"], args["model_version"]), given), given


def preload(args: dict[str, str]) -> None:
    """Loads the weights before instances are forked, so that they share their pages."""
    config = json.loads(args["model_config"])
    if any(group.get("kind") == "KIND_GPU" for group in config.get("instance_group", [])):
        return
    folder, given = _found(args, config)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what is forked from this process must not have had a pool of threads in it
    _shared[folder.path] = hf_loading.model(folder, given.dtype, "cpu")
    torch.set_num_threads(threads)


class TritonPythonModel:
    """An instance of a model."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Fills in tensors, batching and what OpenAI's API needs."""
        stated = config.as_dict()
        folder = hf_folder.read(config.version_directory, hf_folder.parameters(stated))
        hf_loading.refuse_code(folder)
        generates = folder.task == "text-generation"
        if generates:
            config.set_model_transaction_policy({"decoupled": True})
        else:
            if not stated.get("max_batch_size"):
                config.set_max_batch_size(hf_folder.ROWS)
            if "sequence_batching" not in stated:
                config.set_dynamic_batching()
        inputs, outputs = hf_folder.tensors(folder)
        for add, rows, there in (
            (config.add_input, inputs, stated.get("input")),
            (config.add_output, outputs, stated.get("output")),
        ):
            for row in () if there else rows:
                if row["name"] not in EXTRA.get(folder.task, ()):
                    add(row)
        if not stated.get("input") and not stated.get("output"):
            for key, value in hf_folder.mapping(folder, hf_folder.has_chat_template(folder.path)).items():
                config.set_parameter(key, value)
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Loads what the folder holds."""
        config = json.loads(args["model_config"])
        folder, given = _found(args, config)
        for kind, rows in zip(("input", "output"), hf_folder.tensors(folder), strict=True):
            known = [row["name"] for row in rows]
            unknown = [row["name"] for row in config[kind] if row["name"] not in known]
            if unknown:
                raise ValueError(
                    f"{folder.task} has no {kind} '{unknown[0]}': its {kind}s are {', '.join(known)}"
                )
        gpu = args["model_instance_kind"] == "GPU"
        device = f"cuda:{args['model_instance_device_id']}" if gpu else "cpu"
        shared = None if gpu else _shared.get(folder.path)
        model = shared if shared is not None else hf_loading.model(folder, given.dtype, device)
        if gpu:
            device_id = int(args["model_instance_device_id"])
            pb_utils.holds_memory([("GPU", device_id, torch.cuda.memory_reserved(device_id))])
        self._text: _Text | None = None
        if folder.task == "text-generation":
            if not config.get("model_transaction_policy", {}).get("decoupled") or config.get(
                "max_batch_size"
            ):
                raise ValueError(
                    "text-generation needs max_batch_size 0 and model_transaction_policy { decoupled: true }"
                )
            self._text = _Text(folder, given, model)
            return
        images = folder.task == "image-classification"
        reader = hf_loading.image_processor(folder) if images else hf_loading.tokenizer(folder)
        batched = config.get("max_batch_size", 0) > 0
        self._answering = Answering(folder, given, batched, device, model, reader)

    def execute(self, requests: list[Any]) -> Any:
        """Answers a batch, or begins to."""
        if self._text is None:
            return self._answering.answer(requests)
        for request in requests:
            self._text.begin(request)
        return None

    def finalize(self) -> None:
        """Ends what makes text."""
        if self._text is not None:
            self._text.close()


class _Text:
    """Requests for text."""

    def __init__(self, folder: hf_folder.Folder, given: hf_folder.Parameters, model: Any) -> None:
        self._folder = folder
        self._reader = hf_loading.tokenizer(folder)
        usual = model.generation_config
        ends = usual.eos_token_id if usual.eos_token_id is not None else self._reader.eos_token_id
        self._most = given.max_new_tokens or usual.max_new_tokens or NEW_TOKENS
        samples = bool(usual.do_sample)
        self._usual = Sampling(
            float(usual.temperature or 1.0) if samples else 0.0,
            float(usual.top_p or 1.0) if samples else 1.0,
            int(usual.top_k or 0) if samples else 0,
            float(usual.repetition_penalty or 1.0),
        )
        unused = [name for name in UNUSED if getattr(usual, name, None) not in (None, 0, 1, 1.0, [])]
        if unused:
            pb_utils.Logger.log_warn(
                f"generation_config.json of {folder.path}: {', '.join(unused)} has no effect here"
            )
        self._size = int(model.get_input_embeddings().weight.shape[0])
        most = given.max_sequences or SEQUENCES
        self._generator = Generator(
            model, set(ends if isinstance(ends, list) else [] if ends is None else [ends]), most
        )
        self._room = threading.Semaphore(most)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="responses", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the threads."""
        self._generator.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def begin(self, request: Any) -> None:
        """Begins a request, when there is room for it."""
        self._room.acquire()
        asyncio.run_coroutine_threadsafe(self._one(request), self._loop)

    async def _one(self, request: Any) -> None:
        sender = request.get_response_sender()
        try:
            await self._sent(request, sender)
        except Refused as error:
            code = pb_utils.TritonError.INVALID_ARG
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code)))
        except (pb_utils.TritonModelException, Unwanted):  # nobody reads it any more
            pass
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(text)))
        finally:
            self._room.release()
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _prompt(self, request: Any) -> list[int]:
        names = ["PROMPT", "MESSAGES", "INPUT_IDS"]
        name, values = one_of(request, *names)
        if name == "INPUT_IDS":
            ids: list[int] = values.ravel().tolist()
        elif name == "PROMPT":
            ids = self._reader(texts(values, name)[0])["input_ids"]
        else:
            try:
                messages = json.loads(texts(values, name)[0])
                text = self._reader.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            except Exception as error:  # of the template, which may refuse a conversation
                raise Refused(f"MESSAGES makes no prompt: {error}") from None
            ids = self._reader(text, add_special_tokens=False)["input_ids"]  # the template has them
        longest = self._folder.longest
        if longest and len(ids) >= longest:
            raise Refused(f"a prompt of {len(ids)} tokens leaves no room for text: the model takes {longest}")
        checked_ids([ids], self._size, longest)
        return ids

    def _asked(self, request: Any, longest: int) -> tuple[Sampling, int]:
        given: dict[str, Any] = {}
        for name in ("MAX_TOKENS", "TEMPERATURE", "TOP_P", "SEED"):
            found = array(request, name)
            given[name] = None if found is None else found.item()
        most = self._most if given["MAX_TOKENS"] is None else given["MAX_TOKENS"]
        if most < 1:
            raise Refused(f"MAX_TOKENS must be above 0, got {most}")
        temperature, top_p, seed = given["TEMPERATURE"], given["TOP_P"], given["SEED"]
        if temperature is not None and not 0 <= temperature < 1000:
            raise Refused(f"TEMPERATURE must be from 0 to 1000, got {temperature}")
        if top_p is not None and not 0 <= top_p <= 1:
            raise Refused(f"TOP_P must be from 0 to 1, got {top_p}")
        if seed is not None and seed < 0:
            raise Refused(f"SEED must not be negative, got {seed}")
        usual = self._usual
        how = Sampling(
            usual.temperature if temperature is None else float(temperature),
            usual.top_p if top_p is None else float(top_p),
            usual.top_k,
            usual.penalty,
            seed,
        )
        return how, min(most, longest) if longest else most

    async def _sent(self, request: Any, sender: Any) -> None:
        prompt = self._prompt(request)
        how, most = self._asked(request, max(self._folder.longest - len(prompt), 0))
        told: asyncio.Queue[tuple[int, str] | BaseException] = asyncio.Queue()

        def tell(what: tuple[int, str] | BaseException) -> None:
            self._loop.call_soon_threadsafe(told.put_nowait, what)

        over = False
        sequence = Sequence(
            prompt,
            most,
            Chooser(how),
            lambda: not over and not sender.is_cancelled(),
            lambda token, why: tell((token, why)),
            tell,
        )
        pieces = Pieces(lambda ids: str(self._reader.decode(ids, skip_special_tokens=True)), prompt)
        self._generator.add(sequence)
        try:
            while True:
                found = await told.get()
                if isinstance(found, BaseException):
                    raise found
                token, why = found
                text = pieces.add(token, bool(why))
                await sender.async_send(_piece(text, token, why, len(prompt)))
                if why:
                    return
        finally:
            over = True


def _piece(text: str, token: int, why: str, read: int) -> Any:
    return pb_utils.InferenceResponse(
        [
            pb_utils.Tensor("TEXT", np.array([text.encode()], object)),
            pb_utils.Tensor("TOKENS", np.array([token], np.int64)),
            pb_utils.Tensor("FINISH_REASON", np.array([why.encode()], object)),
            pb_utils.Tensor("PROMPT_TOKENS", np.array([read], np.int32)),
            pb_utils.Tensor("COMPLETION_TOKENS", np.array([1], np.int32)),
        ]
    )
