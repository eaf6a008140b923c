"""What a folder of a Hugging Face model holds: its task, its tensors and its limits.

Rules:
 1. Only JSON is read here. Nothing of the folder is run, here or later: code in it (auto_map) is refused where it is
    needed, and weights are safetensors, because others are pickles.
 2. The task is that of the architecture in config.json, unless the parameter `task` names another one.
 3. What is given twice must agree or is refused; what is not there is told by its name, with what to do.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

TASKS = (
    "text-classification",
    "token-classification",
    "fill-mask",
    "feature-extraction",
    "image-classification",
    "text-generation",
)
# the end of an architecture's name -> task
ENDS = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "Model": "feature-extraction",
}
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
TOKENIZERS = (
    "tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model",
)  # fmt: skip
# whose positions begin behind the number of the padding token
SHIFTED = (
    "roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer", "roberta-prelayernorm", "data2vec-text",
)  # fmt: skip
SANE = 1 << 24  # tokens: a tokenizer that knows no limit has 10**30
POOLINGS = ("mean", "cls", "max", "last")
FLAGS = ("true", "false")
ROWS = 32  # max_batch_size where the configuration has none


@dataclass
class Parameters:
    """The parameters of a configuration that this backend has. "" and 0 stand for those that are not given."""

    task: str = ""
    dtype: str = ""
    pooling: str = ""
    normalize: str = ""
    truncation: str = ""
    aggregation: str = ""
    top_k: int = 0
    max_length: int = 0
    max_new_tokens: int = 0
    max_sequences: int = 0


CHOICES = {
    "task": TASKS,
    "dtype": ("auto", "float32", "float16", "bfloat16"),
    "pooling": POOLINGS,
    "normalize": FLAGS,
    "truncation": FLAGS,
    "aggregation": ("none", "simple"),
}
NUMBERS = ("top_k", "max_length", "max_new_tokens", "max_sequences")


def parameters(config: dict[str, Any]) -> Parameters:
    """The parameters of a configuration. Raises ValueError for values that cannot be."""
    given = {key: str(value.get("string_value", "")) for key, value in config.get("parameters", {}).items()}
    if given.get("trust_remote_code", "false").lower() != "false":
        raise ValueError(
            "parameter 'trust_remote_code': code in a model's folder is never run; write a Python model that imports it"
        )
    found = Parameters()
    for key, allowed in CHOICES.items():
        value = given.get(key, "")
        if value and value not in allowed:
            raise ValueError(f"parameter '{key}' must be one of {', '.join(allowed)}, got '{value}'")
        setattr(found, key, value)
    for key in NUMBERS:
        value = given.get(key, "")
        if value and (not value.isdecimal() or not 1 <= int(value) < 1 << 31):
            raise ValueError(f"parameter '{key}' must be a number above 0, got '{value}'")
        setattr(found, key, int(value or 0))
    return found


@dataclass
class Folder:
    """What a folder holds."""

    path: str
    config: dict[str, Any]
    task: str
    architecture: str  # "" where another class than the one of the architecture is loaded
    tokenizer: bool
    longest: int  # tokens of a text, 0 where nothing limits them
    truncates: bool
    pooling: str = "mean"
    normalizes: bool = False
    labels: list[str] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Numbers of a token's vector, -1 where config.json has another word for it."""
        for key in ("hidden_size", "d_model", "n_embd", "dim"):
            if isinstance(self.config.get(key), int):
                return int(self.config[key])
        return -1


