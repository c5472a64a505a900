"""Models of the sizes that people use, with random weights, written without a framework; adapters and a base for them.

A base for rehearsals of LoRA is a sparse file: its header is real, its weights are zeros that take no disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facility.exchange.checkpoints.adapters import PREFIX, write_adapter_config
from facility.exchange.checkpoints.checkpoint import ADAPTER, ITEM_BYTES
from facility.exchange.checkpoints.writer import Planned, TensorWriter, header_of, layout_of_shards, write_index
from facility.exchange.messages.layout import LoraSettings

SHARD_BYTES = 2_000_000_000
PIECE = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama."""

    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int

    @property
    def config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "torch_dtype": "bfloat16",
        }

    def tensors(self) -> list[Planned]:
        """Every tensor in bfloat16, by its Hugging Face name."""
        h, kv = self.hidden, self.hidden // self.heads * self.key_heads
        found: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (self.vocabulary, h))]
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            found += [(f"{at}.self_attn.{name}_proj.weight", (n, h)) for name, n in (("q", h), ("k", kv), ("v", kv))]
            found += [(f"{at}.self_attn.o_proj.weight", (h, h))]
            found += [(f"{at}.mlp.{name}_proj.weight", (self.inner, h)) for name in ("gate", "up")]
            found += [(f"{at}.mlp.down_proj.weight", (h, self.inner))]
            found += [(f"{at}.{name}_layernorm.weight", (h,)) for name in ("input", "post_attention")]
        found += [("model.norm.weight", (h,)), ("lm_head.weight", (self.vocabulary, h))]
        return [Planned(name=name, dtype="BF16", shape=shape) for name, shape in found]

    @property
    def parameters(self) -> int:
        return sum(one.size for one in self.tensors()) // ITEM_BYTES["BF16"]


SHAPES = {
    "tiny": Shape(hidden=64, inner=128, layers=2, heads=4, key_heads=2, vocabulary=128),
    "150m": Shape(hidden=768, inner=2048, layers=14, heads=12, key_heads=12, vocabulary=32000),
    "500m": Shape(hidden=1280, inner=3456, layers=22, heads=20, key_heads=20, vocabulary=32000),
    "1.1b": Shape(hidden=2048, inner=5632, layers=22, heads=32, key_heads=4, vocabulary=32000),
    "3b": Shape(hidden=3200, inner=8640, layers=26, heads=32, key_heads=32, vocabulary=32000),
    "8b": Shape(hidden=4096, inner=14336, layers=32, heads=32, key_heads=8, vocabulary=128256),
}


def write_model(directory: Path, shape: Shape, *, seed: int = 0, device: str = "cpu") -> Path:
    """Random weights of a plausible magnitude (0.008 to 0.03), in shards; drawn on `device`."""
    directory.mkdir(parents=True)
    draw = drawn_on_gpu(seed) if device == "cuda" else drawn(seed)
    with TensorWriter(directory, layout_of_shards(shape.tensors(), SHARD_BYTES)) as writer:
        for name, (_, _, planned) in writer.places.items():
            for offset in range(0, planned.size, PIECE):
                writer.write(name, offset, draw(min(PIECE, planned.size - offset) // 2).data.cast("B"))
    (directory / "config.json").write_text(json.dumps(shape.config))
    return directory


def drawn(seed: int) -> Callable[[int], np.ndarray]:
    """Draws so many values, as the bits of bfloat16."""
    random = np.random.default_rng(seed)
    return lambda count: (random.integers(0, 1 << 16, count, dtype=np.uint16) & 0x80FF) | 0x3C00


def drawn_on_gpu(seed: int) -> Callable[[int], np.ndarray]:
    """The same by a GPU, other values."""
    import torch

    random = torch.Generator(device="cuda").manual_seed(seed)

    def draw(count: int) -> np.ndarray:
        bits = torch.randint(-(1 << 15), 1 << 15, (count,), dtype=torch.int16, device="cuda", generator=random)
        return ((bits & -0x7F01) | 0x3C00).cpu().numpy()

    return draw


def write_sparse_base(directory: Path, shape: Shape) -> Path:
    """A base model whose weights are holes in its files."""
    directory.mkdir(parents=True)
    layout = layout_of_shards(shape.tensors(), SHARD_BYTES)
    for name, tensors in layout.items():
        header, _, size = header_of(tensors, {"format": "pt"})
        with open(directory / name, "wb") as file:
            file.write(header)
            os.truncate(file.fileno(), size)
    write_index(directory, layout)
    (directory / "config.json").write_text(json.dumps(shape.config))
    return directory


def write_adapters(directory: Path, shape: Shape, lora: LoraSettings, *, seed: int = 0) -> Path:
    """Adapters of zeros and small numbers for the layers that `lora.targets` name, without the model below them."""
    directory.mkdir(parents=True)
    planned = []
    for one in shape.tensors():
        module = one.name.removesuffix(".weight")
        if len(one.shape) == 2 and module.rpartition(".")[2] in lora.targets:
            for factor, size in (("A", (lora.rank, one.shape[1])), ("B", (one.shape[0], lora.rank))):
                planned.append(Planned(name=f"{PREFIX}{module}.lora_{factor}.weight", dtype="F32", shape=size))
    draw = np.random.default_rng(seed)
    with TensorWriter(directory, {ADAPTER: planned}) as writer:
        for tensor in planned:
            values = draw.uniform(-0.01, 0.01, tensor.shape).astype(np.float32)
            writer.write(tensor.name, 0, values.data.cast("B"))
    write_adapter_config(directory, lora, [one.name for one in planned])
    (directory / "config.json").write_text(json.dumps(shape.config))
    return directory
