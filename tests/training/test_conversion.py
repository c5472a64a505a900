"""Laws of checkpoints whose tensor names transformers converts: read as by `from_pretrained`, sent as published."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from coordinator.model import convert_model
from facility.exchange.checkpoints.checkpoint import open_checkpoint, save_tensors
from facility.exchange.checkpoints.conversion import check_names, conversion_of
from facility.exchange.errors import CheckpointError
from facility.exchange.messages.report import read_report
from facility.training.shards import LocalShard, add_shards
from tests.training.families import save_tiny, tiny_config
from tests.training.federation import largest_difference, weights, write_dataset
from tests.training.layouts import arguments, rounds_in

EXPERTS = ["mixtral", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "granitemoe", "phimoe"]
RENAMED = ["gpt_neox", *EXPERTS]


@pytest.mark.parametrize("family", [*RENAMED, "olmo_hybrid", "nomic_bert"])
def test_every_element_comes_from_where_transformers_takes_it(tmp_path: Path, family: str):
    import transformers

    factory = "AutoModelForMaskedLM" if family == "nomic_bert" else "AutoModelForCausalLM"
    kind = getattr(transformers, factory)
    model = save_tiny(tmp_path / "model", family, factory=factory)
    checkpoint = open_checkpoint(model)
    with torch.device("meta"):
        skeleton = kind.from_config(tiny_config(family))
    conversion = conversion_of(skeleton, checkpoint)
    loaded = kind.from_pretrained(model).state_dict()
    tied = {name for name in conversion.missing if loaded[name].data_ptr() in {t.data_ptr() for t in loaded.values()}}
    assert set(conversion.missing) == tied and not conversion.unused
    for name, expected in loaded.items():
        if name in conversion.pieces:
            found = torch.cat(
                [
                    checkpoint.read(run.tensor).flatten()[run.start : run.start + run.count]
                    for run in conversion.pieces[name].between(0, expected.numel())
                ]
            )
            assert torch.equal(found, expected.flatten()), name
        elif name in conversion.same:
            assert torch.equal(checkpoint.read(conversion.same[name]), expected), name
    assert conversion.used == set(checkpoint.tensors)


def test_experts_are_read_as_runs_of_whole_stored_tensors(tmp_path: Path):
    """Four experts' `w1` and `w3` are eight runs, so a rank that holds two experts reads the bytes of two."""
    model = save_tiny(tmp_path / "model", "mixtral")
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        skeleton = AutoModelForCausalLM.from_config(tiny_config("mixtral"))
    conversion = conversion_of(skeleton, open_checkpoint(model))
    pieces = conversion.pieces["model.layers.0.mlp.experts.gate_up_proj"]
    half = 2 * 2 * 64 * 32
    runs = list(pieces.between(half, 2 * half))
    stored = "model.layers.0.block_sparse_moe.experts.{}.{}.weight"
    assert [(r.tensor, r.start, r.count) for r in runs] == [
        (stored.format(expert, w), 0, 64 * 32) for expert in (2, 3) for w in ("w1", "w3")
    ]
    (part,) = pieces.between(70, 75)
    assert (part.at, part.start, part.count) == (70, 70, 5)


def test_what_was_left_of_some_experts_is_added_where_others_left_nothing(tmp_path: Path):
    """An expert to which no token was routed did not move, so a residual holds nothing of it."""
    from transformers import AutoModelForCausalLM

    model = save_tiny(tmp_path / "model", "mixtral")
    checkpoint = open_checkpoint(model)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(tiny_config("mixtral"))
    conversion = conversion_of(skeleton, checkpoint)
    name = "model.layers.0.mlp.experts.down_proj"
    pieces = conversion.pieces[name]
    stored = {one: checkpoint.read(one).float() for one in pieces.tensors}
    unmoved = pieces.tensors[1]
    (tmp_path / "left").mkdir()
    save_tensors(tmp_path / "left", ((one, value) for one, value in stored.items() if one != unmoved))
    shape = (len(stored), *stored[unmoved].shape)
    parameter = torch.nn.Parameter(torch.ones(shape), requires_grad=False)
    whole = LocalShard(name=name, shape=shape, first=0, tensor=parameter, parameter=parameter)
    add_shards([whole], open_checkpoint(tmp_path / "left"), conversion, 0.5)
    expected = [torch.zeros(shape[1:]) if one == unmoved else value for one, value in stored.items()]
    assert torch.equal(parameter, 1 + 0.5 * torch.stack(expected))