def read_json(path: str) -> Any:
    """A JSON file of the folder, None where there is none. Raises ValueError."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _object(path: str) -> dict[str, Any]:
    found = read_json(path)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no JSON object")
    return found


def read(path: str, wanted: Parameters) -> Folder:
    """What the folder holds. Raises ValueError."""

    def inside(*names: str) -> str:
        return os.path.join(path, *names)

    if not os.path.isfile(inside("config.json")):
        raise ValueError(
            f"{path} has no config.json: it must be a model's folder as save_pretrained() writes it"
        )
    config = _object(inside("config.json"))
    _check_weights(path)
    if os.path.exists(inside("adapter_config.json")):
        raise ValueError(
            f"{path} holds an adapter: merge it into its model, model.merge_and_unload().save_pretrained(FOLDER)"
        )
    task, architecture = _task(path, config, wanted.task)
    tokenizer_config = _object(inside("tokenizer_config.json"))
    tokenizer = task != "image-classification" and any(os.path.exists(inside(name)) for name in TOKENIZERS)
    if task == "text-generation" and not tokenizer:
        raise ValueError(
            f"{path} has no tokenizer ({', '.join(TOKENIZERS)}): text cannot be made without one"
        )
    sentences = _object(inside("sentence_bert_config.json"))
    found = Folder(path, config, task, architecture, tokenizer, 0, wanted.truncation == "true")
    limits = [
        wanted.max_length,
        _positions(config),
        _number(tokenizer_config.get("model_max_length")),
        _number(sentences.get("max_seq_length")),
    ]
    found.longest = min((limit for limit in limits if limit), default=0)
    if sentences and not wanted.truncation:  # the library that made the folder cuts texts
        found.truncates = True
    labels = config.get("id2label") or {}
    count = len(labels) or _number(config.get("num_labels")) or 2
    found.labels = [str(labels.get(str(i), f"LABEL_{i}")) for i in range(count)]
    if task == "feature-extraction":
        found.pooling, found.normalizes = _pooling(path)
        found.pooling = wanted.pooling or found.pooling
        found.normalizes = found.normalizes if not wanted.normalize else wanted.normalize == "true"
    return found


def _check_weights(path: str) -> None:
    listed = _object(os.path.join(path, WEIGHTS[1])).get("weight_map")
    for name in sorted({str(one) for one in listed.values()} if isinstance(listed, dict) else ()):
        if not name.endswith(".safetensors") or os.path.basename(name) != name:
            raise ValueError(
                f"{path}/{WEIGHTS[1]} names '{name}': expected files of this folder that end with .safetensors"
            )
    if any(os.path.isfile(os.path.join(path, name)) for name in WEIGHTS):
        return
    others = sorted(name for name in os.listdir(path) if name.endswith(PICKLES))
    if others:
        raise ValueError(
            f"{path} has its weights in {others[0]}: that is a pickle, which runs whatever code is in it. Where you trust "
            "it, write safetensors: transformers.AutoModelFor...from_pretrained(FOLDER).save_pretrained(ANOTHER)"
        )
    raise ValueError(f"{path} has no {' or '.join(WEIGHTS)}")


def _task(path: str, config: dict[str, Any], wanted: str) -> tuple[str, str]:
    """The task, and the class that has it."""
    names = config.get("architectures") or [""]
    name = str(names[0])
    own = next((task for end, task in ENDS.items() if name.endswith(end)), "")
    if wanted and wanted != own:
        return wanted, ""
    if not own:
        what = f"the architecture '{name}'" if name else "no architecture"
        raise ValueError(
            f"{path}/config.json has {what}: served are {', '.join(TASKS)}; the parameter 'task' names one of them"
        )
    return own, name


def _number(value: Any) -> int:
    return int(value) if isinstance(value, (int, float)) and 0 < value < SANE else 0


def _positions(config: dict[str, Any]) -> int:
    for key in ("max_position_embeddings", "n_positions", "max_seq_len"):
        found = _number(config.get(key))
        if found:
            shift = int(config.get("pad_token_id") or 0) + 1 if config.get("model_type") in SHIFTED else 0
            return max(found - shift, 1)
    return 0


def _pooling(path: str) -> tuple[str, bool]:
    """How sentence-transformers makes a text's vector of those of its tokens, and whether its length is 1."""
    modules = read_json(os.path.join(path, "modules.json"))
    if modules is None:
        return "mean", False
    kinds = {str(row.get("type", "")).rpartition(".")[2]: row for row in modules}
    others = sorted(set(kinds) - {"Transformer", "Pooling", "Normalize"})
    if others:
        raise ValueError(f"{path}/modules.json has a module '{others[0]}', which is not served")
    if "Pooling" not in kinds:
        return "mean", "Normalize" in kinds
    pooling = _object(os.path.join(path, str(kinds["Pooling"].get("path", "")), "config.json"))
    chosen = [
        name
        for name, key in (
            ("mean", "mean_tokens"),
            ("cls", "cls_token"),
            ("max", "max_tokens"),
            ("last", "lasttoken"),
        )
        if pooling.get(f"pooling_mode_{key}")
    ]
    mode = pooling.get("pooling_mode")
    if isinstance(mode, str):
        chosen = ["last" if mode == "lasttoken" else mode]
    unknown = [key for key, value in pooling.items() if key.startswith("pooling_mode_") and value is True]
    if len(chosen) != 1 or chosen[0] not in POOLINGS or len(unknown) > 1:
        raise ValueError(
            f"{path} pools tokens in a way that is not served: the parameter 'pooling' names one of {', '.join(POOLINGS)}"
        )
    return chosen[0], "Normalize" in kinds


