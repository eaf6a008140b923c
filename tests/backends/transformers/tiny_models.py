"""Tiny Hugging Face models with random weights, and a tokenizer of whole words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "looked",
    "at",
    "me",
    "in",
    "a",
    "very",
    "long",
    "dream",
    "of",
    "fish",
    "milk",
    "sun",
    "rain",
    ".",
    "!",
    "anna",
    "paris",
]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.content }} {% endfor %}{% if add_generation_prompt %}. {% endif %}"
)
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


def tokenizer(folder: Path, pairs: bool = True, **more: Any) -> Any:
    """Writes a tokenizer and returns it; `pairs`: with the special tokens of an encoder."""
    import tokenizers
    import transformers

    vocabulary = {word: i for i, word in enumerate((*SPECIAL, *dict.fromkeys(WORDS)))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if pairs:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
    roles = {"unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
    roles |= (
        {"cls_token": "[CLS]", "sep_token": "[SEP]"}
        if pairs
        else {"bos_token": "[CLS]", "eos_token": "[SEP]"}
    )
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **roles, **more)
    whole.save_pretrained(folder)
    return whole


def bert(folder: Path, kind: str, **more: Any) -> Any:
    """A BERT with a head, e.g. ForSequenceClassification."""
    import torch
    import transformers

    torch.manual_seed(len(kind))
    config = transformers.BertConfig(
        **SIZES, max_position_embeddings=24, pad_token_id=0, initializer_range=0.5, **more
    )
    model = getattr(transformers, f"Bert{kind}")(config).eval()
    model.save_pretrained(folder)
    tokenizer(folder)
    return model


def llama(folder: Path, **more: Any) -> Any:
    """A decoder."""
    import torch
    import transformers

    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        **SIZES, num_key_value_heads=1, max_position_embeddings=64, bos_token_id=2, eos_token_id=3, pad_token_id=0,
        initializer_range=0.6, **more,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    tokenizer(folder, False, chat_template=CHAT)
    return model


def mistral(folder: Path) -> Any:
    """A decoder whose layers see a window of tokens alone."""
    import torch
    import transformers

    torch.manual_seed(8)
    config = transformers.MistralConfig(
        **SIZES, num_key_value_heads=1, max_position_embeddings=64, sliding_window=4, bos_token_id=2, eos_token_id=3,
        initializer_range=0.6,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config).eval()
    model.save_pretrained(folder)
    tokenizer(folder, False)
    return model


def mamba(folder: Path) -> Any:
    """A decoder that keeps a state of a text."""
    import torch
    import transformers

    torch.manual_seed(3)
    config = transformers.MambaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4, bos_token_id=2, eos_token_id=3, pad_token_id=0,
        initializer_range=0.6,
    )  # fmt: skip
    model = transformers.MambaForCausalLM(config).eval()
    model.save_pretrained(folder)
    tokenizer(folder, False)
    return model


def vit(folder: Path) -> Any:
    """A model of images of 16 x 16 pixels."""
    import torch
    import transformers

    torch.manual_seed(9)
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8,
        num_labels=3, id2label={0: "cat", 1: "dog", 2: "fish"}, initializer_range=0.5,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config).eval()
    model.save_pretrained(folder)
    processor = {
        "image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": 16, "width": 16},
        "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model
