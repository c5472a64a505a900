"""Meta's original Llama files: converted ones compute what the model computed, and a pickle that would run something does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from coordinator.llama import NAMES, convert_llama
from coordinator.model import convert
from facility.exchange.errors import InputError


def small(theta: float) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=40,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    return LlamaForCausalLM(config)


def as_meta(model: LlamaForCausalLM, folder: Path, shards: int, *, vocabulary: bool) -> Path:
    """The same weights as Meta would give them: its names, its order of the rotary dimensions, cut over files."""
    config = model.config
    back = {ours: (meta, dimension) for meta, (ours, dimension) in NAMES.items()}
    files: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    for name, tensor in model.state_dict().items():
        stem = name.removesuffix(".weight")
        layer = ""
        if stem.startswith("model.layers."):
            number, _, stem = stem.removeprefix("model.layers.").partition(".")
            layer = f"layers.{number}."
        meta, dimension = back[stem]
        if meta in ("attention.wq", "attention.wk"):
            heads = config.num_attention_heads if meta.endswith("q") else config.num_key_value_heads
            rows, columns = tensor.shape
            tensor = tensor.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)
        if meta == "tok_embeddings":
            dimension = 0 if vocabulary else 1
        parts = [tensor] * shards if dimension is None else list(tensor.chunk(shards, dim=dimension))
        for file, part in zip(files, parts, strict=True):
            file[f"{layer}{meta}.weight"] = part.clone()
    folder.mkdir()
    for number, file in enumerate(files):
        torch.save(file | {"rope.freqs": torch.ones(4)}, folder / f"consolidated.{number:02}.pth")
    params = {
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "norm_eps": 1e-5,
        "vocab_size": -1,
        "rope_theta": config.rope_parameters["rope_theta"],
    }
    (folder / "params.json").write_text(json.dumps(params))
    return folder


@pytest.mark.parametrize(
    ("shards", "vocabulary", "theta"), [(1, False, 10000.0), (2, False, 10000.0), (2, True, 500000.0)]
)
def test_the_converted_model_computes_the_same(tmp_path: Path, shards: int, vocabulary: bool, theta: float):
    model = small(theta)
    told = convert(
        str(as_meta(model, tmp_path / "meta", shards, vocabulary=vocabulary)),
        tmp_path / "out",
        dtype="float32",
        revision="main",
    )
    assert "loaded and evaluated" in told
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(
            AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits, model(ids).logits
        )


class Harmful:
    def __reduce__(self):
        return Path.touch, (Path("pwned"),)


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    folder = as_meta(small(1e4), tmp_path / "meta", 1, vocabulary=False)
    torch.save({"norm.weight": Harmful()}, folder / "consolidated.00.pth")
    with pytest.raises(InputError, match="tensors and nothing else"):
        convert_llama(folder, tmp_path / "out")
    assert not (tmp_path / "pwned").exists() and not (tmp_path / "out").exists()


def test_files_that_are_not_metas_are_refused(tmp_path: Path):
    folder = as_meta(small(1e4), tmp_path / "meta", 2, vocabulary=False)
    torch.save({"transformer.h.0.weight": torch.ones(1)}, folder / "consolidated.00.pth")
    with pytest.raises(InputError, match=r"no tensor of Meta's Llama"):
        convert_llama(folder, tmp_path / "out")
    for file in folder.glob("*.pth"):
        file.unlink()
    with pytest.raises(InputError, match="no consolidated"):
        convert_llama(folder, tmp_path / "out")
    (folder / "params.json").write_text('{"dim": 32}')
    with pytest.raises(InputError, match="not as Meta writes it"):
        convert_llama(folder, tmp_path / "out")
