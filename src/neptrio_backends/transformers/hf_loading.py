"""Models, tokenizers and image processors, from the folder alone.

Rules:
 1. Nothing is fetched: model.py sets the libraries' words for that before it imports them, and every call says so again.
 2. No code of the folder runs, and no pickle is read.
 3. A model whose file lacks weights is refused: they would be random numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from hf_folder import Folder

CLASSES = {
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "fill-mask": "AutoModelForMaskedLM",
    "feature-extraction": "AutoModel",
    "image-classification": "AutoModelForImageClassification",
    "text-generation": "AutoModelForCausalLM",
}
LOCAL = {"local_files_only": True, "trust_remote_code": False}


def refuse_code(folder: Folder) -> None:
    """Raises ValueError for a model that only code in its folder makes."""
    kind = folder.config.get("model_type", "")
    if kind not in transformers.CONFIG_MAPPING:
        code = (
            " It brings code for it (auto_map), which is never run." if folder.config.get("auto_map") else ""
        )
        raise ValueError(
            f"{folder.path}/config.json has the model type '{kind}', which transformers {transformers.__version__} does "
            f"not have.{code}"
        )


def model(folder: Folder, dtype: str, device: str) -> Any:
    """The model, ready to be called. Raises ValueError."""
    refuse_code(folder)
    made = getattr(transformers, CLASSES[folder.task])
    wanted: Any = getattr(torch, dtype) if dtype not in ("", "auto") else "auto"
    if folder.config.get("is_encoder_decoder") and folder.task in ("text-generation", "feature-extraction"):
        raise ValueError(
            f"{folder.path}: models with an encoder and a decoder are not served for {folder.task}"
        )
    try:
        found, told = made.from_pretrained(
            folder.path,
            dtype=wanted,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # what does not fit is told below, by its name
            **LOCAL,
        )
    except Exception as error:  # of a dozen libraries
        raise ValueError(f"{folder.path} cannot be loaded: {type(error).__name__}: {error}") from error
    others = sorted(
        str(row[0] if isinstance(row, tuple) else row) for row in told.get("mismatched_keys") or ()
    )
    if others:
        raise ValueError(
            f"{folder.path} has weights that do not fit its config.json: {others[0]} ({len(others)} of its kind) has another shape"
        )
    missing = sorted(told["missing_keys"])
    if folder.task == "feature-extraction":  # which makes its vectors of the tokens'
        missing = [name for name in missing if "pooler." not in name]
    if missing:
        raise ValueError(
            f"{folder.path} has no weights for {missing[0]} ({len(missing)} of its kind), which {folder.task} needs: the "
            "model was not trained for that"
        )
    return found.to(device).eval()


def tokenizer(folder: Folder) -> Any:
    """The tokenizer, None where the folder has none. Raises ValueError."""
    if not folder.tokenizer:
        return None
    try:
        found = transformers.AutoTokenizer.from_pretrained(folder.path, **LOCAL)
    except Exception as error:
        raise ValueError(
            f"the tokenizer of {folder.path} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if folder.task == "token-classification" and not found.is_fast:
        raise ValueError(f"{folder.path} has no tokenizer.json, which tells where in a text a token stands")
    if folder.task == "fill-mask" and found.mask_token is None:
        raise ValueError(f"the tokenizer of {folder.path} has no mask token")
    return found


def image_processor(folder: Folder) -> Any:
    """What makes pixel values of images. Raises ValueError."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ValueError("images need the package pillow: pip install pillow") from None
    try:
        return transformers.AutoImageProcessor.from_pretrained(folder.path, **LOCAL)
    except Exception as error:
        raise ValueError(
            f"the image processor of {folder.path} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
