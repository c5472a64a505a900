"""An embedding that is trained whole beside adapters, where the head has its weight: what is exported is the model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from coordinator.models.adapter_export import export_adapter
from coordinator.models.adapter_import import import_adapter, index_of
from facility.exchange.checkpoints.adapters import CONFIG, PREFIX, is_adapter, write_adapter_config
from facility.exchange.checkpoints.checkpoint import ADAPTER, INDEX, open_checkpoint
from facility.exchange.errors import InputError
from facility.exchange.files.durable import write_json
from facility.exchange.messages.layout import LoraSettings
from facility.rounds.evaluation import whole
from tests.pico import save_pico

EMBEDDING = {"llama": "model.embed_tokens", "gpt2": "transformer.wte"}
LAYER = {"llama": "model.layers.0.mlp.down_proj", "gpt2": "transformer.h.0.mlp.c_proj"}
IDS = torch.arange(12).reshape(2, 6)


def loaded(model: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def round_model(root: Path, family: str) -> tuple[Path, torch.Tensor]:
    """`root`/base, and `root`/round of a federation that trained its embedding and one layer; what that computes."""
    model = loaded(save_pico(root / "base", family, tie_word_embeddings=True))
    embedding, layer = model.get_submodule(EMBEDDING[family]), model.get_submodule(LAYER[family])
    outputs, inputs = layer.weight.T.shape if family == "gpt2" else layer.weight.shape
    draw = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, inputs, generator=draw), torch.randn(outputs, 2, generator=draw)
    whole = torch.randn(embedding.weight.shape, generator=draw)
    names = [f"{LAYER[family]}.lora_A.weight", f"{LAYER[family]}.lora_B.weight", f"{EMBEDDING[family]}.weight"]
    tensors = dict(zip([PREFIX + name for name in names], (a, b, whole), strict=True))
    (root / "round").mkdir()
    save_file(tensors, root / "round" / ADAPTER)
    settings = LoraSettings(rank=2, alpha=3.0, rslora=True, modules_to_save=[EMBEDDING[family].rpartition(".")[2]])
    write_adapter_config(root / "round", settings, tensors)
    with torch.no_grad():
        product = settings.alpha / settings.rank**0.5 * b @ a
        layer.weight += product.T if family == "gpt2" else product
        embedding.weight.copy_(whole)
    assert embedding.weight is model.lm_head.weight
    return root / "base", logits(model)


@pytest.mark.parametrize("family", sorted(EMBEDDING))
def test_the_exported_adapter_and_the_merged_model_have_the_trained_weight_in_the_head_too(tmp_path: Path, family: str):
    """peft left the base's weight there, so that neither was the model that the facilities had trained and reported."""
    base, expected = round_model(tmp_path, family)
    assert (expected - logits(loaded(base))).abs().max() > 1
    export_adapter(tmp_path / "round", base=base, out=tmp_path / "out", merged=True)
    torch.testing.assert_close(logits(loaded(tmp_path / "out" / "merged")), expected, atol=1e-4, rtol=1e-4)
    beside = PeftModel.from_pretrained(loaded(base), tmp_path / "out")
    torch.testing.assert_close(logits(beside), expected, atol=1e-4, rtol=1e-4)


def test_a_federation_goes_on_from_what_was_exported_with_one_weight(tmp_path: Path):
    base, _ = round_model(tmp_path, "llama")
    export_adapter(tmp_path / "round", base=base, out=tmp_path / "out")
    said = import_adapter(tmp_path / "out", base=base, out=tmp_path / "next")
    assert '"modules_to_save": ["embed_tokens"]' in said
    trained, begun = open_checkpoint(tmp_path / "round"), open_checkpoint(tmp_path / "next")
    assert {name for name in begun.tensors if is_adapter(name)} == set(trained.tensors)
    assert all(torch.equal(begun.read(name), trained.read(name)) for name in trained.tensors)


@pytest.mark.parametrize("odd", ["alone", "apart"])
def test_an_adapter_whose_head_is_another_than_its_embedding_is_not_imported(tmp_path: Path, odd: str):
    """Training would have begun from another model than the one that was published."""
    base, _ = round_model(tmp_path, "llama")
    export_adapter(tmp_path / "round", base=base, out=tmp_path / "out")
    tensors = load_file(tmp_path / "out" / ADAPTER)
    if odd == "alone":
        shutil.copyfile(tmp_path / "round" / CONFIG, tmp_path / "out" / CONFIG)
        del tensors[f"{PREFIX}lm_head.weight"]
    else:
        tensors[f"{PREFIX}lm_head.weight"] += 1
    save_file(tensors, tmp_path / "out" / ADAPTER)
    with pytest.raises(InputError, match="apart from 'lm_head.weight'"):
        import_adapter(tmp_path / "out", base=base, out=tmp_path / "next")


@pytest.mark.parametrize("alone", [True, False])
def test_what_is_scored_on_tasks_is_the_trained_model(tmp_path: Path, alone: bool):
    """Adapters alone over their base, and a model of a round that holds both."""
    base, expected = round_model(tmp_path, "llama")
    if not alone:
        names = sorted(open_checkpoint(tmp_path / "round").tensors)
        write_json(tmp_path / "round" / INDEX, index_of(open_checkpoint(base), names))
        for name in ("config.json", "model.safetensors"):
            shutil.copyfile(base / name, tmp_path / "round" / name)
    (tmp_path / "folder").mkdir()
    scored = whole(tmp_path / "round", str(base) if alone else "", tmp_path / "folder")
    torch.testing.assert_close(logits(loaded(scored)), expected, atol=1e-4, rtol=1e-4)