def loss_of(model: Path, dataset: Path) -> float:
    """Loss on the validation blocks of what `from_pretrained` makes of a directory."""
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.from_numpy(np.load(dataset / "validation.npy").astype(np.int64))
    with torch.no_grad():
        return net(input_ids=ids, labels=ids).loss.item()


LAYOUTS = {"fsdp": {}, "pipeline": {"layout": {"stages": 2, "units": [[0, 3], [3, 6]]}}}


def trained_in_every_layout(tmp_path: Path, families: list[str]) -> None:
    dataset = write_dataset(tmp_path / "data")
    models = {family: save_tiny(tmp_path / family / "model", family) for family in families}
    rounds_in([(f, arguments(tmp_path / f / "one", models[f], dataset)) for f in families])
    cases = [
        (f"{f} {name}", arguments(tmp_path / f / name, models[f], dataset, **layout))
        for f in families
        for name, layout in LAYOUTS.items()
    ]
    rounds_in(cases, ranks=2)
    for f in families:
        one = tmp_path / f / "one/out"
        assert weights(one).keys() == weights(models[f]).keys(), f
        for name in LAYOUTS:
            # AdamW's first steps turn a rounding of a gradient near zero into some 1e-5 (the rate is 2e-3).
            assert largest_difference(one, tmp_path / f / name / "out") < 3e-5, (f, name)
        report = read_report(one)
        assert report.loss_received == pytest.approx(loss_of(models[f], dataset), abs=1e-5), f
        assert report.loss_returned == pytest.approx(loss_of(one, dataset), abs=1e-5), f
        assert report.loss_returned < report.loss_received, f


@pytest.mark.slow
def test_experts_and_pythia_train_alike_in_every_layout_and_load_with_from_pretrained(tmp_path: Path):
    trained_in_every_layout(tmp_path, ["gpt_neox", "mixtral", "deepseek_v3"])


@pytest.mark.slow
def test_every_converted_family_trains_alike_in_every_layout(tmp_path: Path):
    trained_in_every_layout(tmp_path, [f for f in RENAMED if f not in ("gpt_neox", "mixtral", "deepseek_v3")])


@pytest.mark.parametrize("family", ["gpt_neox", "mixtral"])
def test_the_coordinators_copy_keeps_the_published_names_and_is_checked(tmp_path: Path, family: str):
    source = save_tiny(tmp_path / "source", family)
    told = convert_model(str(source), tmp_path / "out", dtype="float32", revision="main")
    assert "every tensor has its place" in told and re.search(r"parameters, [1-9][\d.]* [kM]B in float32", told), told
    assert weights(tmp_path / "out").keys() == weights(source).keys()
    assert largest_difference(source, tmp_path / "out") == 0


def test_a_checkpoint_that_lacks_a_tensor_is_refused_before_any_job(tmp_path: Path):
    model = save_tiny(tmp_path / "model", "mixtral")
    tensors = weights(model)
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_tensors(model, tensors.items())
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.experts.gate_up_proj.*made of 7 stored tensors"):
        check_names(model)
    tensors = {name: t for name, t in tensors.items() if name != "model.norm.weight"}
    save_tensors(model, tensors.items())
    with pytest.raises(CheckpointError):
        check_names(model)
    whole = save_tiny(tmp_path / "whole", "gpt_neox")
    save_tensors(whole, [(n, t) for n, t in weights(whole).items() if n != "embed_out.weight"])
    with pytest.raises(CheckpointError, match=r"no tensor for 'lm_head.weight'"):
        check_names(whole)


def test_a_quantised_checkpoint_is_refused_by_name(tmp_path: Path):
    """Its scales lie in other tensors: trained without them, its numbers would be others."""
    model = save_tiny(tmp_path / "model", "llama")
    name = "model.layers.0.mlp.up_proj.weight"
    save_tensors(model, [(n, t.to(torch.float8_e4m3fn) if n == name else t) for n, t in weights(model).items()])
    with pytest.raises(CheckpointError, match=f"{name}' is stored as F8_E4M3: the checkpoint is quantised"):
        check_names(model)