# ------------------------------------------------------------ tensors

TEXT = {"name": "TEXT", "data_type": "TYPE_STRING", "dims": [1], "optional": True}
PAIR = {**TEXT, "name": "TEXT_PAIR"}
IDS = {
    "name": "INPUT_IDS", "data_type": "TYPE_INT64", "dims": [-1], "optional": True, "allow_ragged_batch": True,
}  # fmt: skip
MASK = {**IDS, "name": "ATTENTION_MASK"}
RESULT = {"name": "RESULT", "data_type": "TYPE_STRING", "dims": [1]}


def _tensor(name: str, kind: str, *dims: int, optional: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "data_type": f"TYPE_{kind}", "dims": list(dims)}
    return {**found, "optional": True} if optional else found


def tensors(folder: Folder) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The inputs and outputs of the folder's task."""
    task, count = folder.task, len(folder.labels)
    if task == "image-classification":
        return [
            _tensor("IMAGE", "STRING", 1, optional=True),
            _tensor("PIXEL_VALUES", "FP32", -1, -1, -1, optional=True),
        ], [RESULT, _tensor("LOGITS", "FP32", count)]
    if task == "text-generation":
        return [
            _tensor("PROMPT", "STRING", 1, optional=True),
            _tensor("MESSAGES", "STRING", 1, optional=True),
            _tensor("INPUT_IDS", "INT64", -1, optional=True),
            _tensor("MAX_TOKENS", "INT32", 1, optional=True),
            _tensor("TEMPERATURE", "FP32", 1, optional=True),
            _tensor("TOP_P", "FP32", 1, optional=True),
            _tensor("SEED", "INT64", 1, optional=True),
        ], [
            _tensor("TEXT", "STRING", 1),
            _tensor("TOKENS", "INT64", -1),
            _tensor("FINISH_REASON", "STRING", 1),
            _tensor("PROMPT_TOKENS", "INT32", 1),
            _tensor("COMPLETION_TOKENS", "INT32", 1),
        ]
    inputs = [TEXT, IDS, MASK] if folder.tokenizer else [IDS, MASK]
    if task == "feature-extraction":
        width = folder.width
        return inputs, [
            _tensor("EMBEDDING", "FP32", width),
            _tensor("HIDDEN_STATES", "FP32", -1, width),
            _tensor("PROMPT_TOKENS", "INT32", 1),
        ]
    if task == "text-classification":
        if folder.tokenizer:
            inputs = [TEXT, PAIR, IDS, MASK]
        return inputs, [RESULT, _tensor("LOGITS", "FP32", count)]
    if task == "token-classification":
        return inputs, [RESULT, _tensor("LOGITS", "FP32", -1, count)]
    return inputs, [RESULT, _tensor("LOGITS", "FP32", -1, -1)]


def mapping(folder: Folder, chats: bool) -> dict[str, str]:
    """The parameters that OpenAI's API needs, for tasks that it has. `chats`: the tokenizer has a chat template."""
    if folder.task == "feature-extraction" and folder.tokenizer:
        found = {"input": "TEXT", "embedding": "EMBEDDING", "prompt_tokens": "PROMPT_TOKENS"}
    elif folder.task == "text-generation":
        names = (
            "prompt",
            "max_tokens",
            "temperature",
            "top_p",
            "seed",
            "text",
            "finish_reason",
            "prompt_tokens",
        )
        found = {
            name: name.upper() for name in (*names, "completion_tokens", *(("messages",) if chats else ()))
        }
    else:
        found = {}
    return {f"openai.{role}": name for role, name in found.items()}


def has_chat_template(path: str) -> bool:
    """Whether the tokenizer makes prompts of conversations."""
    beside = ("chat_template.jinja", "chat_template.json")
    if any(os.path.isfile(os.path.join(path, name)) for name in beside):
        return True
    return bool(_object(os.path.join(path, "tokenizer_config.json")).get("chat_template"))
