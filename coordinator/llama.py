"""Meta's original Llama files (`params.json`, `consolidated.*.pth`) as a Hugging Face checkpoint.

Names, the order of the rotary dimensions and the way tensors are cut over model-parallel files follow the converter that
transformers carried until version 4 (models/llama/convert_llama_weights_to_hf.py); version 5 has none. The files are
pickles: they are read with `weights_only=True`, which builds tensors and plain containers and runs nothing else.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from facility.exchange.errors import InputError

if TYPE_CHECKING:
    import torch

NAMES = {
    "tok_embeddings": ("model.embed_tokens", None),
    "norm": ("model.norm", None),
    "output": ("lm_head", 0),
    "attention.wq": ("self_attn.q_proj", 0),
    "attention.wk": ("self_attn.k_proj", 0),
    "attention.wv": ("self_attn.v_proj", 0),
    "attention.wo": ("self_attn.o_proj", 1),
    "feed_forward.w1": ("mlp.gate_proj", 0),
    "feed_forward.w2": ("mlp.down_proj", 1),
    "feed_forward.w3": ("mlp.up_proj", 0),
    "attention_norm": ("input_layernorm", None),
    "ffn_norm": ("post_attention_layernorm", None),
}
"""Meta's name, Hugging Face's, and the dimension along which the files cut it (None: whole in each, or by shape)."""
KEY = re.compile(r"(?:layers\.(\d+)\.)?([a-z_.0-9]+)\.weight")


def convert_llama(folder: Path, out: Path) -> Path:
    """Write `out`; returns it. Raises `InputError` for files that are not Meta's, and for pickles that hold anything but tensors."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    params = read_params(folder)
    shards = [read_shard(path) for path in sorted(folder.glob("consolidated.*.pth"))]
    if not shards:
        raise InputError(f"{folder} has params.json but no consolidated.*.pth; is the download complete?")
    heads = int(params["n_heads"])
    tensors: dict[str, torch.Tensor] = {}
    for key in shards[0]:
        if key == "rope.freqs":
            continue
        found = KEY.fullmatch(key)
        if found is None or found[2] not in NAMES:
            raise InputError(
                f"{folder} holds {key!r}, which is no tensor of Meta's Llama; expected files as Meta gives them"
            )
        if missing := [number for number, shard in enumerate(shards) if key not in shard]:
            raise InputError(
                f"{key} is in consolidated.00.pth but not in number {missing[0]}; is the download complete?"
            )
        name, dimension = NAMES[found[2]]
        parts = [shard[key] for shard in shards]
        if found[2] == "tok_embeddings":  # Llama 1 and 2 cut the width, Llama 3 the vocabulary
            dimension = 1 if parts[0].shape[1] < int(params["dim"]) else 0
        whole = parts[0] if dimension is None or len(parts) == 1 else torch.cat(parts, dim=dimension)
        if found[2] in ("attention.wq", "attention.wk"):
            groups = heads if found[2].endswith("q") else int(params.get("n_kv_heads") or heads)
            rows, columns = whole.shape
            whole = whole.view(groups, rows // groups // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
        place = f"model.layers.{found[1]}.{name}" if found[1] is not None else name
        tensors[f"{place}.weight"] = whole.contiguous()
    rows = tensors["model.layers.0.mlp.gate_proj.weight"].shape[0]
    config = LlamaConfig(
        **_config(params),
        intermediate_size=rows,
        vocab_size=tensors["model.embed_tokens.weight"].shape[0],
        tie_word_embeddings="lm_head.weight" not in tensors,
        architectures=["LlamaForCausalLM"],
        dtype=str(tensors["model.norm.weight"].dtype).removeprefix("torch."),
    )
    out.mkdir(parents=True)
    config.save_pretrained(out)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def read_params(folder: Path) -> dict[str, Any]:
    """Meta's `params.json`."""
    try:
        params = json.loads((folder / "params.json").read_text())
        for key in ("dim", "n_layers", "n_heads"):
            if int(params[key]) < 1:
                raise ValueError(key)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder}/params.json is not as Meta writes it: {error!r}; expected dim, n_layers, n_heads"
        ) from None
    return dict(params)


def read_shard(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of one file, mapped into memory, nothing in it executed."""
    import pickle

    import torch

    try:
        shard = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise InputError(
            f"{path} cannot be read as tensors and nothing else: {str(error).splitlines()[0]:.200}; get it from Meta again"
        ) from None
    if not isinstance(shard, dict) or not all(isinstance(value, torch.Tensor) for value in shard.values()):
        raise InputError(f"{path} holds other things than tensors by name; expected Meta's consolidated.NN.pth")
    return shard


def _config(params: dict[str, Any]) -> dict[str, Any]:
    """Hugging Face's names; positions and the scaling of Llama 3.1 and later as Meta published the models."""
    theta, scaled = float(params.get("rope_theta", 10000.0)), bool(params.get("use_scaled_rope"))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if scaled:
        factor = 8.0 if int(params["dim"]) >= 4096 else 32.0  # 3.1 and later: 8, but the small models of 3.2: 32
        rope |= {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    return {
        "hidden_size": int(params["dim"]),
        "num_hidden_layers": int(params["n_layers"]),
        "num_attention_heads": int(params["n_heads"]),
        "num_key_value_heads": int(params.get("n_kv_heads") or params["n_heads"]),
        "rms_norm_eps": float(params.get("norm_eps", 1e-5)),
        "max_position_embeddings": 131072 if scaled else 8192 if theta > 1e5 else 4096,
        "rope_parameters": rope,
    }
