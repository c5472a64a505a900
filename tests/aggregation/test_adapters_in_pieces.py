"""Adapters of linear layers that the base model stores together in one tensor, as Nomic BERT does q, k and v."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from coordinator.aggregation.first_adapters import started_from
from coordinator.aggregation.magnitudes import first_magnitudes
from coordinator.aggregation.settings import AggregationSettings
from coordinator.models.adapter_export import export_adapter
from facility.exchange.checkpoints.adapters import MAGNITUDE, PREFIX
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.errors import UpdateRefused
from facility.exchange.messages.layout import LoraSettings
from facility.exchange.messages.manifest import Manifest, read_manifest, write_manifest
from tests.aggregation import make
from tests.aggregation.make import aggregate
from tests.training.families import save_tiny

FACTORIES = {"nomic_bert": "AutoModelForMaskedLM", "hrm_text": "AutoModelForCausalLM"}
RANK = 2


def begun(directory: Path, family: str, dtype: str = "float32") -> tuple[Path, dict[str, torch.Tensor]]:
    """A model as it is sent first, and the weights of its linear layers in blocks by name."""
    import transformers

    factory = FACTORIES[family]
    model = save_tiny(directory, family, factory=factory)
    loaded = getattr(transformers, factory).from_pretrained(model, dtype=getattr(torch, dtype))
    loaded.save_pretrained(model)
    write_manifest(model, Manifest(kind="model", federation="test", round=0))
    layers = {n: m.weight.detach() for n, m in loaded.named_modules() if isinstance(m, nn.Linear) and ".layers." in n}
    assert {f"{name}.weight" for name in layers} - set(open_checkpoint(model).tensors), "none is stored in pieces"
    return model, layers


def adapters(layers: dict[str, torch.Tensor], seed: int, *, dora: bool = False) -> make.Tensors:
    draw = torch.Generator().manual_seed(seed)
    found: make.Tensors = {}
    for name, weight in layers.items():
        found[f"{PREFIX}{name}.lora_A.weight"] = torch.randn(RANK, weight.shape[1], generator=draw)
        found[f"{PREFIX}{name}.lora_B.weight"] = 0.1 * torch.randn(weight.shape[0], RANK, generator=draw)
        if dora:
            found[PREFIX + name + MAGNITUDE] = torch.linalg.norm(weight.float(), dim=1)
    return found


def update(directory: Path, tensors: make.Tensors, base: Path, facility: str) -> Path:
    make.update(directory, tensors, base=base, facility=facility)
    write_manifest(directory, dataclasses.replace(read_manifest(directory), encoding="lora"))
    return directory


@pytest.mark.parametrize("scaled", [{"alpha": 8.0}, {"alpha": 3.0, "rslora": True}], ids=["alpha", "rslora"])
def test_the_merged_model_is_the_base_and_the_mean_of_the_factors_in_every_layer(tmp_path: Path, scaled: Any):
    """The first round was refused: no stored tensor has the name of such a layer."""
    base, layers = begun(tmp_path / "m0", "nomic_bert", "bfloat16")
    settings = LoraSettings(rank=RANK, targets=[name.rpartition(".")[2] for name in layers], **scaled)
    sent = [adapters(layers, seed) for seed in range(2)]
    updates = [update(tmp_path / f"u{i}", one, base, f"f{i}") for i, one in enumerate(sent)]
    rule = AggregationSettings(rule="mean", weights="equal")
    aggregate(base=base, updates=updates, out=tmp_path / "m1", settings=rule, adapters=settings)
    export_adapter(tmp_path / "m1", base=base, out=tmp_path / "out", merged=True)
    merged = weights_of(tmp_path / "out" / "merged", "nomic_bert")
    scale = settings.alpha / (RANK**0.5 if settings.rslora else RANK)
    for name, weight in layers.items():
        a, b = (sum(one[f"{PREFIX}{name}.lora_{half}.weight"] for one in sent) / 2 for half in "AB")
        wanted = weight.double() + scale * b.double() @ a.double()
        assert (wanted - weight.double()).abs().max() > 0.05
        torch.testing.assert_close(merged[name].double(), wanted, rtol=2**-8, atol=2**-8)


def weights_of(model: Path, family: str) -> dict[str, torch.Tensor]:
    import transformers

    loaded = getattr(transformers, FACTORIES[family]).from_pretrained(model, dtype=torch.float32)
    return {name: m.weight.detach() for name, m in loaded.named_modules() if isinstance(m, nn.Linear)}


def test_magnitudes_and_a_late_step_begin_with_the_rows_of_the_pieces(tmp_path: Path):
    base, layers = begun(tmp_path / "m0", "hrm_text")
    held, told = open_checkpoint(base), LoraSettings(rank=RANK, dora=True)
    tensors = adapters(layers, 1, dora=True)
    first = update(tmp_path / "u", tensors, base, "f0")
    with started_from(first, base, 7, scratch=tmp_path) as then:
        began = make.read_all(then)
    for name, weight in layers.items():
        norms = torch.linalg.norm(weight.double(), dim=1)
        found = first_magnitudes(held, PREFIX + name + MAGNITUDE)
        assert found is not None
        torch.testing.assert_close(torch.from_numpy(found), norms)
        torch.testing.assert_close(began[PREFIX + name + MAGNITUDE].double(), norms, rtol=1e-6, atol=1e-6)
    made = aggregate(base=base, updates=[first], out=tmp_path / "m1", settings=AggregationSettings(), adapters=told)
    assert [one.facility for one in made.participants] == ["f0"]


def test_an_adapter_of_another_shape_than_its_pieces_is_refused(tmp_path: Path):
    base, layers = begun(tmp_path / "m0", "nomic_bert")
    name = next(name for name in layers if name.endswith("q_proj"))
    tall = torch.zeros(3 * len(layers[name]), layers[name].shape[1])  # as the tensor that holds three of them
    odd = update(tmp_path / "u", adapters(layers | {name: tall}, 0), base, "f0")
    with pytest.raises(UpdateRefused, match="is for a layer of shape"):
        aggregate(base=base, updates=[odd], out=tmp_path / "m1", settings=AggregationSettings(rule="mean"))
