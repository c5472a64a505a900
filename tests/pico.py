"""Tiny models that every test shares: real Hugging Face classes, thousands of parameters."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any


def pico_config(family: str = "llama", **changes: Any) -> Any:
    """Configuration of a pico model of a family: llama, qwen2, gpt2 or bert."""
    from transformers import BertConfig, GPT2Config, LlamaConfig, Qwen2Config

    if family == "gpt2":
        return GPT2Config(
            **{
                "vocab_size": 128,
                "n_embd": 32,
                "n_layer": 4,
                "n_head": 4,
                "n_positions": 64,
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
                "bos_token_id": 0,
                "eos_token_id": 0,
            }
            | changes
        )
    if family == "bert":
        return BertConfig(
            **{
                "vocab_size": 128,
                "hidden_size": 32,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "intermediate_size": 64,
                "max_position_embeddings": 64,
                "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
            }
            | changes
        )
    kind = {"llama": LlamaConfig, "qwen2": Qwen2Config}[family]
    return kind(
        **{
            "vocab_size": 128,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        | changes
    )


def save_pico(directory: Path, family: str = "llama", *, seed: int = 0, dtype: str = "float32", **changes: Any) -> Path:
    """Write a randomly initialised pico causal LM (masked LM for bert) to `directory` and return it.

    A process makes each model once; the same arguments give the same bytes.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in _made(family, seed, dtype, _Changes(changes)).items():
        (directory / name).write_bytes(content)
    return directory


class _Changes(dict):
    """Changes as part of a cache's key: compared whole, for a value may be a list, which has no hash."""

    def __hash__(self) -> int:
        return 0


@cache
def _made(family: str, seed: int, dtype: str, changes: _Changes) -> dict[str, bytes]:
    """The files of a model, by name."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    torch.manual_seed(seed)
    factory = AutoModelForMaskedLM if family == "bert" else AutoModelForCausalLM
    model = factory.from_config(pico_config(family, **changes)).to(getattr(torch, dtype))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}
